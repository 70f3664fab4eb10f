"""Positions: rotary, sinusoidal, and linear biases (ALiBi)."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from symjax.attention.core.arguments import (
    as_array,
    check_arrays,
    check_count,
    check_flag,
    check_number,
    check_positive,
)
from symjax.attention.core.devices import by_platform

LANES = 128  # of a TPU: numbers that lie side by side in its registers
HEADS_LAST = Layout((0, 1, 2, 3))  # as the kernel of attention reads [B T N H]


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    base: float = 10000.0,
    *,
    interleaved: bool = False,
    share: float = 1.0,
    frequencies: Float[Array, "#B #T half"] | Float[Array, " half"] | None = None,
    attention_factor: float = 1.0,
) -> Float[Array, "B T N H"]:
    """Turn pair i of the first R = share·H features by position · base^(−2i/R).

    The product of a rotated query and a rotated key depends on their distance alone.
    Angles are computed in float32 at least; features after the first R stay as they
    are, bit for bit.

    Args:
        frequencies: what pairs turn by a token, in place of base^(−2i/R), for all
            tokens or for each; `rope_frequencies` has those for longer texts.
        attention_factor: the R features are multiplied by it.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J and the published
            differential layers; otherwise (i, i + R/2), as in GPT-NeoX.
        share: of the features, counted from the first, that turn.
    Raises:
        ValueError: share·H is not an even number from 2 to H; no floating array
            [B T N H], no positions or frequencies of it, or a base or an
            attention_factor that is not above 0.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    check_arrays("rotate", x=x)
    check_positive("rotate", "base", base, needed=True)
    check_number("rotate", "share", share, needed=True)
    check_positive("rotate", "attention_factor", attention_factor, needed=True)
    check_flag("rotate", "interleaved", interleaved)
    positions = as_array("rotate", "positions", positions)
    size = x.shape[-1]
    turning = turning_features(size, share)
    if positions.shape not in ((1, x.shape[1]), x.shape[:2]):
        raise ValueError(
            f"positions must be {x.shape[:2]} of {x.shape}, or 1 for all of its "
            f"examples, got {positions.shape}"
        )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if frequencies is None:
        each = _frequencies(turning, base, wide)[None, None]
    else:
        each = _given_frequencies(frequencies, x.shape, turning).astype(wide)
    angles = (positions[..., None].astype(wide) * each)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not isinstance(attention_factor, float | int) or attention_factor != 1:
        cos, sin = (x * jnp.asarray(attention_factor, wide) for x in (cos, sin))
    shape = (-1, 2) if interleaved else (2, -1)
    turn = partial(_turned, shape, _others)
    if turning < size:
        turned = turn(x[..., :turning], cos, sin)
        return jnp.concatenate([turned, x[..., turning:]], axis=-1)
    if size % LANES:
        return turn(x, cos, sin)
    return by_platform(x, cos, sin, tpu=partial(_turned_on_lanes, shape), default=turn)


def turning_features(head_size: int, share: float) -> int:
    """Return R = share·H, the number of features that `rotate` turns.

    Raises:
        ValueError: R is not an even number from 2 to H.
    """
    turning = round(share * head_size)
    odd = turning % 2 or abs(turning - share * head_size) > 1e-6
    if odd or not 2 <= turning <= head_size:
        raise ValueError(
            "rotary positions turn an even number of features, from 2 to all, got "
            f"share {share} of {head_size} features"
        )
    return turning


