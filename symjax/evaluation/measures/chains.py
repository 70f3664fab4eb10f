"""Attention maps as Markov chains: stationary distribution and detailed balance.

Rows of a softmax map are transition probabilities: token t moves to token s with
probability a_ts. The stationary distribution π satisfies π A = π: in an infinite random
walk, π_s is the fraction of steps at token s. A chain is reversible if it satisfies
detailed balance,

    π_t a_ts = π_s a_st     for all t and s.

Softmax of symmetric scores without a causal mask is reversible, with
π_t ∝ Σ_s exp(score_ts), since π_t a_ts ∝ exp(score_ts).

The chain of a causal map tells nothing: the first token sees only itself, so every walk
ends there. A differential map A₁ − λA₂ may have negative entries, so it is no chain.
The maps of its branches are chains.
"""

import numpy as np
from jaxtyping import Float

Chains = Float[np.ndarray, "*N T T"]


def is_stochastic(maps: Chains, tolerance: float = 1e-4) -> bool:
    """Return whether all entries are at least 0 and all rows sum to 1."""
    sums = maps.sum(axis=-1)
    return bool((maps >= 0).all() and np.abs(sums - 1).max(initial=0) < tolerance)


def stationary(maps: Chains) -> Float[np.ndarray, "*N T"]:
    """Return π with π A = π and Σ π = 1; NaN if not all tokens reach each other.

    Tokens are eliminated from the chain one by one. The algorithm subtracts nothing, so
    small entries of π are as exact as large ones. Cost O(T³).

    Source: Grassmann, Taksar and Heyman 1985, doi:10.1287/opre.33.5.1107.
    """
    chain = maps.astype(np.float64)
    size = chain.shape[-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        for last in range(size - 1, 0, -1):
            leaving = chain[..., last, :last].sum(axis=-1)[..., None]
            arriving = chain[..., :last, last] / leaving
            chain[..., :last, last] = arriving
            through = arriving[..., :, None] * chain[..., last, None, :last]
            chain[..., :last, :last] += through
        shares = np.ones((*chain.shape[:-2], size))
        for token in range(1, size):
            before = shares[..., :token] * chain[..., :token, token]
            shares[..., token] = before.sum(axis=-1)
        shares /= shares.sum(axis=-1, keepdims=True)
    return np.where(np.isfinite(shares), shares, np.nan)


def balance_error(maps: Chains, shares: Float[np.ndarray, "*N T"]) -> np.ndarray:
    """Return |F − Fᵀ| / |F| in Frobenius norms, with the flows F_ts = π_t a_ts.

    It is 0 for a reversible chain, and at most √2.
    """
    flows = shares[..., :, None] * maps
    difference = flows - np.swapaxes(flows, -1, -2)
    return np.linalg.norm(difference, axis=(-2, -1)) / np.linalg.norm(
        flows, axis=(-2, -1)
    )
