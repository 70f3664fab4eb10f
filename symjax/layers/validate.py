"""Sizes and options of a model's blocks, with checks whose errors name the keys."""

import dataclasses
from typing import Any

from symjax import config, validation
from symjax.attention import MECHANISMS
from symjax.attention.kernels.dispatch import OF_RECURRENCES, present_name
from symjax.attention.mechanisms import capabilities
from symjax.layers.parts.part import Sizes, named_options
from symjax.layers.parts.table import part_of

# Keys that a block of attention and feed-forward has with any mechanism. Blocks of gau
# and flash do not have them.
OF_ATTENTION = (
    "symmetric",
    "symmetric_initial",
    "key_size",
    "differential",
    "signals",
    "depth_offset",
    "lambda_initial",
    "head_norm",
    "position_term",
    "query_key_norm",
    "key_norm",
    "output_gate",
    "short_convolution",
)
OF_BLOCKS = ("kv_heads", "feedforward", "activation")
# Values of model.attention.symmetric that make keys from queries, and those with which
# keys and values share a projection.
FROM_QUERIES, SHARED = ("plain", "pairwise", "qkv"), ("kv", "qkv")
LARGEST_GATED_SIZE = 128  # features of queries and keys of a gated block, by default
# Values that mean "not set": such options are not passed to the mechanism.
OFF = ("", 0, "auto")
# Former default values, which older checkpoints have. A mechanism without the option
# accepts and ignores them.
FORMER_DEFAULTS = {"implementation": "rows"}


def sizes(options: config.Model) -> Sizes:
    """Return the heads and sizes of a layer of attention.

    Raises:
        ValueError: heads, widths or choices that exclude each other.
    """
    heads, chosen = options.heads, options.attention
    kv_heads = options.kv_heads or heads
    key_branches = 2 if chosen.differential == "v1" else 1  # V1 splits a head
    if heads % kv_heads:
        raise ValueError(f"model.kv_heads {kv_heads} must divide model.heads {heads}")
    if chosen.symmetric in FROM_QUERIES and kv_heads != heads:
        raise ValueError(
            f"model.attention.symmetric {chosen.symmetric!r} makes one key per "
            f"query head: model.kv_heads {kv_heads} must equal model.heads {heads}"
        )
    if chosen.symmetric in FROM_QUERIES and chosen.differential == "v2":
        raise ValueError(
            f"model.attention.symmetric {chosen.symmetric!r} makes one key per "
            "query head, but model.attention.differential 'v2' gives two query heads "
            "one key"
        )
    if not options.head_size and options.width % (heads * key_branches):
        raise ValueError(
            f"model.width {options.width} must be a multiple of model.heads {heads}"
            + (" times 2 branches" if key_branches == 2 else "")
            + ", or give model.head_size"
        )
    size = options.head_size or options.width // (heads * key_branches)
    if chosen.symmetric in SHARED and chosen.key_size not in (0, size):
        raise ValueError(
            f"model.attention.symmetric {chosen.symmetric!r} makes values of {size} "
            f"features from keys: model.attention.key_size {chosen.key_size} must be 0"
        )
    key_size = chosen.key_size or size
    if chosen.signals > 1:
        queries, keys = _grouped_heads(heads, kv_heads, chosen.signals)
        if chosen.symmetric in SHARED and keys != 2 * kv_heads:
            raise ValueError(
                f"model.attention.symmetric {chosen.symmetric!r} makes a value from a "
                f"signal and a noise key: model.attention.signals {chosen.signals} "
                f"leaves {keys - kv_heads} noise keys for {kv_heads} values"
            )
        return Sizes(heads, kv_heads, queries, keys, key_size, size * key_branches)
    branches = 1 if chosen.differential == "none" else 2
    return Sizes(
        heads,
        kv_heads,
        heads * branches,
        kv_heads * key_branches,
        key_size,
        size * key_branches,
    )


def _grouped_heads(heads: int, kv_heads: int, signals: int) -> tuple[int, int]:
    """Return the numbers of query and key heads if `signals` heads share a noise head.

    Raises:
        ValueError: the heads cannot form such groups; the message names the keys.
    """
    noise = heads // signals
    shared = f"model.attention.signals {signals}"
    if heads % signals:
        raise ValueError(f"{shared} must divide model.heads {heads}")
    if max(noise, kv_heads) % min(noise, kv_heads):
        raise ValueError(
            f"{shared} leaves {noise} noise heads of model.heads {heads}: "
            f"model.kv_heads {kv_heads} must divide them or be a multiple"
        )
    return heads + noise, kv_heads + min(noise, kv_heads)


