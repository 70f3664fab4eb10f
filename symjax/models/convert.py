"""Conversion of a trained model's weights to a model with another mechanism.

`convert` returns the weights, and `carried` the constants (random projections). If the
converted model computes another function than the trained one, `changes` names the
configuration keys that cause this.
"""

import dataclasses
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from symjax import config
from symjax.layers.parts.features import diagonal_blocks
from symjax.layers.parts.part import repeat_heads
from symjax.layers.parts.table import PARTS, part_of
from symjax.layers.validate import sizes
from symjax.models.build import build, weights_and_constants

# Beginnings of names of weights that keep their initial values if the source lacks
# them.
FRESH = (
    "lambda_",
    "metric",
    "query_norm",
    "own_key_norm",
    "position_term",
    "output_gate",
    "query_convolution",
    "key_convolution",
    "value_convolution",
    "head",
)
# Keys of model that may differ between the trained model (source) and the new one
# (target).
MAY_DIFFER = (
    "classes",
    "length",
    "dropout",
    "embedding_scale",
    "dtype",
    "remat",
    "scan_layers",
    "ponder",
    "rope_base",
    "rope_share",
    "rope_scaling",
    "attention",
    "pattern",
    # compared as the sizes that they resolve to
    "head_size",
    "kv_heads",
    "feedforward",
)
# `differential` of the source → values that the target may have.
COMBINED = {"none": ("none", "v1", "v2"), "v1": ("v1",), "v2": ("v2",)}

# Weights that act on queries → the weights that act on projected keys.
OF_KEYS = {"query_norm": "own_key_norm", "query_convolution": "key_convolution"}

# Keys that change the function that the same weights compute, in every model. `changes`
# adds keys that change it in some models only. No other key changes it.
CHANGING = (
    *("rope_base", "rope_share", "rope_scaling", "pattern"),
    *("attention.mechanism", "attention.depth_offset", "attention.length_base"),
    *("attention.window", "attention.mask_self", "attention.key_norm"),
    *("attention.decay", "attention.delta_gates"),
    *("attention.function", "attention.function_scale"),
    *("attention.forget", "attention.sink", "attention.normalise"),
    "attention.length_scale",
    *("attention.features", "attention.feature_norms", "attention.feature_count"),
    *("attention.query_key_norm", "attention.output_gate"),
    *("attention.short_convolution", "attention.lambda_initial", "attention.head_norm"),
)
# `symmetric` with values made from keys → `symmetric` with the same keys and separate
# values.
UNSHARED = {"kv": "none", "qkv": "plain"}

Params = dict[str, Any]


def changes(source: config.Model, target: config.Model) -> list[str]:
    """Return a line `model.KEY old → new` for each key that changes the function.

    If such a key differs, the target with the converted weights computes another
    function than the source, before any training step.
    """
    names, models = CHANGING, (source, target)
    if all("flash" in config.mechanisms_of(x) for x in models):
        names += ("attention.chunk_size",)  # other mechanisms change by rounding alone
    if all("matrix_function" in config.mechanisms_of(x) for x in models):
        names += ("length",) if config.is_causal(source) else ()  # divides QQᵀ
    keys = [UNSHARED.get(x, x) for x in (y.attention.symmetric for y in models)]
    if keys[0] == "none" != keys[1]:
        names += ("attention.symmetric",)  # two projections become their mean
    if target.attention.differential == "v1":
        names += ("attention.differential",)  # a new norm per head
    pairs = {name: [attrgetter(name)(x) for x in models] for name in names}
    before, after = map(config.own_options, models)
    shared = [name for name in before if name in after]
    pairs |= {f"attention.options.{x}": [before[x], after[x]] for x in shared}
    return [
        f"model.{name} {old!r} → {new!r}"
        for name, (old, new) in pairs.items()
        if old != new
    ]


