"""Feature maps of a layer: learned maps, and constants of random features."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from symjax import attention, config
from symjax.attention.core.feature_maps import FeatureParameters, Features
from symjax.attention.favor import WITH_STATISTICS, unit_statistics
from symjax.attention.features import PLAIN, UNIT
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.layers.parts.part import (
    Constant,
    Part,
    Sizes,
    named_options,
    recurrence_flops,
    repeat_key_heads,
)
from symjax.layers.sharded import Operand

LEARNED = ("hedgehog", "t2r")  # feature maps that are weights of the layer
MAPS = ("query_map", "key_map")


class Hedgehog(nnx.Module):
    """softmax([Wx, −Wx]): 2H features; W per head is the identity at first.

    Source: Zhang et al. 2024, arXiv:2402.04347.
    """

    def __init__(self, heads: int, head_size: int):
        self.size = 2 * head_size
        eye = jnp.eye(head_size)[None]
        self.weight = nnx.Param(jnp.broadcast_to(eye, (heads, head_size, head_size)))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N M"]:
        return attention.hedgehog(x, self.weight[...])


class T2R(nnx.Module):
    """relu(Wx + b), with W and b per head.

    Source: Kasai et al. 2021, arXiv:2103.13076.
    """

    def __init__(self, heads: int, head_size: int, features: int, *, rngs: nnx.Rngs):
        self.size = features
        draw = nnx.initializers.normal(head_size**-0.5)
        self.weight = nnx.Param(draw(rngs.params(), (heads, head_size, features)))
        self.bias = nnx.Param(jnp.zeros((heads, features)))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N M"]:
        return attention.t2r(x, self.weight[...], self.bias[...])


def _weights_of_linear(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Return a map for queries and one for keys, if the features are learned."""
    name, count = options.attention.features, options.attention.feature_count

    def feature_map(heads: int) -> Hedgehog | T2R:
        if name == "hedgehog":
            return Hedgehog(heads, sizes.head_size)
        return T2R(heads, sizes.head_size, count, rngs=rngs)

    if name not in LEARNED:
        return {}
    return {
        "query_map": feature_map(sizes.queries),
        "key_map": feature_map(sizes.keys),
    }


def _operands_of_linear(
    layer: Any, x: Array, operands: dict[str, Operand]
) -> dict[str, Operand]:
    """Apply learned maps to queries and keys."""
    if layer.chosen.features not in LEARNED:
        return operands
    query, key = operands["query"], operands["key"]
    return operands | {
        "query": query._replace(array=layer.query_map(query.array)),
        "key": key._replace(array=layer.key_map(key.array)),
    }


def _options_of_linear(options: config.Model, mechanism: str) -> dict[str, Any]:
    """Return the options of linear attention.

    The layer applies learned maps, so the mechanism then has "identity" features.
    """
    values = named_options(options, mechanism)
    return values | ({"features": "identity"} if values["features"] in LEARNED else {})


def _maps_converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Return the learned maps of a layer of the target.

    Maps of other features keep their initial values. If only the target is
    differential, each branch of a head gets a map: in V1 one half of the head's map, in
    V2 the whole map.
    """
    if not {*MAPS} <= weights.keys():
        return weights
    before, after = source.attention, target.attention
    rest = {name: x for name, x in weights.items() if name not in MAPS}
    if before.features != after.features:
        return rest
    maps = {name: weights[name] for name in MAPS}
    maps["key_map"] = repeat_key_heads(maps["key_map"], source, target, axis=0)
    if (before.differential, after.differential) == ("none", "v1"):
        maps = jax.tree.map(_halved, maps)
    elif (before.differential, after.differential) == ("none", "v2"):
        doubled = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), maps["query_map"])
        maps["query_map"] = doubled
    return rest | maps


def _halved(x: jax.Array) -> jax.Array:
    """Split a learned map [N H M] into maps of half heads; repeat a bias [N M]."""
    if x.ndim == 2:
        return jnp.repeat(x, 2, axis=0)
    if x.shape[1] == x.shape[2]:
        return diagonal_blocks(x)
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, x.shape[2])


def diagonal_blocks(x: jax.Array) -> jax.Array:
    """Return the two diagonal blocks of each matrix [N H H], as [2N H/2 H/2]."""
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
    weights=_weights_of_linear,
    operands=_operands_of_linear,
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


def _weights_of_performer(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Return a random projection, and the statistics of FAVOR++ or FAVOR#.

    They are constants. `symjax.models.fit_statistics` replaces the statistics by
    measured ones.
    """
    chosen, size = options.attention, sizes.head_size
    projection = attention.orthogonal_projection(
        rngs.params(), chosen.feature_count, size, norms=chosen.feature_norms
    )
    constants = {"projection": Constant(projection)}
    if chosen.features in WITH_STATISTICS:
        a, b = unit_statistics(size, size**-0.5)
        constants |= {"statistics_a": Constant(a), "statistics_b": Constant(b)}
    return constants


def _random_features(layer: Any) -> dict[str, Any]:
    """Return the projection, and the statistics of FAVOR++ or FAVOR#."""
    arguments: dict[str, Any] = {"projection": layer.projection[...]}
    if layer.chosen.features in WITH_STATISTICS:
        arrays = layer.statistics_a[...], layer.statistics_b[...]
        arguments["statistics"] = attention.Statistics(*arrays)
    return arguments


def _operands_of_performer(
    layer: Any, x: Array, operands: dict[str, Operand]
) -> dict[str, Operand]:
    replicated = {name: Operand(x, "") for name, x in _random_features(layer).items()}
    return operands | replicated


def _count_of_random(chosen: config.Attention, size: int) -> int:
    """Return the number of random features that a query or key becomes."""
    rows: Any = jax.ShapeDtypeStruct((chosen.feature_count, size), jnp.float32)
    scale: Any = jax.ShapeDtypeStruct((), jnp.float32)
    features = RANDOM_FEATURES[chosen.features or "positive"]
    return _mapped_size(features, size, FeatureParameters(rows, scale))


def _flops_of_performer(mixer: Any, chosen: config.Attention, length: int) -> float:
    """Return the operations of the recurrence and of products with the projection."""
    sizes, rows = mixer.sizes, chosen.feature_count
    products = 4 * sizes.queries * rows * sizes.head_size
    features = _count_of_random(chosen, sizes.head_size)
    return products + recurrence_flops(mixer, features, length)


PERFORMER = Part(
    weights=_weights_of_performer,
    operands=_operands_of_performer,
    state=_random_features,
    keys=lambda chosen: ("feature_count", "feature_norms"),
    feature_count=_count_of_random,
    flops=_flops_of_performer,
    rules=(
        ("projection", P(None, None)),
        ("statistics_a", P(None)),
        ("statistics_b", P(None, None)),
    ),
    kept_constants=(
        ("projection", "feature_norms"),
        ("statistics_a", "features"),
        ("statistics_b", "features"),
    ),
)