def _given_frequencies(
    frequencies: Array, shape: tuple[int, ...], turning: int
) -> Float[Array, "#B #T half"]:
    """Raises: ValueError: they are not those of the pairs of x, by its shape."""
    found = as_array("rotate", "frequencies", frequencies)
    found = found[None, None] if found.ndim == 1 else found
    wanted = (*shape[:2], turning // 2)
    if found.ndim != 3 or any(
        x not in (1, y) for x, y in zip(found.shape, wanted, strict=True)
    ):
        raise ValueError(
            f"rotate: frequencies must be {wanted[2:]} or {wanted} of {shape}, got "
            f"{found.shape}"
        )
    return found


def _turned(
    shape: tuple[int, int],
    others: Callable[[tuple[int, int], Array], Array],
    x: Float[Array, "B T N H"],
    cos: Float[Array, "#B T 1 H/2"],
    sin: Float[Array, "#B T 1 H/2"],
) -> Float[Array, "B T N H"]:
    """x cos ∓ (the other of its pair) sin, of features laid out in this shape, with an
    axis of two for the pairs.

    The result is not put together from halves: on an H200 that takes four times as long
    as its bytes.
    """
    axis = shape.index(2) - 2

    def both(first: Array, second: Array) -> Array:
        stacked = jnp.stack([first, second], axis=axis)
        return stacked.reshape(*first.shape[:-1], x.shape[-1])

    wide = x.astype(cos.dtype)
    turned = wide * both(cos, cos) + others(shape, wide) * both(-sin, sin)
    return turned.astype(x.dtype)


def _others(
    shape: tuple[int, int], x: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    pairs = x.reshape(*x.shape[:-1], *shape)
    return jnp.flip(pairs, axis=shape.index(2) - 2).reshape(x.shape)


def _turned_on_lanes(
    shape: tuple[int, int], x: Float[Array, "B T N H"], cos: Array, sin: Array
) -> Float[Array, "B T N H"]:
    """The same, with the other of every pair by a product with a permutation, which is
    exact. With an axis of two, a TPU's compiler would lay time along the lanes and copy
    the result for the kernel of attention."""
    x = with_layout_constraint(x, HEADS_LAST)
    # One pass is enough for bfloat16, whose products with 0 and 1 are exact.
    exact = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    turned = _turned(shape, partial(_others_by_product, exact), x, cos, sin)
    return with_layout_constraint(turned, HEADS_LAST)


def _others_by_product(
    exact: jax.lax.Precision | None,
    shape: tuple[int, int],
    x: Float[Array, "B T N H"],
) -> Float[Array, "B T N H"]:
    numbers = jnp.arange(x.shape[-1])
    others = jnp.flip(numbers.reshape(shape), axis=shape.index(2) - 2)
    swap = (numbers[:, None] == others.reshape(1, -1)).astype(x.dtype)
    return jnp.einsum("btnh,hk->btnk", x, swap, precision=exact)


def sinusoidal(
    positions: Int[Array, "*T"], width: int, base: float = 10000.0
) -> Float[Array, "*T {width}"]:
    """sin(position · base^(−2i/width)) at feature 2i, and the cosine at 2i + 1.

    In the default float type, or that of the positions if it is wider.

    Raises:
        ValueError: the width is odd or below 2, or a base that is not above 0.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    check_count("sinusoidal", "width", width, least=2)
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width, got {width}")
    check_positive("sinusoidal", "base", base, needed=True)
    positions = as_array("sinusoidal", "positions", positions)
    wide = jnp.promote_types(positions.dtype, jnp.result_type(float))
    frequencies = _frequencies(width, base, wide)
    angles = jnp.multiply.outer(positions.astype(wide), frequencies)
    waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return waves.reshape(*positions.shape, width)


def alibi_slopes(heads: int) -> Float[Array, "N"]:
    """One slope a head: 2^(−8(h+1)/N) for N a power of two.

    For any other N: the slopes of the power of two below it, then every other slope
    of the power of two above it, beginning with the first.

    Raises:
        ValueError: fewer than 1 head.
    Source: Press et al. 2021, arXiv:2108.12409, section 3 and its published code.
    """
    check_count("alibi_slopes", "heads", heads)
    power = 2 ** int(math.log2(heads))
    steps = [(h + 1) / power for h in range(power)]
    steps += [(2 * h + 1) / (2 * power) for h in range(heads - power)]
    return 2.0 ** (-8 * jnp.asarray(steps))


def alibi_bias(
    heads: int | Float[Array, "N"],
    keys: Int[Array, "S"],
    rows: Int[Array, "T"] | None = None,
) -> Float[Array, "1 N #T S"]:
    """A bias against distance for the scores, slope by slope: −m·(t − s) or −m·|t − s|.

    Softmax, sparsemax and entmax do not see a constant in a row. So a causal row at t
    needs no more than m·s, of linear size and the same for all rows; it is given as
    −m·(last − s), numbers that are small where keys are near the last. Rows far from it
    are rounded: `alibi` of a score mechanism takes slopes, and each row's distances.
    Without causality distances count on both sides, and `rows` gives the [T S] of them.

    Args:
        heads: how many, for the slopes of `alibi_slopes`, or the slopes themselves.
        keys: the positions of the keys.
        rows: None for causal attention, otherwise the positions of the queries.
    Raises:
        ValueError: positions or slopes have more than one axis.
    Source: Press et al. 2021, arXiv:2108.12409, equation 2.
    """
    one = isinstance(heads, int | np.integer)
    given = {"slopes": alibi_slopes(int(heads)) if one else heads, "keys": keys}
    if rows is not None:
        given["rows"] = rows
    arrays = {name: as_array("alibi_bias", name, x) for name, x in given.items()}
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ValueError(
                f"alibi_bias: {name} must have one axis, got {array.shape}"
            )
    slopes, keys = arrays["slopes"], arrays["keys"][None]
    own = arrays.get("rows", arrays["keys"][-1:])[:, None]
    # Not by abs: the difference of unsigned numbers wraps.
    distance = (jnp.maximum(own, keys) - jnp.minimum(own, keys)).astype(slopes.dtype)
    return -slopes[None, :, None, None] * distance[None, None]


def _frequencies(size: int, base: float, dtype: jnp.dtype) -> Float[Array, "half"]:
    """base^(−2i/size) for each pair i of `size` features."""
    return base ** (-jnp.arange(0, size, 2, dtype=dtype) / size)
