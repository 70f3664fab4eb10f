"""Scaled frequencies of RoPE, for texts longer than those of training.

RoPE rotates pair i of R features by θ_i = base^(−2i/R) per token. A model that was
trained with n tokens (`original_length`) is to read texts s times as long (`factor`).
Each kind of scaling replaces θ_i:

linear    by θ_i / s
dynamic   in texts of L > n tokens, by θ_i of a larger base:
          base · (s L/n − s + 1)^(R/(R − 2))
yarn      by θ_i / s for slow pairs. Fast pairs keep θ_i. The share of θ_i / s rises
          linearly with i between them. The caller multiplies rotated features by
          0.1 ln s + 1 (`rope_attention_factor`)
llama3    by θ_i / s for pairs with fewer than low_frequency_factor turns in n tokens.
          Pairs with more than high_frequency_factor turns keep θ_i. Between them the
          share of θ_i / s falls linearly with the number of turns

Sources: Chen et al. 2023, arXiv:2306.15595 (linear); Peng et al. 2023, arXiv:2309.00071
(yarn, and dynamic in its appendix B); Llama Team 2024, arXiv:2407.21783 (llama3).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from symjax.attention.core.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_number,
)

SCALED = ("linear", "dynamic", "yarn", "llama3")
KINDS = ("none", *SCALED)
OF_A_LENGTH = ("dynamic", "yarn", "llama3")  # kinds that need original_length


def rope_frequencies(
    size: int,
    base: float = 10000.0,
    kind: str = "none",
    *,
    factor: float = 1.0,
    original_length: int = 0,
    low_frequency_factor: float = 1.0,
    high_frequency_factor: float = 4.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    length: Int[Array, "*L"] | int = 0,
) -> Float[Array, "*L half"] | Float[np.ndarray, " half"]:
    """Return the angle per token of each pair of `size` features, for `rotate`.

    The result is a NumPy array of float64. For "dynamic" it is a jax array of the
    default float type, since it depends on the array `length`.

    Args:
        size: R, the number of rotated features.
        kind: "none", "linear", "dynamic", "yarn" or "llama3"; the formulas are at the
            top of `symjax/attention/rope_scaling.py`.
        factor: s, the ratio of the new length of texts to `original_length`. At least
            1.
        original_length: n, needed by dynamic, yarn and llama3.
        low_frequency_factor, high_frequency_factor: for llama3, two numbers of turns in
            n tokens. θ_i is divided by s if pair i makes fewer turns than the first,
            and unchanged if it makes more than the second.
        beta_slow, beta_fast: the same two limits for yarn.
        truncate: for yarn, round the values of i at these limits to integers, the lower
            one down and the upper one up.
        length: for dynamic, L of each text.
    Raises:
        ValueError: an option is out of its range, or the kind is unknown.
    """
    who = "rope_frequencies"
    check_count(who, "size", size, least=2)
    check_choice(who, "kind", kind, KINDS)
    check_flag(who, "truncate", truncate)
    least = 1 if kind in OF_A_LENGTH else 0
    check_count(who, "original_length", original_length, least=least)
    for name, value in (
        ("low_frequency_factor", low_frequency_factor),
        ("high_frequency_factor", high_frequency_factor),
        ("beta_fast", beta_fast),
        ("beta_slow", beta_slow),
    ):
        check_number(who, name, value, needed=True)
    _check_factor(who, factor)
    _check_ends(who, "beta_slow", beta_slow, "beta_fast", beta_fast)
    _check_ends(
        who,
        "low_frequency_factor",
        low_frequency_factor,
        "high_frequency_factor",
        high_frequency_factor,
    )
    pairs = np.arange(0, size, 2) / size
    if kind == "dynamic":
        return _dynamic(who, pairs, base, factor, original_length, length)
    unscaled = float(base) ** -pairs
    if kind == "none":
        return unscaled
    if kind == "linear":
        return unscaled / factor
    if kind == "yarn":
        betas = beta_fast, beta_slow
        share = _unscaled_share(who, size, base, original_length, betas, truncate)
    else:
        turns = original_length * unscaled / (2 * math.pi)
        ramp = turns - low_frequency_factor
        share = np.clip(ramp / (high_frequency_factor - low_frequency_factor), 0, 1)
    return (1 - share) * unscaled / factor + share * unscaled


def rope_attention_factor(factor: float) -> float:
    """Return 0.1 ln s + 1, the factor of rotated queries and keys in yarn.

    Raises:
        ValueError: a factor below 1.
    """
    _check_factor("rope_attention_factor", factor)
    return 0.1 * math.log(factor) + 1


def _check_factor(who: str, factor: float) -> None:
    check_number(who, "factor", factor, needed=True)
    if factor < 1:
        raise ValueError(f"{who}: factor must be at least 1, got {factor}")


def _check_ends(who: str, low: str, least: float, high: str, most: float) -> None:
    if not 0 < least < most:
        raise ValueError(
            f"{who}: {low} must be above 0 and below {high} {most}, got {least}"
        )


def _dynamic(
    who: str,
    pairs: np.ndarray,
    base: float,
    factor: float,
    original_length: int,
    length: Int[Array, "*L"] | int,
) -> Float[Array, "*L half"]:
    """Return frequencies of a base that grows with the length of a text above n."""
    size = 2 * len(pairs)
    if size == 2:
        raise ValueError(f"{who}: kind 'dynamic' needs at least 4 features, got 2")
    wide = jnp.result_type(float)
    ratio = jnp.maximum(jnp.asarray(length, wide) / original_length, 1)
    growth = (factor * ratio - (factor - 1))[..., None]

    def row(numbers: np.ndarray) -> Array:
        return jnp.expand_dims(jnp.asarray(numbers, wide), range(growth.ndim - 1))

    return row(float(base) ** -pairs) * growth ** row(-pairs * size / (size - 2))


def _unscaled_share(
    who: str,
    size: int,
    base: float,
    original_length: int,
    betas: tuple[float, float],
    truncate: bool,
) -> Float[np.ndarray, " half"]:
    """Return the share of θ_i that yarn does not scale: 1 for fast pairs, 0 for slow.

    Between fast and slow pairs the share is linear in i, as in the published code. In
    the paper it is linear in the number of turns.
    """
    if base <= 1:
        raise ValueError(f"{who}: kind 'yarn' needs a base above 1, got {base}")
    first, last = (  # the pairs with beta turns in original_length tokens
        size * math.log(original_length / (beta * 2 * math.pi)) / (2 * math.log(base))
        for beta in betas
    )
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 * (first == last)
    return 1 - np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
