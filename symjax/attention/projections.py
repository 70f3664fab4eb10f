"""Random projections, and what FAVOR++ and FAVOR# know of queries and keys."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

DEFAULT_FEATURES = 256
KINDS = ("favor#", "favor++")


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


class Statistics(NamedTuple):
    """The free part of DERF features, φ(x) ∝ exp(wᵀ diag(a) w + wᵀ b x' − |x'|²/2).

    They estimate exp(q·k) without bias for any a < 1/8 and b = √(1 − 4 diag(a)) R with
    R a rotation. Positive features have a = 0, FAVOR++ one number a, FAVOR# one for
    each direction R of the sample's spectrum.
    """

    a: Float[Array, " H"]
    b: Float[Array, "H H"]


def favor_statistics(
    query: Float[Array, "*B H"],
    key: Float[Array, "*S H"],
    *,
    scale: float | None = None,
    kind: str = "favor++",
) -> Statistics:
    """The statistics of least log variance for a sample of queries and keys.

    With E[(q' + k')(q' + k')ᵀ] = R diag(s) Rᵀ over independent pairs, x' = x √scale:
    a = (1 − 2s − √((1 + 2s)² + 8s)) / 16. FAVOR# takes all of s; FAVOR++ takes the mean
    of s in every direction, and R = I.

    Take the sample from other sequences than those they serve: of the same one they
    would tell earlier tokens about later ones. They are constants to the gradient.
    Cost: O((T + S) H² + H³), once. Float32 at least.

    Args:
        query, key: a sample, in which every axis but the last is a number of draws.
        scale: of the scores, 1/√H by default.
    Raises:
        ValueError: an unknown `kind`, head sizes that differ, or an empty sample.
    Source: Likhosherstov et al. 2022, arXiv:2205.15317 (FAVOR++); 2023,
        arXiv:2302.00787 (FAVOR#).
    """
    if kind not in KINDS:
        raise ValueError(
            f"favor_statistics: kind {kind!r} is unknown: choose from "
            f"{', '.join(KINDS)}"
        )
    size = query.shape[-1]
    if key.shape[-1] != size:
        raise ValueError(
            "favor_statistics: query and key must agree in head size, got query "
            f"{query.shape} and key {key.shape}"
        )
    if not query.size or not key.size:
        raise ValueError(
            "favor_statistics: a sample needs at least one query and one key, got "
            f"query {query.shape} and key {key.shape}"
        )
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)
    query, key = (x.reshape(-1, size).astype(dtype) for x in (query, key))
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    means = jnp.outer(query.mean(axis=0), key.mean(axis=0))
    squares = product(query.T, query) / len(query) + product(key.T, key) / len(key)
    moments = (squares + means + means.T) * (size**-0.5 if scale is None else scale)
    moments = jax.lax.stop_gradient(moments)
    if kind == "favor++":
        spectrum = jnp.full(size, jnp.trace(moments) / size)
        return _statistics(spectrum, jnp.eye(size, dtype=dtype))
    return _statistics(*jnp.linalg.eigh(moments))


def unit_statistics(head_size: int, scale: Array) -> Statistics:
    """Those of queries and keys with independent entries of variance 1: s = 2 scale."""
    spectrum = jnp.full(head_size, 2 * scale)
    return _statistics(spectrum, jnp.eye(head_size, dtype=spectrum.dtype))


def _statistics(spectrum: Array, rotation: Array) -> Statistics:
    root = jnp.sqrt(jnp.square(1 + 2 * spectrum) + 8 * spectrum)
    a = (1 - 2 * spectrum - root) / 16
    return Statistics(a, jnp.sqrt(1 - 4 * a)[:, None] * rotation.T)


def apply_statistics(
    projection: Float[Array, "M H"], statistics: Statistics
) -> tuple[Float[Array, "M H"], Float[Array, " M"]]:
    """W b and the diagonal of W diag(a) Wᵀ: positive features, moved by an offset."""
    dtype = jnp.result_type(projection, *statistics)
    rows, a, b = (jnp.asarray(x, dtype) for x in (projection, *statistics))
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return product(rows, b), product(rows * rows, a)
