"""Feature maps φ, with which the weight of a pair is φ(query)·φ(key), and random ones.

Features are an amplitude times a power of e. `normalised.py` keeps the exponents below
a running maximum, so that nothing overflows and nothing that matters is lost.

Learned features for `linear(features="identity")`.

Features without parameters: of linear attention by name, and of 1 + cos.

Weights of pairs are computed without features where these would cancel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from symjax.attention.core.arguments import check_choice, check_floating
from symjax.attention.core.feature_maps import Features, LogFeatures, RandomFeatures
from symjax.attention.core.products import einsum, in_six_passes, products


def named(who: str, table: dict[str, Features], name: str) -> Features:
    """The entry of a table of features, or an error that lists the table."""
    check_choice(who, "features", name, table)
    return table[name]


def squared_length(x: Array) -> Array:
    """|x|² [… 1], as a product, which XLA's compiler for CPUs adds up faster."""
    return einsum("...h,...h->...", x, x)[..., None]


def _project(x: Array, random: RandomFeatures) -> Array:
    """W x √scale + offset, in full precision: an error here is a factor in φ."""
    product = in_six_passes if x.dtype == jnp.float32 else einsum
    scaled = x * jnp.sqrt(random.scale).astype(x.dtype)
    projected = product("...h,mh->...m", scaled, random.rows.astype(x.dtype))
    if random.offset is None:
        return projected
    offset = random.offset.astype(x.dtype)
    return projected + jax.lax.expand_dims(offset, tuple(range(x.ndim - 1)))


def _random(
    features: Callable[[Array], LogFeatures],
    sign: int = -1,
    exponential: tuple[int, ...] = (),
) -> Features:
    """Random features of exp(q·k), by those of w·x'.

    A key's are times exp(±|x'|²/2); a query's are not, since it cancels in the ratio.
    """

    def query(x: Array, random: RandomFeatures) -> LogFeatures:
        return features(_project(x, random))

    def key(x: Array, random: RandomFeatures) -> LogFeatures:
        norm = 0.5 * sign * random.scale.astype(x.dtype) * squared_length(x)
        return features(_project(x, random)).raised(norm)

    signed = sign > 0
    return Features(query, key, signed=signed, exponential=exponential, exponents=True)


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


