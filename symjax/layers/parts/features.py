"""Feature maps of a layer: learned ones, and random ones with their constants."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from symjax import attention, config
from symjax.attention.core.feature_maps import Features, RandomFeatures
from symjax.attention.favor import KINDS, unit_statistics
from symjax.attention.features import PLAIN, RANDOM, UNIT
from symjax.layers.parts.part import (
    Constant,
    Part,
    Sizes,
    named_options,
    recurrence_flops,
)
from symjax.layers.sharded import Operand

LEARNED = ("hedgehog", "t2r")  # features that are weights of the layer
MAPS = ("query_map", "key_map")


class Hedgehog(nnx.Module):
    """softmax([Wx, −Wx]) with W of every head, the identity at first: 2H features.

    Source: Zhang et al. 2024, arXiv:2402.04347.
    """

    def __init__(self, heads: int, head_size: int):
        self.size = 2 * head_size
        eye = jnp.eye(head_size)[None]
        self.weight = nnx.Param(jnp.broadcast_to(eye, (heads, head_size, head_size)))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N M"]:
        return attention.hedgehog(x, self.weight[...])


class T2R(nnx.Module):
    """relu(Wx + b) with W and b of every head.

    Source: Kasai et al. 2021, arXiv:2103.13076.
    """

    def __init__(self, heads: int, head_size: int, features: int, *, rngs: nnx.Rngs):
        self.size = features
        draw = nnx.initializers.normal(head_size**-0.5)
        self.weight = nnx.Param(draw(rngs.params(), (heads, head_size, features)))
        self.bias = nnx.Param(jnp.zeros((heads, features)))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N M"]:
        return attention.t2r(x, self.weight[...], self.bias[...])


def _maps(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """One map for queries and one for keys."""
    name, count = options.attention.features, options.attention.feature_count

    def made(heads: int) -> Hedgehog | T2R:
        if name == "hedgehog":
            return Hedgehog(heads, sizes.head_size)
        return T2R(heads, sizes.head_size, count, rngs=rngs)

    if name not in LEARNED:
        return {}
    return {"query_map": made(sizes.queries), "key_map": made(sizes.keys)}


def _mapped(layer: Any, x: Array, operands: dict[str, Operand]) -> dict[str, Operand]:
    if layer.chosen.features not in LEARNED:
        return operands
    query, key = operands["query"], operands["key"]
    return operands | {
        "query": query._replace(array=layer.query_map(query.array)),
        "key": key._replace(array=layer.key_map(key.array)),
    }


def _options_of_linear(options: config.Model, mechanism: str) -> dict[str, Any]:
    """The layer itself applies learned maps."""
    found = named_options(options, mechanism)
    return found | ({"features": "identity"} if found["features"] in LEARNED else {})


def _maps_converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Maps of other features start fresh; each branch of a head gets a map.

    Of V1 its own half of the head's map, of V2 the head's.
    """
    if not {*MAPS} <= weights.keys():
        return weights
    before, after = source.attention, target.attention
    others = {name: x for name, x in weights.items() if name not in MAPS}
    if before.features != after.features:
        return others
    maps = {name: weights[name] for name in MAPS}
    if (before.differential, after.differential) == ("none", "v1"):
        maps = jax.tree.map(_halved, maps)
    elif (before.differential, after.differential) == ("none", "v2"):
        doubled = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), maps["query_map"])
        maps["query_map"] = doubled
    return others | maps


def _halved(x: jax.Array) -> jax.Array:
    """A learned map [N H M] of heads as that of their halves; a bias [N M] twice."""
    if x.ndim == 2:
        return jnp.repeat(x, 2, axis=0)
    if x.shape[1] == x.shape[2]:
        return own_halves(x)
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, x.shape[2])