def gated_sizes(options: config.Model) -> Sizes:
    """Return the sizes of a gated block: one head, whose values have twice the width.

    Queries and keys have model.head_size features, by default half the width and at
    most 128.
    """
    size = options.head_size or max(1, min(LARGEST_GATED_SIZE, options.width // 2))
    return Sizes(1, 1, 1, 1, size, 2 * options.width)


def mechanism_options(options: config.Model, depth: int) -> tuple[tuple[str, Any], ...]:
    """Return the options of the mechanism at `depth` as (name, value).

    Options that are not set are left out. The depth chooses the mechanism
    (model.pattern); layers of one mechanism have equal options.

    Raises:
        ValueError: a value is unknown or out of range, an option is set that no
            mechanism of the model has, or choices exclude each other.
    """
    # The dtype is not checked: a layer alone also computes in float64.
    validation.check(dataclasses.replace(options, dtype="float32"), "model.")
    names = config.mechanisms_of(options)
    _check_keys(options, names)
    _check_choices(options, names)
    for name in names:
        _check_direction(options, name)
    mechanism = config.mechanism_of(options, depth)
    _check_names(options, mechanism)
    values = (part_of(mechanism).options or named_options)(options, mechanism)
    implementation = present_name(values.get("implementation", "auto"))
    if implementation not in _implementations(mechanism):
        values = {x: y for x, y in values.items() if x != "implementation"}
    chosen = tuple((key, value) for key, value in values.items() if value not in OFF)
    own = config.own_options(options)
    return chosen + tuple((x, own[x]) for x in MECHANISMS[mechanism].declared)


def _check_keys(options: config.Model, names: tuple[str, ...]) -> None:
    """Raise if a key is set that no block of the model has."""
    chosen, known = options.attention, {"mechanism", "options"}
    for name in names:
        keys = part_of(name).keys
        known |= {*named_options(options, name), *(keys(chosen) if keys else ())}
        if not MECHANISMS[name].gated:
            known |= {*OF_ATTENTION, *OF_BLOCKS}
    of_attention = [field.name for field in dataclasses.fields(chosen)]
    for prefix, group, keys in (
        ("model.", options, OF_BLOCKS),
        ("model.attention.", chosen, of_attention),
    ):
        for key in keys:
            value = getattr(group, key)
            unset = getattr(type(group)(), key), FORMER_DEFAULTS.get(key)
            if key not in known and value not in unset:
                raise ValueError(
                    f"{prefix}{key} {value!r}: {', '.join(names)} has no such option"
                )


def _check_names(options: config.Model, mechanism: str) -> None:
    """Raise if the value of an option is a name that the mechanism does not know.

    Raises:
        ValueError: naming the key, its value and the names that the mechanism knows.
    """
    for name, choices in MECHANISMS[mechanism].choices.items():
        value = getattr(options.attention, name)
        known = [*choices, *part_of(mechanism).learned]
        if value not in (*known, *OFF):
            raise ValueError(
                f"model.attention.{name} {value!r} is not one of {mechanism}: choose "
                f"from {', '.join(known)}"
            )


def _check_choices(options: config.Model, names: tuple[str, ...]) -> None:
    """Raise if choices of a model exclude each other."""
    chosen = options.attention
    _check_implementation(options, names)
    if chosen.length_base == 1:
        raise ValueError("model.attention.length_base must be 0 (off) or above 1")
    if chosen.key_norm != "none" and chosen.symmetric not in FROM_QUERIES:
        raise ValueError(
            f"model.attention.key_norm {chosen.key_norm!r} needs symmetric keys, but "
            f"model.attention.symmetric is {chosen.symmetric!r}"
        )
    if chosen.sink and "softpick" in names:
        raise ValueError(
            "model.attention.sink True is not possible with model.attention.mechanism "
            "'softpick', whose rows may have the sum 0 without a sink"
        )
    if chosen.symmetric_initial:
        _check_copied(options)
    _check_differential(options, names)
    if chosen.short_convolution and not config.is_causal(options):
        raise ValueError(
            f"model.attention.short_convolution {chosen.short_convolution} needs a "
            f"causal model, but model.kind is {options.kind!r}"
        )
    if options.positions == "alibi":
        _check_bias("model.positions 'alibi'", names)
    if chosen.position_term:
        _check_bias(f"model.attention.position_term {chosen.position_term}", names)
    if chosen.position_term % 2:
        raise ValueError(
            "model.attention.position_term must be an even number of features, got "
            f"{chosen.position_term}"
        )


def _check_copied(options: config.Model) -> None:
    """Raise if keys cannot begin with a copy of the projection of queries."""
    kind, made = options.attention.symmetric, sizes(options)
    if kind in FROM_QUERIES:
        raise ValueError(
            "model.attention.symmetric_initial needs keys with a projection of their "
            f"own, but model.attention.symmetric is {kind!r}"
        )
    if made.queries != made.keys:
        raise ValueError(
            "model.attention.symmetric_initial needs as many key heads as query heads, "
            f"got {made.keys} and {made.queries}: give model.kv_heads=0 and no "
            "differential 'v2'"
        )


def can_have_head_norm(options: config.Model, depth: int) -> bool:
    """Return whether a layer can have a norm per head.

    model.attention.head_norm=False removes the norm.
    """
    part = part_of(config.mechanism_of(options, depth))
    return options.attention.differential == "v1" or part.head_norm


def _check_differential(options: config.Model, names: tuple[str, ...]) -> None:
    """Raise if a key about λ or the norm of heads is set without effect."""
    chosen = options.attention
    for key, value, unset in (
        ("signals", chosen.signals, 1),
        ("depth_offset", chosen.depth_offset, 0),
        ("lambda_initial", chosen.lambda_initial, -1),
    ):
        if value != unset and chosen.differential != "v1":
            raise ValueError(
                f"model.attention.{key} {value} needs differential 'v1', but "
                f"model.attention.differential is {chosen.differential!r}"
            )
    if chosen.lambda_initial != -1 and not 0 <= chosen.lambda_initial < 1:
        raise ValueError(
            "model.attention.lambda_initial must be -1 (by depth), or from 0 to below "
            f"1, got {chosen.lambda_initial}"
        )
    if chosen.lambda_initial != -1 and chosen.depth_offset:
        raise ValueError(
            f"model.attention.depth_offset {chosen.depth_offset} changes a λ_init by "
            f"depth, but model.attention.lambda_initial is {chosen.lambda_initial}"
        )
    normed = any(can_have_head_norm(options, depth) for depth in range(options.depth))
    if not chosen.head_norm and not normed:
        raise ValueError(
            "model.attention.head_norm False needs differential 'v1' or a mechanism "
            f"with a norm per head: {', '.join(names)} has none"
        )


def _implementations(mechanism: str) -> tuple[str, ...]:
    """Return the values of model.attention.implementation that a mechanism has."""
    form = MECHANISMS[mechanism]
    if "implementation" not in form.options:
        return ()
    if form.state is not None:
        return tuple(OF_RECURRENCES)
    return form.implementations or ("rows", "whole")


def _check_implementation(options: config.Model, names: tuple[str, ...]) -> None:
    """Raise if a mechanism or the kind of model lacks the chosen implementation.

    If a score mechanism of the model has the implementation, all score mechanisms of
    the model must have it. If a recurrence has it, all recurrences of the model that
    take the option `implementation` must have it.
    """
    chosen = options.attention.implementation
    if chosen in ("auto", FORMER_DEFAULTS["implementation"]):
        return
    wanted = present_name(chosen)
    known = {name: _implementations(name) for name in names}
    has = [name for name in names if wanted in known[name]]
    of_scores = {MECHANISMS[name].state is None for name in has or names}
    for name, implementations in known.items():
        meant = (MECHANISMS[name].state is None) in of_scores
        if implementations and meant and name not in has:
            raise ValueError(
                f"model.attention.implementation {chosen!r} is not possible: {name} "
                f"takes {' or '.join(implementations)}"
            )
    if chosen == "ring" and not config.is_causal(options):
        raise ValueError(
            f"model.attention.implementation 'ring' needs a causal model, but "
            f"model.kind is {options.kind!r}"
        )


def _check_bias(choice: str, names: tuple[str, ...]) -> None:
    """Raise if a mechanism cannot add a bias per head to its scores."""
    if any(MECHANISMS[name].gated for name in names):
        raise ValueError(f"{choice} needs several heads: a gated block has one")
    without = [name for name in names if "bias" not in MECHANISMS[name].operands]
    if without:
        raise ValueError(
            f"{choice} is a bias of scores: {', '.join(without)} takes none"
        )


def _check_direction(options: config.Model, name: str) -> None:
    """Raise if the mechanism lacks the model's direction, causal or bidirectional."""
    direction = "causal" if config.is_causal(options) else "bidirectional"
    if not capabilities(MECHANISMS[name])[direction]:
        raise ValueError(
            f"model.attention.mechanism {name!r} has no {direction} form: model.kind "
            f"is {options.kind!r}"
        )
    if not MECHANISMS[name].keys:
        _check_no_keys(options, name)


def _check_no_keys(options: config.Model, mechanism: str) -> None:
    """Raise if an option of keys is set and the mechanism has no keys."""
    chosen = options.attention
    for key, value, allowed in (
        ("model.kv_heads", options.kv_heads, (0, options.heads)),
        ("model.attention.symmetric", chosen.symmetric, ("none", "plain")),
        ("model.attention.key_norm", chosen.key_norm, ("none",)),
        ("model.attention.symmetric_initial", chosen.symmetric_initial, (False,)),
        ("model.attention.differential", chosen.differential, ("none", "v1")),
    ):
        if value not in allowed:
            raise ValueError(
                f"{key} {value!r} is about keys: {mechanism} has none, it takes the "
                "queries as keys"
            )
