"""Positions: rotary, sinusoidal, and biases of scores (ALiBi, or learned)."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from symjax.attention.core.arguments import (
    as_array,
    check_arrays,
    check_count,
    check_flag,
    check_number,
    check_positive,
)
from symjax.attention.core.products import einsum
from symjax.attention.scores.rotation import rotated


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
    """Rotate pair i of the first R = share·H features by position · base^(−2i/R).

    The product of a rotated query and a rotated key depends on their positions through
    the distance alone. Angles are computed in float32 at least. Features after the
    first R stay as they are, bit for bit. On one TPU, or inside `jax.shard_map`, a
    kernel rotates bfloat16 and float32 arrays if T and R are multiples of 128. It has
    no forward-mode derivative (`jax.jvp`).

    Args:
        positions: one per token, or one row for all examples.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J and the published
            differential layers; otherwise (i, i + R/2), as in GPT-NeoX.
        share: share of the features that are rotated, counted from the first.
        frequencies: angle per position of each pair, instead of base^(−2i/R); the same
            for all tokens, or one row per token. `rope_frequencies` returns those of
            scaled RoPE.
        attention_factor: factor of the R rotated features.
    Raises:
        ValueError: share·H is not an even number from 2 to H; x is not a floating array
            [B T N H]; positions or frequencies do not fit x; a base or an
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
    turning = turning_features(x.shape, share)
    if positions.shape not in ((1, x.shape[1]), x.shape[:2]):
        raise ValueError(
            f"rotate: positions must be {x.shape[:2]} or {(1, x.shape[1])} for x "
            f"{x.shape}, got {positions.shape}"
        )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if frequencies is None:
        per_pair = _frequencies(turning, base, wide)[None, None]
    else:
        per_pair = _checked_frequencies(frequencies, x.shape, turning).astype(wide)
    angles = (positions[..., None].astype(wide) * per_pair)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not isinstance(attention_factor, float | int) or attention_factor != 1:
        cos, sin = (x * jnp.asarray(attention_factor, wide) for x in (cos, sin))
    shape = (-1, 2) if interleaved else (2, -1)
    if turning < size:
        part = rotated(shape, x[..., :turning], cos, sin)
        return jnp.concatenate([part, x[..., turning:]], axis=-1)
    return rotated(shape, x, cos, sin)


def turning_features(shape: tuple[int, ...], share: float) -> int:
    """Return R = share·H, the number of features that `rotate` rotates.

    Args:
        shape: shape of an array whose last axis is a head, or (H,).
    Raises:
        ValueError: R is not an even number from 2 to H.
    """
    head_size = shape[-1]
    turning = round(share * head_size)
    odd = turning % 2 or abs(turning - share * head_size) > 1e-6
    if odd or not 2 <= turning <= head_size:
        raise ValueError(
            "rotary positions turn an even number of features, from 2 to all, got "
            f"share {share} of {shape}"
        )
    return turning


def _checked_frequencies(
    frequencies: Array, shape: tuple[int, ...], turning: int
) -> Float[Array, "#B #T half"]:
    """Return the frequencies as an array with axes of batch, time and pairs.

    Raises:
        ValueError: the frequencies do not fit `shape`, the shape of x.
    """
    array = as_array("rotate", "frequencies", frequencies)
    array = array[None, None] if array.ndim == 1 else array
    wanted = (*shape[:2], turning // 2)
    if array.ndim != 3 or any(
        x not in (1, y) for x, y in zip(array.shape, wanted, strict=True)
    ):
        raise ValueError(
            f"rotate: frequencies must be {wanted[2:]} or {wanted} for x {shape}, got "
            f"{array.shape}"
        )
    return array


def sinusoidal(
    positions: Int[Array, "*T"], width: int, base: float = 10000.0
) -> Float[Array, "*T {width}"]:
    """Return sinusoidal features of positions.

    Feature 2i is sin(position · base^(−2i/width)), and feature 2i + 1 is the cosine of
    this angle. The result has the default float type, or that of the positions if it is
    wider.

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
    """Return one slope per head h: 2^(−8(h+1)/N), if N is a power of two.

    For any other N the result has the slopes of the power of two below N, then every
    other slope of the power of two above N, beginning with the first.

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
    """Return a bias of the scores that falls with distance, with a slope m per head.

    For causal attention the bias is −m·(last − s), where s is the position of a key and
    `last` that of the last key. One row is enough for all queries: adding a number to a
    whole row of scores changes no weight of softmax, sparsemax or entmax. Biases of
    keys far from the last one have rounding errors, which the option `alibi` of score
    mechanisms avoids. With `rows` the bias is −m·|t − s|, with a row for each query t.

    Args:
        heads: the slopes, or the number of heads, which then have the slopes of
            `alibi_slopes`.
        keys: positions of the keys.
        rows: positions of the queries; None for causal attention.
    Raises:
        ValueError: positions or slopes do not have one axis.
    Source: Press et al. 2021, arXiv:2108.12409, equation 2.
    """
    is_count = isinstance(heads, int | np.integer)
    values = {"slopes": alibi_slopes(int(heads)) if is_count else heads, "keys": keys}
    if rows is not None:
        values["rows"] = rows
    arrays = {name: as_array("alibi_bias", name, x) for name, x in values.items()}
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ValueError(
                f"alibi_bias: {name} must have one axis, got {array.shape}"
            )
    slopes, keys = arrays["slopes"], arrays["keys"][None]
    row = arrays.get("rows", arrays["keys"][-1:])[:, None]
    # Not abs(row − keys): differences of unsigned integers wrap.
    distance = (jnp.maximum(row, keys) - jnp.minimum(row, keys)).astype(slopes.dtype)
    return -slopes[None, :, None, None] * distance[None, None]


def position_bias(
    weight: Float[Array, "N M"], positions: Int[Array, "#B S"]
) -> Float[Array, "#B N 1 S"]:
    """Return a bias of scores by the position s of the key, w·f(s), with a w per head.

    f(s) has the M features of `sinusoidal`. The bias breaks the symmetry of scores: it
    differs between (query t, key s) and (query s, key t). All queries have the same
    bias, so it takes O(N S) memory, and cached keys need no change.

    Args:
        weight: w of each head.
        positions: positions of the keys, one row for all examples or one per example.
    Raises:
        ValueError: weight or positions do not have two axes, or M is odd or below 2.
    Source: Kayyam et al. 2026, arXiv:2606.04032: the part of their position term that
        changes weights of softmax.
    """
    weight = as_array("position_bias", "weight", weight)
    positions = as_array("position_bias", "positions", positions)
    if weight.ndim != 2 or positions.ndim != 2:
        raise ValueError(
            "position_bias: weight must be [heads, features] and positions [batch or "
            f"1, keys], got {weight.shape} and {positions.shape}"
        )
    features = sinusoidal(positions, weight.shape[1])
    return einsum("nm,bsm->bns", weight, features)[:, :, None]


def _frequencies(size: int, base: float, dtype: jnp.dtype) -> Float[Array, "half"]:
    """Return base^(−2i/size) for each pair i of `size` features."""
    return base ** (-jnp.arange(0, size, 2, dtype=dtype) / size)
