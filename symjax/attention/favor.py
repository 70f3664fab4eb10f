"""Statistics of queries and keys, which reduce the variance of FAVOR++ and FAVOR#.

`favor_statistics` measures them on a sample, and `unit_statistics` returns them for
queries and keys with independent entries of variance 1. `favor_parameters` turns the
parameters of positive random features into those of FAVOR++ or FAVOR#.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.arguments import check_choice, check_floating, check_positive
from symjax.attention.core.feature_maps import FeatureParameters

WITH_STATISTICS = ("favor#", "favor++")  # names of features that take statistics
_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Statistics(NamedTuple):
    """Parameters a and b of φ(x) ∝ exp(wᵀ diag(a) w + wᵀ b x' − |x'|²/2).

    With x' = x √scale they estimate exp(q'·k') without bias if all a < 1/8 and
    b = √(1 − 4 diag(a)) R for a rotation R. Positive features have a = 0. In FAVOR++
    all entries of a are equal. In FAVOR# a has an entry for each principal direction of
    a sample; these directions are the rows of R.
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
    """Return the statistics that minimise the variance of estimates for a sample.

    With x' = x √scale and E[(q' + k')(q' + k')ᵀ] = Rᵀ diag(s) R over independent pairs,
    a = (1 − 2s − √((1 + 2s)² + 8s)) / 16. FAVOR# uses all of s. FAVOR++ uses the mean
    of s in every direction, and R = I.

    Take the sample from other sequences than the ones that are attended to: statistics
    of the same sequence would leak later tokens to earlier ones. No gradient flows
    through the statistics, which are float32 at least. Cost O((T + S) H² + H³).

    Args:
        query, key: a sample; each index of the axes before the last is one vector.
        scale: factor of the scores, 1/√H by default.
    Raises:
        ValueError: an unknown `kind`, head sizes that differ, an empty sample, or a
            scale that is not above 0.
    Source: Likhosherstov et al. 2022, arXiv:2205.15317 (FAVOR++); 2023,
        arXiv:2302.00787 (FAVOR#).
    """
    check_choice("favor_statistics", "kind", kind, WITH_STATISTICS)
    check_floating("favor_statistics", query=query, key=key)
    check_positive("favor_statistics", "scale", scale)
    size = query.shape[-1] if query.ndim else 0
    if not key.ndim or key.shape[-1] != size:
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
    means = jnp.outer(query.mean(axis=0), key.mean(axis=0))
    squares = _product(query.T, query) / len(query) + _product(key.T, key) / len(key)
    moments = (squares + means + means.T) * (size**-0.5 if scale is None else scale)
    moments = jax.lax.stop_gradient(moments)
    if kind == "favor++":
        spectrum = jnp.full(size, jnp.trace(moments) / size)
        return _statistics(spectrum, jnp.eye(size, dtype=dtype))
    return _statistics(*jnp.linalg.eigh(moments))


def unit_statistics(head_size: int, scale: Array) -> Statistics:
    """Return the statistics for independent entries of variance 1.

    For these s = 2 scale in all directions, with s as in `favor_statistics`.
    """
    spectrum = jnp.full(head_size, 2 * scale)
    return _statistics(spectrum, jnp.eye(head_size, dtype=spectrum.dtype))


def _statistics(spectrum: Array, directions: Array) -> Statistics:
    """Return the statistics for eigenvalues s; the eigenvectors are the columns of Rᵀ.

    In each direction a minimises

        log(1 − 4a) − log(1 − 8a) / 2 + 2 s (1 − 4a) / (1 − 8a)

    This is log E_w[(φ(q) φ(k))²], as a mean over pairs, without the terms that do not
    depend on a. The derivative is 0 where 16a² + (4s − 2) a − s = 0. The minimum is at
    the negative root.
    """
    root = jnp.sqrt(jnp.square(1 + 2 * spectrum) + 8 * spectrum)
    a = (1 - 2 * spectrum - root) / 16
    return Statistics(a, jnp.sqrt(1 - 4 * a)[:, None] * directions.T)


def apply_statistics(
    projection: Float[Array, "M H"], statistics: Statistics
) -> tuple[Float[Array, "M H"], Float[Array, " M"]]:
    """Return W b and the diagonal of W diag(a) Wᵀ.

    Positive features with W b as projection, and with the second array added to their
    exponents, are the features of `Statistics`.
    """
    dtype = jnp.result_type(projection, *statistics)
    rows, a, b = (jnp.asarray(x, dtype) for x in (projection, *statistics))
    return _product(rows, b), _product(rows * rows, a)


def favor_parameters(
    who: str, random: FeatureParameters, statistics: Statistics | None
) -> FeatureParameters:
    """Return the parameters of FAVOR++ or FAVOR#: rows W b and offsets wᵀ diag(a) w.

    Args:
        statistics: None means `unit_statistics`.
    Raises:
        ValueError: not `Statistics`, or statistics of another head size.
    """
    size = random.rows.shape[1]
    if statistics is None:
        statistics = unit_statistics(size, random.scale)
    if not isinstance(statistics, Statistics):
        raise ValueError(
            f"{who}: statistics must be those of favor_statistics, got {statistics!r}"
        )
    a, b = statistics
    check_floating(who, **{"statistics.a": a, "statistics.b": b})
    shapes = a.shape, b.shape
    if shapes != ((size,), (size, size)):
        raise ValueError(
            f"{who}: statistics must be a ({size},) and b ({size}, {size}), "
            f"got {shapes[0]} and {shapes[1]}"
        )
    rows, offset = apply_statistics(random.rows, statistics)
    return FeatureParameters(rows, random.scale, offset)
