"""From one mechanism to another: the weights of a trained model, for another model."""

import dataclasses
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from symjax import config
from symjax.layers.parts.features import own_halves
from symjax.layers.parts.table import PARTS, part_of
from symjax.layers.validate import sizes
from symjax.models.build import build, parts

# Weights that only some models have. Where the source lacks them they start fresh.
FRESH = (
    "lambda_",
    "metric",
    "query_norm",
    "own_key_norm",
    "output_gate",
    "query_convolution",
    "key_convolution",
    "value_convolution",
    "head",
)
# Keys that may differ between two models whose weights fit.
FREE = (
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
    # compared as what they resolve to
    "head_size",
    "kv_heads",
    "feedforward",
)
# What the attention of a model may become, by how its maps are combined.
COMBINED = {"none": ("none", "v1", "v2"), "v1": ("v1",), "v2": ("v2",)}

# What acts on queries, and on keys that are made on their own.
OF_KEYS = {"query_norm": "own_key_norm", "query_convolution": "key_convolution"}

# Keys that change what the same weights compute, or add new weights that do. The others
# convert the weights, or have no function; `changes` adds those that do so at times.
CHANGING = (
    *("rope_base", "rope_share", "rope_scaling", "pattern"),
    *("attention.mechanism", "attention.depth_offset", "attention.length_base"),
    *("attention.window", "attention.mask_self", "attention.key_norm"),
    *("attention.decay", "attention.function", "attention.function_scale"),
    *("attention.features", "attention.feature_norms", "attention.feature_count"),
    *("attention.query_key_norm", "attention.output_gate"),
    "attention.short_convolution",
)

Params = dict[str, Any]


def changes(source: config.Model, target: config.Model) -> list[str]:
    """Name the keys by which converted weights compute another function at first."""
    names, models = CHANGING, (source, target)
    if all("flash" in config.mechanisms_of(x) for x in models):
        names += ("attention.chunk_size",)  # of other mechanisms it changes rounding
    one, other = (x.attention for x in models)
    if one.symmetric == "none":
        names += ("attention.symmetric",)  # the mean of queries and keys
    if other.differential == "v1":
        names += ("attention.differential",)  # with a new norm of every head
    pairs = {name: [attrgetter(name)(x) for x in models] for name in names}
    before, after = map(config.own_options, models)
    shared = [name for name in before if name in after]
    pairs |= {f"attention.options.{x}": [before[x], after[x]] for x in shared}
    return [
        f"model.{name} {one!r} → {other!r}"
        for name, (one, other) in pairs.items()
        if one != other
    ]


def convert(params: Params, source: config.Model, target: config.Model) -> Params:
    """The weights of a `source` model as those of a `target` model.

    - another mechanism, option or position scale: the weights as they are;
    - more key/value heads, a multiple of those there: each several times, the same
      function (constant decays by attention.decay_heads);
    - symmetric keys from own ones: the mean of both projections; own keys from
      symmetric ones, and a metric from plain ones (U = 1): the same function;
    - gated blocks of another length: the same function, their outputs scaled by it;
    - other classes, or classes after masked tokens: all but the output layer;
    - differential V2 from one map: each query head twice, λ's map 0 and the values
      twice: the same function, since sigmoid(0) = ½;
    - differential V1 from one map: the projections as they are, halves of a head
      becoming its branches; of a metric or a feature map of the head each branch gets
      its own half. A warm start: the new norm of every head changes the function.

    Weights that the target alone has (λ, norms, feature maps, gates) start fresh, so do
    feature maps of another kind; what belongs to the mechanism of the source stays
    behind (the norm of its heads, feature maps, decays). Random projections and their
    statistics are constants and not among the weights: the same function needs the
    same ones.

    Raises:
        ValueError: the models differ where weights cannot follow, naming both, or the
            target has no place for a weight of the source, naming it.
    """
    _check(source, target)
    _check_sizes(source, target)
    fresh, _ = parts(build(target, rngs=nnx.Rngs(0)))
    moved = dict(params)
    moved["blocks"] = {
        depth: _block(block, source, target, config.mechanism_of(source, int(depth)))
        for depth, block in params["blocks"].items()
    }
    if source.classes != target.classes:
        moved.pop("head", None)
    return _overlay(fresh, moved, "")


def carried(
    fresh: Params, known: Params, source: config.Model, target: config.Model
) -> Params:
    """Return the constants of a `target` model.

    A constant of the source is kept if it has the shape that the target needs and was
    drawn in the same way: an equal `feature_norms` for random projections, equal
    `features` for statistics.

    Args:
        fresh: the constants of a new target model.
        known: the constants of the source.
    """
    drawn = dict(found for part in PARTS.values() for found in part.drawn)

    def choose(path: tuple, own: jax.Array) -> jax.Array:
        given: Any = known
        name = path[-1].key
        for part in path:
            given = given.get(part.key) if isinstance(given, dict) else None
        one, other = (getattr(x.attention, drawn[name]) for x in (source, target))
        if given is not None and given.shape == own.shape and one == other:
            return given
        return own

    return jax.tree_util.tree_map_with_path(choose, fresh)