def convert(params: Params, source: config.Model, target: config.Model) -> Params:
    """Return the weights of a `source` model for a `target` model.

    Exact conversions (the target computes the same function):
    - more key/value heads, a multiple of the source's: each is repeated, with its gates
      and feature map (constant decays need attention.decay_heads);
    - projected keys from symmetric ones, and pairwise from plain symmetric (the metric
      is the identity);
    - separate values from values shared with keys (`symmetric` kv or qkv), and kv from
      qkv;
    - gated blocks of another length: the output projection of a block is rescaled;
    - a position term where there was none (its a is 1, its w is 0);
    - differential V2 from one map (`differential` none): each query head twice, λ's
      projection 0 and values times 2, since sigmoid(0) = ½.

    Warm starts (`changes` names their keys, except classes):
    - another mechanism, option or scaling of RoPE: the weights stay as they are;
    - symmetric keys from projected ones: one projection, the mean of those of queries
      and keys;
    - differential V1 from one map: the halves of a head become its branches, each with
      its own half of a metric or feature map; the new norm per head changes the
      function;
    - other classes, or classes after masked tokens: all weights except the output
      layer.

    Weights that only the target has (λ, norms, feature maps, gates), and feature maps,
    gates and decays of another kind, keep their initial values. Weights of the source's
    mechanism that the target lacks are dropped (its norm per head, feature maps,
    decays). Random projections and their statistics are constants, which `carried`
    returns: with other constants the target computes another function.

    Raises:
        ValueError: the weights cannot be converted between these configurations (the
            message names both values), or the target has no place for a weight of the
            source.
    """
    _check(source, target)
    _check_sizes(source, target)
    fresh, _ = weights_and_constants(build(target, rngs=nnx.Rngs(0)))
    converted = dict(params)
    converted["blocks"] = {
        depth: _block(block, source, target, config.mechanism_of(source, int(depth)))
        for depth, block in params["blocks"].items()
    }
    if source.classes != target.classes:
        converted.pop("head", None)
    return _overlay(fresh, converted, "")


def carried(
    fresh: Params, known: Params, source: config.Model, target: config.Model
) -> Params:
    """Return the constants of a `target` model.

    A constant of the source is kept if it has the shape that the target needs and both
    models have the same `feature_norms` (projections) or `features` (statistics).

    Args:
        fresh: the constants of a new target model.
        known: the constants of the source.
    """
    keys = dict(pair for part in PARTS.values() for pair in part.kept_constants)

    def choose(path: tuple, new: jax.Array) -> jax.Array:
        old: Any = known
        key = keys[path[-1].key]
        for step in path:
            old = old.get(step.key) if isinstance(old, dict) else None
        same_key = getattr(source.attention, key) == getattr(target.attention, key)
        if old is not None and old.shape == new.shape and same_key:
            return old
        return new

    return jax.tree_util.tree_map_with_path(choose, fresh)


def _block(
    block: Params, source: config.Model, target: config.Model, mechanism: str
) -> Params:
    """Return the weights of one block for the target."""
    if "block" in block:
        return block | {"block": _block(block["block"], source, target, mechanism)}
    layer = block.get("attention", block)
    if layer is not block:
        layer = _attention(layer, source, target)
    if (convert_part := part_of(mechanism).convert) is not None:
        layer = convert_part(layer, source, target)
    return block | {"attention": layer} if "attention" in block else layer


def _check(source: config.Model, target: config.Model) -> None:
    """Raise if the weights cannot be converted between these configurations."""
    for field in dataclasses.fields(source):
        one, other = getattr(source, field.name), getattr(target, field.name)
        if field.name not in MAY_DIFFER and one != other:
            raise ValueError(
                f"weights of a model with {field.name} {one!r} do not fit one with "
                f"{other!r}"
            )
    for depth in range(source.depth):
        one, other = (config.mechanism_of(x, depth) for x in (source, target))
        if one == other and (check := part_of(one).check) is not None:
            check(source, target)
    before, after = source.attention, target.attention
    if after.differential not in COMBINED[before.differential]:
        raise ValueError(
            f"differential {before.differential!r} does not turn into "
            f"{after.differential!r}"
        )
    shared = [(x.attention.signals, sizes(x).kv_heads) for x in (source, target)]
    if before.signals != after.signals or (before.signals > 1 and len(set(shared)) > 1):
        raise ValueError(
            f"attention.signals {shared[0][0]} with {shared[0][1]} key/value heads "
            f"does not turn into {shared[1][0]} with {shared[1][1]}"
        )
    if before.short_convolution and after.differential != before.differential:
        raise ValueError(
            f"differential {after.differential!r} does not follow short convolutions "
            f"after differential {before.differential!r}"
        )
    turns = before.symmetric, after.symmetric
    loses_metric = before.symmetric == "pairwise" != after.symmetric
    loses_values = after.symmetric in UNSHARED and before.symmetric not in UNSHARED
    if loses_metric or loses_values or turns == ("kv", "qkv"):
        raise ValueError(
            f"symmetric {before.symmetric!r} does not turn into {after.symmetric!r}"
        )
    if after.symmetric in UNSHARED and (before.differential, after.differential) == (
        "none",
        "v2",
    ):
        raise ValueError(
            "differential 'v2' from one map has values times 2, which symmetric "
            f"{after.symmetric!r} shares with keys"
        )
    if before.key_norm != "none" and after.symmetric in ("none", "kv"):
        raise ValueError(
            f"symmetric keys with key_norm {before.key_norm!r} do not turn into "
            "projected keys, which have no such norm"
        )


