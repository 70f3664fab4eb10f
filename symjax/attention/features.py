"""Feature maps φ, with which attention is φ(query)·φ(key), and random projections.

A mechanism of the linear family is its feature map: `linear.py` executes all of them.
Plain maps return φ itself. Maps of exponentials return log φ, which the engine keeps
below a running maximum, so that nothing overflows and no denominator is below 1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

DEFAULT_FEATURES = 256
_NORM_EPSILON = 1e-6


class Features(NamedTuple):
    """How queries and keys become features: functions (array, parameters) → array.

    They act on the last axis only. `logarithmic` says that they return log φ.
    """

    query: Callable[[Array, Any], Array]
    key: Callable[[Array, Any], Array]
    logarithmic: bool = False


def orthogonal_projection(
    rng: Key[Array, ""], features: int, head_size: int, *, norms: str = "chi"
) -> Float[Array, "M H"]:
    """A random projection whose rows are orthogonal in blocks of `head_size`.

    Each block is Q·sign(diag R) of the QR of a normal matrix: without the signs Q is
    not uniform, and estimates are off by 0.68 to 1.35 depending on the direction.
    Row norms are those of normal vectors ("chi", unbiased) or √H ("constant", which
    estimates exp(q·k) with a bias but normalised attention with less variance).

    Cost: O(M H²), once. Always float32, so that a key means the same rows everywhere.

    Raises:
        ValueError: an unknown `norms`, or sizes below 1.
    Source: Choromanski et al. 2021, arXiv:2009.14794; signs: Mezzadri 2007,
        arXiv:math-ph/0609050.
    """
    if norms not in ("chi", "constant"):
        raise ValueError(
            f"orthogonal_projection: norms {norms!r} is unknown: "
            "choose from chi, constant"
        )
    if features < 1 or head_size < 1:
        raise ValueError(
            "orthogonal_projection: features and head_size must be at least 1, "
            f"got {features} and {head_size}"
        )
    return _draw(rng, features, head_size, norms)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(rng: Array, features: int, head_size: int, norms: str) -> Array:
    direction_rng, norm_rng = jax.random.split(rng)
    blocks = -(-features // head_size)
    normal = jax.random.normal(
        direction_rng, (blocks, head_size, head_size), jnp.float32
    )
    rotation, triangle = jnp.linalg.qr(normal)
    diagonal = jnp.diagonal(triangle, axis1=-2, axis2=-1)
    rows = rotation * jnp.where(diagonal < 0, -1.0, 1.0)[:, None, :]
    rows = rows.reshape(blocks * head_size, head_size)[:features]
    if norms == "constant":
        return rows * jnp.float32(head_size**0.5)
    lengths = jnp.linalg.norm(
        jax.random.normal(norm_rng, (features, head_size), jnp.float32), axis=-1
    )
    return rows * lengths[:, None]


@functools.cache
def default_projection(head_size: int) -> np.ndarray:
    """The projection of a call without one: 256 features, the same every time."""
    with jax.ensure_compile_time_eval():
        rows = orthogonal_projection(jax.random.key(0), DEFAULT_FEATURES, head_size)
    return np.asarray(rows)


def _project(x: Array, projection: Array) -> Array:
    """W x in full precision: an error in the exponent is a factor in the feature."""
    return jnp.einsum(
        "...h,mh->...m",
        x,
        projection.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )


def _positive_query(x: Array, parameters: tuple[Array, Array]) -> Array:
    """log φ = W x' without −|x'|²/2, which cancels in the ratio; x' = x √scale."""
    projection, scale = parameters
    return _project(x * jnp.sqrt(scale).astype(x.dtype), projection)


def _hyperbolic_query(x: Array, parameters: tuple[Array, Array]) -> Array:
    """Both signs of every projection: (φ(x)·φ(y)) averages to cosh, with less noise."""
    projected = _positive_query(x, parameters)
    return jnp.concatenate([projected, -projected], axis=-1)


def _with_norm(query: Callable[[Array, Any], Array]) -> Callable[[Array, Any], Array]:
    """The key side of a log-feature map: log φ = query map − |x'|²/2."""

    def key(x: Array, parameters: tuple[Array, Array]) -> Array:
        scale = parameters[1].astype(x.dtype)
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        return query(x, parameters) - 0.5 * scale * square

    return key


def _unit(x: Array, parameters: None = None) -> Array:
    """[1, x / (|x| + 1e-6)]: products of these are 1 + cos."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    norm = jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)
    return jnp.concatenate([jnp.ones_like(square), x / (norm + _NORM_EPSILON)], axis=-1)


def _plain(function: Callable[[Array], Array]) -> Features:
    def both(x: Array, parameters: None = None) -> Array:
        return function(x)

    return Features(both, both)


def _elu_plus_one(x: Array) -> Array:
    """elu(x) + 1, with eˣ itself below 0: (eˣ − 1) + 1 is 0 from x = −17 on."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


IDENTITY = _plain(lambda x: x)
UNIT = Features(_unit, _unit)
PLAIN = {
    "elu": _plain(_elu_plus_one),
    "identity": IDENTITY,
    "relu": _plain(jax.nn.relu),
    "relu2": _plain(_relu2),
}
EXPONENTIAL = {
    "hyperbolic": Features(_hyperbolic_query, _with_norm(_hyperbolic_query), True),
    "positive": Features(_positive_query, _with_norm(_positive_query), True),
}


def named(who: str, table: dict[str, Features], name: str) -> Features:
    """The entry of a table of features, or an error that lists the table."""
    if name not in table:
        raise ValueError(
            f"{who}: features {name!r} is unknown: choose from {', '.join(table)}"
        )
    return table[name]