_POSITIVE = _random(_powers, exponential=(1,))
RANDOM = {
    "favor#": _POSITIVE,
    "favor++": _POSITIVE,
    "hyperbolic": _random(_hyperbolic, exponential=(1, -1)),
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


def hedgehog(
    x: Float[Array, "B T N H"], weight: Float[Array, "N H M"]
) -> Float[Array, "B T N 2M"]:
    """Learned features softmax([x W, −x W]) for `linear(features="identity")`.

    Cost: O(T H M). In float32 at least, as the features that are given by name.

    Raises:
        ValueError: a weight that does not fit.
    Source: Zhang et al. 2024, arXiv:2402.04347.
    """
    projected = _learned("hedgehog", x, weight)
    return jax.nn.softmax(jnp.concatenate([projected, -projected], axis=-1), axis=-1)


def t2r(
    x: Float[Array, "B T N H"],
    weight: Float[Array, "N H M"],
    bias: Float[Array, "N M"],
) -> Float[Array, "B T N M"]:
    """Learned features relu(x W + b) for `linear(features="identity")`.

    Cost: O(T H M). In float32 at least, as the features that are given by name. A row
    whose features are all 0 gets an output of 0.

    Raises:
        ValueError: a weight or a bias that does not fit.
    Source: Kasai et al. 2021, arXiv:2103.13076.
    """
    projected = _learned("t2r", x, weight)
    check_floating("t2r", bias=bias)
    if bias.shape != projected.shape[2:]:
        raise ValueError(
            f"t2r: bias must be [N M] of x {x.shape} and weight {weight.shape}, "
            f"got {bias.shape}"
        )
    return jax.nn.relu(projected + bias[None, None].astype(projected.dtype))


def _learned(who: str, x: Array, weight: Array) -> Array:
    check_floating(who, x=x, weight=weight)
    if x.ndim != 4 or weight.ndim != 3 or weight.shape[:2] != x.shape[2:]:
        raise ValueError(
            f"{who}: weight must be [N H M] for x [B T N H], got weight "
            f"{weight.shape} and x {x.shape}"
        )
    dtype = jnp.promote_types(jnp.result_type(x, weight), jnp.float32)
    given = x.astype(dtype), weight.astype(dtype)
    return products(x, weight)("btnh,nhm->btnm", *given)


_NORM_EPSILON = 1e-6
PAIRS = "bkgth,bksh->bkgts"
Product = Callable[..., Array]  # an einsum


def plain(function: Callable[[Array], Array], **traits: Any) -> Features:
    """Return the entry of `PLAIN` for a function of the last axis: jax.nn.softplus.

    Args:
        traits: attributes of `Features`.
    """

    def both(x: Array, parameters: None = None) -> LogFeatures:
        return LogFeatures(function(x), None)

    return Features(both, both, **traits)


class _Direction(NamedTuple):
    """x̂ = x / (|x| + 1e-6), which is nearly a unit vector, and how nearly."""

    unit: Float[Array, "*rows H"]
    length: Float[Array, "*rows 1"]  # |x̂|
    half_shortfall: Float[Array, "*rows 1"]  # (1 − |x̂|²)/2, without cancellation


def _length(x: Array) -> Float[Array, "*rows 1"]:
    """Return |x|, with a gradient of 0 at 0."""
    square = squared_length(x)
    return jnp.sqrt(jnp.maximum(square, jnp.finfo(square.dtype).tiny))


def _direction(x: Float[Array, "*rows H"]) -> _Direction:
    length = _length(x)
    inverse = 1 / (length + _NORM_EPSILON)
    unit = einsum("...h,...i->...h", x, inverse)
    length, missing = length * inverse, _NORM_EPSILON * inverse
    shortfall = jnp.where(
        missing < 0.5, missing * (1 - missing / 2), (1 - length * length) / 2
    )
    return _Direction(unit, length, shortfall)


def _unit(x: Array) -> Array:
    """Return [1, x̂]: products of these are 1 + cos."""
    unit = einsum("...h,...i->...h", x, 1 / (_length(x) + _NORM_EPSILON))
    return jnp.concatenate([jnp.ones_like(unit[..., :1]), unit], -1)


def _unit_around(
    query: Float[Array, "B K G T H"], key: Float[Array, "B K S H"]
) -> tuple[LogFeatures, LogFeatures]:
    """Return features of 1 + cos that are small where it is small.

    They are taken around m, the direction of the keys:

    1 + q̂·k̂ = |q̂ + k̂|²/2 + (1 − |q̂|²)/2 + (1 − |k̂|²)/2 and q̂ + k̂ = (q̂ + m) + (k̂ − m)

    m = max |k̂| Σ k̂ / |Σ k̂|, so that vectors far shorter than 1e-6 lose no digits.
    """
    asking, asked = _direction(query), _direction(key)
    mean = asked.unit.sum(axis=-2, keepdims=True)
    longest = asked.length.max(-2, keepdims=True, initial=0)
    mean, longest = jax.lax.stop_gradient((mean, longest))
    mean *= longest / _length(mean)
    row, column = asking.unit + mean[:, :, None], asked.unit - mean
    one, ones = jnp.ones_like(asking.length), jnp.ones_like(asked.length)
    rows = [squared_length(row) / 2 + asking.half_shortfall, one, row]
    columns = [ones, squared_length(column) / 2 + asked.half_shortfall, column]
    both = jnp.concatenate(rows, axis=-1), jnp.concatenate(columns, axis=-1)
    return LogFeatures(both[0], None), LogFeatures(both[1], None)


def _unit_pairs(product: Product, query: Array, key: Array, divisor: None) -> Array:
    """Return 1 + cos, and 0 where that is less than the rounding error of 1."""
    row, column = (x.amplitude for x in _unit_around(query, key))
    scores = product(PAIRS, row, column)
    return jnp.where(scores > jnp.finfo(scores.dtype).eps / 2, scores, 0)


def _elu_plus_one(x: Array) -> Array:
    """elu(x) + 1, with eˣ itself below 0: (eˣ − 1) + 1 is 0 from x = −17 on."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def _squared(x: Array) -> Array:
    """All x_i x_j with i ≤ j: products of these are (q·k)².

    Pairs are taken by their distance on a ring, in whole vectors; at distance H/2 each
    pair would come twice.
    """
    size = x.shape[-1]
    ring = jnp.concatenate([x, x], axis=-1)
    pairs = [x * x]
    for distance in range(1, size // 2 + 1):
        count = size // 2 if 2 * distance == size else size
        other = ring[..., distance : distance + count]
        pairs.append(2**0.5 * x[..., :count] * other)
    return jnp.concatenate(pairs, axis=-1)


def _squared_pairs(product: Product, query: Array, key: Array, divisor: Array) -> Array:
    scores = product(PAIRS, query, key)
    return scores * (scores / divisor)


def _taylor(x: Array) -> Array:
    """Products of these are 1 + s + s²/2, exp(s) to the second order; s = q·k/√H."""
    size = x.shape[-1]
    squares = _squared(x) * (2 * size) ** -0.5
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x * size**-0.25, squares], -1)


def _taylor_pairs(product: Product, query: Array, key: Array, divisor: Array) -> Array:
    scores = product(PAIRS, query, key) * key.shape[-1] ** -0.5
    return 1 / divisor + scores / divisor + scores * (scores / divisor) / 2


IDENTITY = plain(lambda x: x, signed=True)
UNIT = plain(
    _unit,
    pairs=_unit_pairs,
    signed=True,
    leading=lambda size: 1,
    around=_unit_around,
    bounded=True,
)
PLAIN = {
    "elu": plain(_elu_plus_one, elementwise=True),
    "identity": IDENTITY,
    "relu": plain(jax.nn.relu, elementwise=True),
    "relu2": plain(_relu2, elementwise=True),
    "squared": plain(
        _squared, pairs=_squared_pairs, signed=True, leading=lambda size: size
    ),
    "taylor": plain(_taylor, pairs=_taylor_pairs, signed=True, leading=lambda size: 1),
}