def _check_sizes(source: config.Model, target: config.Model) -> None:
    """Raise if sizes differ, except key/value heads that the target repeats."""
    of_source, of_target = sizes(source), sizes(target)
    kv_heads = of_source.kv_heads
    if of_target.kv_heads % kv_heads == 0:
        kv_heads = of_target.kv_heads
    for name, key, before, after in (
        ("key/value heads", "kv_heads", kv_heads, of_target.kv_heads),
        (
            "value features a head",
            "head_size",
            of_source.value_size,
            of_target.value_size,
        ),
        (
            "hidden features",
            "feedforward",
            source.feedforward or 4 * source.width,
            target.feedforward or 4 * target.width,
        ),
    ):
        if before != after:
            raise ValueError(
                f"weights of a model with {before} {name} do not fit one with {after} "
                f"(model.{key})"
            )


def _attention(layer: Params, source: config.Model, target: config.Model) -> Params:
    """Return a layer's weights with the keys and differential maps of the target."""
    before, after = source.attention, target.attention
    layer = _ungrouped(layer, sizes(source).kv_heads, sizes(target).kv_heads)
    of_source, of_target = (
        UNSHARED.get(x.symmetric, x.symmetric) for x in (before, after)
    )
    if before.symmetric in UNSHARED and after.symmetric not in UNSHARED:
        origin = "key" if before.symmetric == "kv" else "query"
        for name in ("", "_convolution"):
            if origin + name in layer:
                layer["value" + name] = layer[origin + name]
    if of_source == "none" != of_target:
        keys = layer.pop("key")
        layer["query"] = jax.tree.map(lambda q, k: (q + k) / 2, layer["query"], keys)
        for name in OF_KEYS.values():
            layer.pop(name, None)
    elif of_source != "none" == of_target:
        layer["key"] = layer["query"]
        layer |= {key: layer[name] for name, key in OF_KEYS.items() if name in layer}
    if before.symmetric != "pairwise" == after.symmetric:
        heads = sizes(target).queries
        size = layer["query"]["kernel"].shape[1] // heads
        layer["metric"] = jnp.broadcast_to(jnp.eye(size), (heads, size, size))
    combined = before.differential, after.differential
    if combined == ("none", "v1") and before.symmetric == "pairwise":
        layer["metric"] = diagonal_blocks(layer["metric"])
    if combined == ("none", "v2"):
        twice = partial(repeat_heads, heads=target.heads, times=2)
        layer["query"] = jax.tree.map(twice, layer["query"])
        # Values times 2, since λ = ½ halves the output, before any norm per head.
        layer["value"] = jax.tree.map(lambda x: 2 * x, layer["value"])
        layer["lambda_projection"] = {"kernel": jnp.zeros((target.width, target.heads))}
    return layer


def _ungrouped(layer: Params, before: int, after: int) -> Params:
    """Repeat each key/value head `after // before` times.

    The features of a head are adjacent, those of both branches included. All heads
    share the norms of queries and keys, so these stay.
    """
    if before == after:
        return dict(layer)
    repeated = partial(repeat_heads, heads=before, times=after // before)
    grouped = ("key", "value", "key_convolution", "value_convolution")
    return layer | {x: jax.tree.map(repeated, layer[x]) for x in grouped if x in layer}


def _overlay(fresh: Params, params: Params, prefix: str) -> Params:
    """Return `fresh` with the weights of `params` in place of its own.

    Raises:
        ValueError: the target has no place for a weight that no mechanism owns, the
            source lacks a weight that the target may not initialise, or shapes differ.
    """
    # Weights of the source's mechanism, which the target's mechanism may lack.
    dropped = ("head_norm", *(x for part in PARTS.values() for x in part.owned))
    for name in params:
        if name not in fresh and name not in dropped:
            path = f"{prefix}{name}"
            raise ValueError(f"the target has no place for the weight {path!r}")
    result = {}
    for name, new in fresh.items():
        path, old = f"{prefix}{name}", params.get(name)
        if old is None:
            if not any(part.startswith((*FRESH, *dropped)) for part in path.split("/")):
                raise ValueError(f"the source has no weight {path!r}")
            result[name] = new
        elif isinstance(new, dict):
            result[name] = _overlay(new, old, f"{path}/")
        elif path == "positions" and old.shape[0] >= new.shape[0]:
            result[name] = old[: new.shape[0]]
        elif new.shape != old.shape:
            raise ValueError(
                f"weight {path!r} is {old.shape} in the source and {new.shape} in "
                "the target"
            )
        else:
            result[name] = jnp.asarray(old)
    return result