def _block(
    block: Params, source: config.Model, target: config.Model, mechanism: str
) -> Params:
    """One block's weights for the target; of a universal model those inside."""
    if "block" in block:
        return block | {"block": _block(block["block"], source, target, mechanism)}
    layer = block.get("attention", block)
    if layer is not block:
        layer = _attention(layer, source, target)
    if (own := part_of(mechanism).convert) is not None:
        layer = own(layer, source, target)
    return block | {"attention": layer} if "attention" in block else layer


def _check(source: config.Model, target: config.Model) -> None:
    for field in dataclasses.fields(source):
        one, other = getattr(source, field.name), getattr(target, field.name)
        if field.name not in FREE and one != other:
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
    if before.short_convolution and after.differential != before.differential:
        raise ValueError(
            f"differential {after.differential!r} does not follow short convolutions "
            f"after differential {before.differential!r}"
        )
    if before.symmetric == "pairwise" and after.symmetric != "pairwise":
        raise ValueError(
            f"symmetric {before.symmetric!r} does not turn into {after.symmetric!r}"
        )
    if before.key_norm != "none" and after.symmetric == "none":
        raise ValueError(
            f"symmetric keys with key_norm {before.key_norm!r} do not turn into own "
            "ones, which have no such norm"
        )


def _check_sizes(source: config.Model, target: config.Model) -> None:
    """Raises: ValueError: heads or hidden features differ; 0 is what it stands for."""
    one, other = sizes(source), sizes(target)
    kv_heads = one.kv_heads
    if other.kv_heads % kv_heads == 0:
        kv_heads = other.kv_heads
    for name, before, after in (
        ("key/value heads", kv_heads, other.kv_heads),
        ("value features a head", one.value_size, other.value_size),
        (
            "hidden features",
            source.feedforward or 4 * source.width,
            target.feedforward or 4 * target.width,
        ),
    ):
        if before != after:
            raise ValueError(
                f"weights of a model with {before} {name} do not fit one with {after}"
            )


def _attention(layer: Params, source: config.Model, target: config.Model) -> Params:
    """One layer's weights with the keys and maps of the target."""
    before, after = source.attention, target.attention
    layer = _ungrouped(layer, sizes(source).kv_heads, sizes(target).kv_heads)
    if before.symmetric == "none" and after.symmetric != "none":
        keys = layer.pop("key")
        layer["query"] = jax.tree.map(lambda q, k: (q + k) / 2, layer["query"], keys)
        for name in OF_KEYS.values():
            layer.pop(name, None)
    elif before.symmetric != "none" and after.symmetric == "none":
        layer["key"] = layer["query"]
        layer |= {key: layer[name] for name, key in OF_KEYS.items() if name in layer}
    if before.symmetric != "pairwise" and after.symmetric == "pairwise":
        heads = target.heads * (2 if after.differential == "v1" else 1)
        size = layer["query"]["kernel"].shape[1] // heads
        layer["metric"] = jnp.broadcast_to(jnp.eye(size), (heads, size, size))
    combined = before.differential, after.differential
    if combined == ("none", "v1") and before.symmetric == "pairwise":
        layer["metric"] = own_halves(layer["metric"])
    if combined == ("none", "v2"):
        twice = partial(_repeated, heads=target.heads, times=2)
        layer["query"] = jax.tree.map(twice, layer["query"])
        # twice the values, before any norm of the heads
        layer["value"] = jax.tree.map(lambda x: 2 * x, layer["value"])
        layer["lambda_projection"] = {"kernel": jnp.zeros((target.width, target.heads))}
    return layer


def _ungrouped(layer: Params, before: int, after: int) -> Params:
    """The layer with each key/value head as often as the target has heads for it.

    A head's features stand together, those of both branches too. The norms of queries
    and keys are those of all heads.
    """
    if before == after:
        return dict(layer)
    repeated = partial(_repeated, heads=before, times=after // before)
    grouped = ("key", "value", "key_convolution", "value_convolution")
    return layer | {x: jax.tree.map(repeated, layer[x]) for x in grouped if x in layer}


def _repeated(x: jax.Array, heads: int, times: int) -> jax.Array:
    """Every head's outputs [… N·H] so many times, side by side."""
    split = x.reshape(*x.shape[:-1], heads, -1)
    return jnp.repeat(split, times, axis=-2).reshape(*x.shape[:-1], -1)


def _overlay(fresh: Params, params: Params, prefix: str) -> Params:
    """`fresh` with every weight that `params` has too.

    Raises:
        ValueError: a weight would be lost that no mechanism owns, or is missing.
    """
    # Weights of one mechanism, which another has no use for.
    dropped = ("head_norm", *(x for part in PARTS.values() for x in part.owned))
    for name in params:
        if name not in fresh and name not in dropped:
            path = f"{prefix}{name}"
            raise ValueError(f"the target has no place for the weight {path!r}")
    result = {}
    for name, own in fresh.items():
        path, given = f"{prefix}{name}", params.get(name)
        if given is None:
            if not any(part.startswith((*FRESH, *dropped)) for part in path.split("/")):
                raise ValueError(f"the source has no weight {path!r}")
            result[name] = own
        elif isinstance(own, dict):
            result[name] = _overlay(own, given, f"{path}/")
        elif path == "positions" and given.shape[0] >= own.shape[0]:
            result[name] = given[: own.shape[0]]
        elif own.shape != given.shape:
            raise ValueError(
                f"weight {path!r} is {given.shape} in the source and {own.shape} in "
                "the target"
            )
        else:
            result[name] = jnp.asarray(given)
    return result
