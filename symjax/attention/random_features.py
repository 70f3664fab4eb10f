"""Random features of the Performer, and the projections that they use.

With M random rows w of a projection W and x' = x √scale, random features estimate
exp(scale q·k): the expected value of φ(q)·φ(k) is exp(scale q·k) times a factor that
depends on the query alone. This factor cancels in the division by the denominator. For
positive features it is M exp(|q'|²/2), because their queries leave out the factor
exp(−|q'|²/2). The maps `relu` and `slay` estimate other functions. `RANDOM_FEATURES`
has the feature maps by name.

Most features are exponentials. `LogFeatures` has the exponents of features, from which
`symjax.attention.recurrent.linear_state` subtracts a running maximum, so that no
exponential overflows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from symjax.attention.core.arguments import check_choice
from symjax.attention.core.feature_maps import FeatureParameters, Features, LogFeatures
from symjax.attention.core.products import (
    einsum,
    in_six_passes,
    over_root,
    squared_length,
)
from symjax.attention.slay import spherical_features


@functools.partial(jax.jit, static_argnames=("features", "head_size", "norms"))
def orthogonal_projection(
    rng: Key[Array, ""], features: int, head_size: int, *, norms: str = "chi"
) -> Float[Array, "M H"]:
    """Return a random projection whose rows are orthogonal in blocks of `head_size`.

    Each block is Q·sign(diag R) of the QR decomposition of a matrix of normal numbers.
    Without the signs Q is not uniform: estimates are then wrong by factors from 0.68 to
    1.35 that depend on the direction.

    Cost O(M H²). The result is float32 even if jax has 64-bit types, so that one `rng`
    gives the same rows in every program.

    Args:
        features: M, the number of rows.
        norms: lengths of the rows. With "chi" they are those of normal vectors, and the
            estimate of exp(q·k) has no bias. With "constant" all are √H: the estimate
            has a bias, but the output of attention has less variance.

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
    """Return the projection for calls that pass none: always the same 256 rows."""
    with jax.ensure_compile_time_eval():
        rows = orthogonal_projection(jax.random.key(0), 256, head_size)
    return np.asarray(rows)


def _project(x: Array, random: FeatureParameters) -> Array:
    """Return W x √scale + offset in full precision: most φ are its exponential."""
    product = in_six_passes if x.dtype == jnp.float32 else einsum
    scaled = x * jnp.sqrt(random.scale).astype(x.dtype)
    projected = product("...h,mh->...m", scaled, random.rows.astype(x.dtype))
    if random.offset is None:
        return projected
    offset = random.offset.astype(x.dtype)
    return projected + jax.lax.expand_dims(offset, tuple(range(x.ndim - 1)))


def _estimating(
    features: Callable[[Array], LogFeatures],
    sign: int = -1,
    exponential: tuple[int, ...] = (),
) -> Features:
    """Return the feature map of exp(q'·k') from features f(w·x'), where x' = x √scale.

    Features of a key are multiplied by exp(sign |k'|²/2). The features of a query leave
    out their factor exp(sign |q'|²/2): it would cancel in the division.

    Args:
        features: f, a function of w·x' for all rows w.
        sign: −1 if the mean of f(w·q')·f(w·k') over w is exp(|q' + k'|²/2) (positive,
            hyperbolic), and +1 if it is exp(−|q' − k'|²/2) (trigonometric).
        exponential: see `Features`.
    """

    def query(x: Array, random: FeatureParameters) -> LogFeatures:
        return features(_project(x, random))

    def key(x: Array, random: FeatureParameters) -> LogFeatures:
        norm = 0.5 * sign * random.scale.astype(x.dtype) * squared_length(x)
        return features(_project(x, random)).times_exp(norm)

    signed = sign > 0
    return Features(
        query, key, signed=signed, exponential=exponential, has_exponents=True
    )


def _exponential(projected: Array) -> LogFeatures:
    """Return exp(w·x')."""
    return LogFeatures(None, projected)


def _hyperbolic(projected: Array) -> LogFeatures:
    """Return exp(w·x') and exp(−w·x').

    Products of these have a smaller variance than products of exp(w·x') alone.
    """
    return LogFeatures(None, jnp.concatenate([projected, -projected], axis=-1))


def _trigonometric(projected: Array) -> LogFeatures:
    """Return f(w·x') = [cos w·x', sin w·x'].

    For each w the mean of f(w·q')·f(w·k') is exp(−|q' − k'|²/2).
    """
    waves = jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1)
    return LogFeatures(waves, jnp.zeros_like(projected[..., :1]))


def _rectified(x: Array, random: FeatureParameters) -> LogFeatures:
    """Return relu(w·x'), which estimates no exponential."""
    return LogFeatures(jax.nn.relu(_project(x, random)), None)


def _spherical(x: Array, random: FeatureParameters) -> LogFeatures:
    """Return the features of SLAY, which depend on the direction of x alone.

    The features are at most exp(√(2s) |w|), with |w| about √H. The nodes s of the
    quadrature (`slay`) have √(2s) ≤ 1.85. So up to |w| = 39 a feature is at most
    e^(1.85 · 39), and a sum of a million features at most e⁸⁶. Float32 holds numbers up
    to e⁸⁸, so no exponent is needed. Products do not overflow: `Normalised.prepare`
    first divides a query by its largest feature.
    """
    direction = over_root(x, squared_length(x))
    one = random._replace(scale=jnp.ones((), x.dtype), offset=None)
    lengths = jnp.sqrt(squared_length(random.rows.astype(x.dtype)))[:, 0]
    return LogFeatures(spherical_features(_project(direction, one), lengths), None)


_POSITIVE = _estimating(_exponential, exponential=(1,))
# Values of model.attention.features for the mechanism "performer". "favor#" and
# "favor++" are positive features with the rows and offsets of `favor_parameters`.
RANDOM_FEATURES = {
    "favor#": _POSITIVE,
    "favor++": _POSITIVE,
    "hyperbolic": _estimating(_hyperbolic, exponential=(1, -1)),
    "positive": _POSITIVE,
    "relu": Features(_rectified, _rectified),
    "slay": Features(_spherical, _spherical),
    "trigonometric": _estimating(_trigonometric, sign=1),
}