def own_halves(x: jax.Array) -> jax.Array:
    """Of matrices [N H H] the blocks of each half with itself, [2N H/2 H/2]."""
    heads, size, _ = x.shape
    blocks = x.reshape(heads, 2, size // 2, 2, size // 2)
    return jnp.stack([blocks[:, 0, :, 0], blocks[:, 1, :, 1]], axis=1).reshape(
        2 * heads, size // 2, size // 2
    )


def _count_of_plain(chosen: config.Attention, size: int) -> int:
    """Return the number of features that linear attention makes of a query or key."""
    if chosen.features == "hedgehog":
        return 2 * size
    if chosen.features == "t2r":
        return chosen.feature_count
    return _mapped_size(PLAIN[chosen.features or "elu"], size, None)


def _mapped_size(features: Features, size: int, parameters: Any) -> int:
    """Return the length of φ(x) for a key x of `size` features, from φ's shapes."""
    key = jax.ShapeDtypeStruct((size,), jnp.float32)
    mapped = jax.eval_shape(features.key, key, parameters)
    return max(x.shape[-1] for x in jax.tree.leaves(mapped))


LINEAR = Part(
    weights=_maps,
    operands=_mapped,
    state=lambda layer: (
        {"head_size": layer.key_map.size} if layer.chosen.features in LEARNED else {}
    ),
    options=_options_of_linear,
    keys=lambda chosen: ("feature_count",) if chosen.features == "t2r" else (),
    learned=LEARNED,
    feature_count=_count_of_plain,
    rules=(
        ("*_map/weight", P("tensor", None, None)),
        ("*_map/bias", P("tensor", None)),
    ),
    owned=MAPS,
    convert=_maps_converted,
    features=lambda options: PLAIN[options.get("features", "elu")],
)
COSINE = Part(
    feature_count=lambda chosen, size: size + 1,
    features=lambda options: UNIT,
)


def _drawn(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Return a random projection, and the statistics of FAVOR++ or FAVOR#.

    They are constants. `symjax.models.fit_statistics` writes other statistics.
    """
    chosen, size = options.attention, sizes.head_size
    projection = attention.orthogonal_projection(
        rngs.params(), chosen.feature_count, size, norms=chosen.feature_norms
    )
    found = {"projection": Constant(projection)}
    if chosen.features in KINDS:
        a, b = unit_statistics(size, size**-0.5)
        found |= {"statistics_a": Constant(a), "statistics_b": Constant(b)}
    return found


def _random(layer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"projection": layer.projection[...]}
    if layer.chosen.features in KINDS:
        arrays = layer.statistics_a[...], layer.statistics_b[...]
        found["statistics"] = attention.Statistics(*arrays)
    return found


def _count_of_random(chosen: config.Attention, size: int) -> int:
    """Return the number of random features that a query or key becomes."""
    rows: Any = jax.ShapeDtypeStruct((chosen.feature_count, size), jnp.float32)
    scale: Any = jax.ShapeDtypeStruct((), jnp.float32)
    features = RANDOM[chosen.features or "positive"]
    return _mapped_size(features, size, RandomFeatures(rows, scale))


def _flops_of_performer(mixer: Any, chosen: config.Attention, length: int) -> float:
    """Return the operations of the recurrence and of products with the projection."""
    sizes, rows = mixer.sizes, chosen.feature_count
    products = 4 * sizes.queries * rows * sizes.head_size
    features = _count_of_random(chosen, sizes.head_size)
    return products + recurrence_flops(mixer, features, length)


PERFORMER = Part(
    weights=_drawn,
    operands=lambda layer, x, operands: (
        operands | {name: Operand(found, "") for name, found in _random(layer).items()}
    ),
    state=_random,
    keys=lambda chosen: ("feature_count", "feature_norms"),
    feature_count=_count_of_random,
    flops=_flops_of_performer,
    rules=(
        ("projection", P(None, None)),
        ("statistics_a", P(None)),
        ("statistics_b", P(None, None)),
    ),
    drawn=(
        ("projection", "feature_norms"),
        ("statistics_a", "features"),
        ("statistics_b", "features"),
    ),
)
