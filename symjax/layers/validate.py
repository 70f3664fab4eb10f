"""The choices of a model's blocks, checked against each other by name."""

import dataclasses
from typing import Any

from symjax import config, validation
from symjax.attention import MECHANISMS
from symjax.attention.mechanisms import capabilities
from symjax.layers.parts.part import Sizes, named_options
from symjax.layers.parts.table import part_of

# Keys that a block of attention and feed-forward takes, whatever its mechanism. A gated
# block takes those of its mechanism alone.
OF_ATTENTION = (
    "symmetric",
    "differential",
    "depth_offset",
    "query_key_norm",
    "key_norm",
    "output_gate",
    "short_convolution",
)
OF_BLOCKS = ("kv_heads", "feedforward", "activation")
LARGEST_GATED_SIZE = 128  # features of queries and keys of a gated block, by default
# Values that choose nothing: of options that are not passed on, and of older
# checkpoints, whose models may have no such option.
OFF = ("", 0, "auto")
FORMER_DEFAULTS = {"implementation": "rows"}


def sizes(options: config.Model) -> Sizes:
    """Return the heads and sizes of a layer of attention.

    Raises:
        ValueError: heads, widths or choices that exclude each other.
    """
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


def gated_sizes(options: config.Model) -> Sizes:
    """Return the sizes of a gated block: one head, whose values have twice the width.

    Queries and keys have model.head_size features, by default half the width and at
    most 128.
    """
    size = options.head_size or max(1, min(LARGEST_GATED_SIZE, options.width // 2))
    return Sizes(1, 1, 1, 1, size, 2 * options.width)


def mechanism_options(options: config.Model, depth: int) -> tuple[tuple[str, Any], ...]:
    """The options of the mechanism at `depth`, those at their "off" value left out.

    Hashable, as jit needs.

    Raises:
        ValueError: a value is unknown or out of range, an option is set that no
            mechanism of the model has, or choices exclude each other.
    """
    # Layers compute in float64 too, which a whole model refuses.
    validation.check(dataclasses.replace(options, dtype="float32"), "model.")
    names = config.mechanisms_of(options)
    _check_keys(options, names)
    _check_choices(options, names)
    for name in names:
        _check_direction(options, name)
    mechanism = config.mechanism_of(options, depth)
    _check_words(options, mechanism)
    found = (part_of(mechanism).options or named_options)(options, mechanism)
    chosen = tuple((key, value) for key, value in found.items() if value not in OFF)
    own = config.own_options(options)
    return chosen + tuple((x, own[x]) for x in MECHANISMS[mechanism].declared)


def _check_keys(options: config.Model, names: tuple[str, ...]) -> None:
    """Raises: ValueError: a key is set that no block of the model takes."""
    chosen, taken = options.attention, {"mechanism", "options"}
    for name in names:
        keys = part_of(name).keys
        taken |= {*named_options(options, name), *(keys(chosen) if keys else ())}
        if not MECHANISMS[name].gated:
            taken |= {*OF_ATTENTION, *OF_BLOCKS}
    every = [field.name for field in dataclasses.fields(chosen)]
    for prefix, group, keys in (
        ("model.", options, OF_BLOCKS),
        ("model.attention.", chosen, every),
    ):
        for key in keys:
            value = getattr(group, key)
            unset = getattr(type(group)(), key), FORMER_DEFAULTS.get(key)
            if key not in taken and value not in unset:
                raise ValueError(
                    f"{prefix}{key} {value!r}: {', '.join(names)} has no such option"
                )


def _check_words(options: config.Model, mechanism: str) -> None:
    """Raise if an option is a word that the mechanism does not know.

    Raises:
        ValueError: naming the key, its value and the words of the mechanism.
    """
    for name, words in MECHANISMS[mechanism].choices.items():
        value = getattr(options.attention, name)
        known = [*words, *part_of(mechanism).learned]
        if value not in (*known, *OFF):
            raise ValueError(
                f"model.attention.{name} {value!r} is not one of {mechanism}: choose "
                f"from {', '.join(known)}"
            )


def _check_choices(options: config.Model, names: tuple[str, ...]) -> None:
    chosen = options.attention
    if chosen.implementation in ("fused", "hopper", "cudnn", "ring"):
        _check_implementation(options, names)
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
    if chosen.short_convolution and not config.is_causal(options):
        raise ValueError(
            f"model.attention.short_convolution {chosen.short_convolution} is causal: "
            f"model.kind is {options.kind!r}"
        )
    if options.positions == "alibi":
        _check_bias(names)


def _check_implementation(options: config.Model, names: tuple[str, ...]) -> None:
    """Raises: ValueError: a mechanism, or the kind of model, has no such execution."""
    chosen = options.attention.implementation
    lacking = []
    for name in names:
        form = MECHANISMS[name]
        if "implementation" in form.options and chosen not in form.implementations:
            lacking.append(name)
    if lacking:
        raise ValueError(
            f"model.attention.implementation {chosen!r} is of softmax alone: "
            f"{', '.join(lacking)} takes rows or whole"
        )
    if chosen == "ring" and not config.is_causal(options):
        raise ValueError(
            f"model.attention.implementation 'ring' is causal: model.kind is "
            f"{options.kind!r}"
        )


def _check_bias(names: tuple[str, ...]) -> None:
    if any(MECHANISMS[name].gated for name in names):
        raise ValueError(
            "model.positions 'alibi' is a bias of several heads: a gated block has one"
        )
    without = [name for name in names if "bias" not in MECHANISMS[name].operands]
    if without:
        raise ValueError(
            f"model.positions 'alibi' is a bias of scores: {', '.join(without)} takes "
            "none"
        )


def _check_direction(options: config.Model, name: str) -> None:
    """Raises: ValueError: the mechanism cannot read as the model reads."""
    direction = "causal" if config.is_causal(options) else "bidirectional"
    if not capabilities(MECHANISMS[name])[direction]:
        raise ValueError(
            f"model.attention.mechanism {name!r} has no {direction} form: model.kind "
            f"is {options.kind!r}"
        )
    if not MECHANISMS[name].keys:
        _check_no_keys(options, name)


def _check_no_keys(options: config.Model, mechanism: str) -> None:
    """Raises: ValueError: a key about keys is set, and the mechanism has none."""
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
