"""Feature maps φ, with which the weight of a pair is φ(query)·φ(key), and random ones.

Features are an amplitude times a power of e. `normalised.py` keeps the exponents below
a running maximum, so that nothing overflows and nothing that matters is lost.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from symjax.attention.checks import check_choice
from symjax.attention.chunks import einsum, in_six_passes


class LogFeatures(NamedTuple):
    """Features φ = amplitude · exp(exponent), without an amplitude of 1 or exponent 0.

    The last axis is that of features; of the exponent it is 1 where all share it.
    """

    amplitude: Any  # [… M], or None
    exponent: Any  # [… M] or [… 1], or None

    def raised(self, exponent: Array) -> "LogFeatures":
        """φ · exp(exponent)."""
        return self._replace(exponent=self.exponent + exponent)

    def where(self, keep: Array) -> "LogFeatures":
        """φ, and 0 where keep says no. keep lacks the axis of features."""
        keep = keep[..., None]
        if self.exponent is None:
            return self._replace(amplitude=jnp.where(keep, self.amplitude, 0))
        return self._replace(exponent=jnp.where(keep, self.exponent, -jnp.inf))

    def weights(self) -> Array:
        """φ itself."""
        if self.exponent is None:
            return self.amplitude
        powers = jnp.exp(self.exponent)
        return powers if self.amplitude is None else self.amplitude * powers


def finite(exponent: Array) -> Array:
    """An exponent to subtract: 0 where no key was seen, since −inf − (−inf) is NaN."""
    return jnp.where(jnp.isneginf(exponent), 0, exponent)


def row_shift(query: LogFeatures) -> Array:
    """The largest exponent of each row, to subtract; a constant to the gradient."""
    highest = query.exponent.max(axis=-1, keepdims=True)
    return finite(jax.lax.stop_gradient(highest))


class Features(NamedTuple):
    """How queries and keys become features: (array, parameters) → LogFeatures.

    They act on the last axis only. Both have the same parts, and what cancels in a
    row's ratio may be left out of the query's.

    Attributes:
        pairs: (einsum, query, key, divisor) → φ(q)·φ(k) / divisor of all pairs, where a
            sum over features that change sign would lose digits.
        signed: whether features change sign, so that sums of products may cancel.
        leading: H → how many of the first features are never negative, where no pair
            weighs less than 0 either though other features change sign.
        around: (query, key) → other features of the same products, which cancel less.
            They are made for these keys, so no state holds them; a key's first is 1.
        bounded: whether no feature exceeds 1 and no pair weighs less than 0. The mean
            weight of a row then has a known rounding error, so that kernels can add up
            features that change sign.
    """

    query: Callable[[Array, Any], LogFeatures]
    key: Callable[[Array, Any], LogFeatures]
    pairs: Callable[[Callable, Array, Array, Array], Array] | None = None
    signed: bool = False
    leading: Callable[[int], int] | None = None
    around: Callable[[Array, Array], tuple[LogFeatures, LogFeatures]] | None = None
    bounded: bool = False


def named(who: str, table: dict[str, Features], name: str) -> Features:
    """The entry of a table of features, or an error that lists the table."""
    check_choice(who, "features", name, table)
    return table[name]


def squared_length(x: Array) -> Array:
    """|x|² [… 1], as a product, which XLA's compiler for CPUs adds up faster."""
    return einsum("...h,...h->...", x, x)[..., None]


class RandomFeatures(NamedTuple):
    """The parameters of random features: rows w, the scale, log factors of the rows."""

    rows: Float[Array, "M H"]
    scale: Float[Array, ""]
    offset: Float[Array, " M"] | None = None


def _project(x: Array, random: RandomFeatures) -> Array:
    """W x √scale + offset, in full precision: an error here is a factor in φ."""
    product = in_six_passes if x.dtype == jnp.float32 else einsum
    scaled = x * jnp.sqrt(random.scale).astype(x.dtype)
    projected = product("...h,mh->...m", scaled, random.rows.astype(x.dtype))
    if random.offset is None:
        return projected
    offset = random.offset.astype(x.dtype)
    return projected + jax.lax.expand_dims(offset, tuple(range(x.ndim - 1)))


def _random(features: Callable[[Array], LogFeatures], sign: int = -1) -> Features:
    """Random features of exp(q·k), by those of w·x'.

    A key's are times exp(±|x'|²/2); a query's are not, since it cancels in the ratio.
    """

    def query(x: Array, random: RandomFeatures) -> LogFeatures:
        return features(_project(x, random))

    def key(x: Array, random: RandomFeatures) -> LogFeatures:
        norm = 0.5 * sign * random.scale.astype(x.dtype) * squared_length(x)
        return features(_project(x, random)).raised(norm)

    return Features(query, key, signed=sign > 0)


def _powers(projected: Array) -> LogFeatures:
    return LogFeatures(None, projected)


def _hyperbolic(projected: Array) -> LogFeatures:
    """Both signs of every projection: (φ(x)·φ(y)) averages to cosh, with less noise."""
    return LogFeatures(None, jnp.concatenate([projected, -projected], axis=-1))


def _waves(projected: Array) -> LogFeatures:
    """[cos w·x', sin w·x']: (φ(x)·φ(y)) averages to exp(−|x' − y'|²/2)."""
    waves = jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1)
    return LogFeatures(waves, jnp.zeros_like(projected[..., :1]))


def _relu(x: Array, random: RandomFeatures) -> LogFeatures:
    return LogFeatures(jax.nn.relu(_project(x, random)), None)


_POSITIVE = _random(_powers)
RANDOM = {
    "favor#": _POSITIVE,
    "favor++": _POSITIVE,
    "hyperbolic": _random(_hyperbolic),
    "positive": _POSITIVE,
    "relu": Features(_relu, _relu),
    "trigonometric": _random(_waves, sign=1),
}


@functools.partial(jax.jit, static_argnames=("features", "head_size", "norms"))
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
    check_choice("orthogonal_projection", "norms", norms, ("chi", "constant"))
    if features < 1 or head_size < 1:
        raise ValueError(
            "orthogonal_projection: features and head_size must be at least 1, "
            f"got {features} and {head_size}"
        )
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
        rows = orthogonal_projection(jax.random.key(0), 256, head_size)
    return np.asarray(rows)
