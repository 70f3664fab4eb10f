"""The choices of an attention layer, checked against each other by name."""

from typing import Any, NamedTuple

from symjax import config
from symjax.attention.mechanisms import capabilities
from symjax.layers.forms import form_of, has_keys
from symjax.layers.gau import OWN

# Keys of config.Attention that a mechanism may or may not take as an option.
OPTIONS = (
    "length_base",
    "mask_self",
    "features",
    "chunk_size",
    "implementation",
    "function",
)
# And those that one kind of mechanism has, known by an argument that it takes.
OWNED = {
    "feature_norms": "projection",
    "decay": "log_decay",
    "function_scale": "function",
}
LEARNED = ("hedgehog", "t2r")  # features that are weights of the layer


class Sizes(NamedTuple):
    """Heads of a layer. With differential V1 keys and queries have two branches."""

    heads: int  # of the output
    kv_heads: int
    queries: int  # query heads, branches counted
    keys: int
    head_size: int  # of queries and keys
    value_size: int


def sizes(options: config.Model) -> Sizes:
    """Raises: ValueError: heads, widths or combinations that exclude each other."""
    heads, chosen = options.heads, options.attention
    kv_heads = options.kv_heads or heads
    halves = 2 if chosen.differential == "v1" else 1  # of a head
    if heads % kv_heads:
        raise ValueError(f"model.kv_heads {kv_heads} must divide model.heads {heads}")
    if chosen.symmetric != "none" and kv_heads != heads:
        raise ValueError(
            f"model.attention.symmetric {chosen.symmetric!r} makes one key a query "
            f"head: model.kv_heads {kv_heads} must equal model.heads {heads}"
        )
    if chosen.symmetric != "none" and chosen.differential == "v2":
        raise ValueError(
            f"model.attention.symmetric {chosen.symmetric!r} makes one key a query "
            "head, but model.attention.differential 'v2' gives two query heads one key"
        )
    if not options.head_size and options.width % (heads * halves):
        raise ValueError(
            f"model.width {options.width} must be a multiple of model.heads {heads}"
            + (" times 2 branches" if halves == 2 else "")
            + ", or give model.head_size"
        )
    size = options.head_size or options.width // (heads * halves)
    branches = 1 if chosen.differential == "none" else 2
    return Sizes(
        heads, kv_heads, heads * branches, kv_heads * halves, size, size * halves
    )


def mechanism_options(options: config.Model, depth: int) -> dict[str, Any]:
    """The options of the mechanism at `depth`, those at their "off" value left out.

    Raises:
        ValueError: an option is set that no mechanism of the model has.
    """
    chosen, defaults = options.attention, config.Attention()
    names = options.pattern or (chosen.mechanism,)
    known = {name: _arguments(name, options) for name in names}
    for key in (*OPTIONS, *OWNED):
        value, argument = getattr(chosen, key), OWNED.get(key, key)
        if value != getattr(defaults, key) and not any(
            argument in arguments for arguments in known.values()
        ):
            raise ValueError(
                f"model.attention.{key} {value!r}: {', '.join(names)} has no such "
                "option"
            )
    _check_the_rest(options, known)
    for name in names:
        _check_direction(options, name)
    mechanism = config.mechanism_of(options, depth)
    found = {key: getattr(chosen, key) for key in OPTIONS if key in known[mechanism]}
    if mechanism == "linear" and chosen.features in LEARNED:
        found["features"] = "identity"  # the layer maps queries and keys itself
    return {key: value for key, value in found.items() if value not in ("", 0)}


def _arguments(mechanism: str, options: config.Model) -> tuple[str, ...]:
    if mechanism in config.GATED:
        return OWN[mechanism]
    form = form_of(mechanism)
    known = (*form.options, *form.operands)
    if config.is_causal(options):
        return known
    return tuple(name for name in known if name != "chunk_size")


def _check_direction(options: config.Model, mechanism: str) -> None:
    """Raises: ValueError: the mechanism cannot read as the model reads."""
    if mechanism in config.GATED:
        return
    claims, causal = capabilities(form_of(mechanism)), config.is_causal(options)
    if not claims["causal" if causal else "bidirectional"]:
        raise ValueError(
            f"model.attention.mechanism {mechanism!r} has no "
            f"{'causal' if causal else 'bidirectional'} form: model.kind is "
            f"{options.kind!r}"
        )
    if not has_keys(mechanism):
        _check_no_keys(options, mechanism)


def _check_no_keys(options: config.Model, mechanism: str) -> None:
    """Raises: ValueError: keys are to be made, and there are none."""
    chosen = options.attention
    for key, value, allowed in (
        ("model.kv_heads", options.kv_heads, (0, options.heads)),
        ("model.attention.symmetric", chosen.symmetric, ("none", "plain")),
        ("model.attention.key_norm", chosen.key_norm, ("none",)),
        ("model.attention.differential", chosen.differential, ("none", "v1")),
    ):
        if value not in allowed:
            raise ValueError(
                f"{key} {value!r} is about keys: {mechanism} has none, it takes the "
                "queries twice"
            )


def _check_the_rest(options: config.Model, known: dict[str, tuple[str, ...]]) -> None:
    chosen, defaults = options.attention, config.Attention()
    random = any("projection" in arguments for arguments in known.values())
    if (
        chosen.feature_count != defaults.feature_count
        and not random
        and chosen.features != "t2r"
    ):
        raise ValueError(
            f"model.attention.feature_count {chosen.feature_count}: "
            f"{', '.join(known)} has no random features"
        )
    scores = [x for x, arguments in known.items() if "implementation" in arguments]
    if chosen.implementation == "ring" and scores != ["softmax"]:
        raise ValueError(
            "model.attention.implementation 'ring' is of softmax alone: "
            f"{', '.join(x for x in scores if x != 'softmax')} takes rows or whole"
        )
    if chosen.implementation == "ring" and not config.is_causal(options):
        raise ValueError(
            f"model.attention.implementation 'ring' is causal: model.kind is "
            f"{options.kind!r}"
        )
    if chosen.length_base == 1:
        raise ValueError("model.attention.length_base must be 0 (off) or above 1")
    if chosen.key_norm != "none" and chosen.symmetric == "none":
        raise ValueError(
            f"model.attention.key_norm {chosen.key_norm!r} is of symmetric keys: "
            "model.attention.symmetric is 'none'"
        )
    if chosen.depth_offset and chosen.differential != "v1":
        raise ValueError(
            f"model.attention.depth_offset {chosen.depth_offset} is of differential "
            f"attention v1: model.attention.differential is {chosen.differential!r}"
        )
    if options.positions == "alibi":
        without = [name for name, arguments in known.items() if "bias" not in arguments]
        if without:
            raise ValueError(
                f"model.positions 'alibi' is a bias of scores: {', '.join(without)} "
                "takes none"
            )
