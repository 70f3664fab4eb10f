"""Logarithms of decays: the constants of papers, and those of learned gates."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from symjax.attention.checks import (
    as_array,
    check_choice,
    check_count,
    check_positive,
)
from symjax.attention.chunks import sum_dtype
from symjax.attention.positions import alibi_slopes


def retention_log_decay(heads: int) -> Float[Array, "N"]:
    """log(1 − 2^(−5−h)) of heads h from 0: a memory of 32, 64, 128 … tokens.

    Raises:
        ValueError: fewer than 1 head.
    Source: Sun et al. 2023, arXiv:2307.08621, "multi-scale retention".
    """
    check_count("retention_log_decay", "heads", heads)
    return jnp.asarray(np.log1p(-(2.0 ** (-5 - np.arange(heads)))))


def lightning_log_decay(
    heads: int, layer: int, layers: int, *, convention: str
) -> Float[Array, "N"]:
    """The constant decays of Lightning attention, by one of two published conventions.

    "transnormer": −2^(−8(h+1)/N) (1 − l/(L−1) + 1e-5), as in OpenNLPLab's models; by
        `alibi_slopes` where N is no power of two.
    "fla": −(8h/N) (1 − l/L), as in flash-linear-attention; head 0 never decays.

    Args:
        layer, layers: l, counted from 0, of L: later layers remember longer.
    Raises:
        ValueError: an unknown convention, fewer than 1 head, or no such layer.
    Source: Qin et al. 2023, arXiv:2307.14995.
    """
    who = "lightning_log_decay"
    check_count(who, "heads", heads)
    check_count(who, "layers", layers)
    check_count(who, "layer", layer, least=0)
    if layer >= layers:
        raise ValueError(
            f"{who}: layer must be 0 to layers - 1, got layer {layer} "
            f"and layers {layers}"
        )
    check_choice(who, "convention", convention, ("fla", "transnormer"))
    if convention == "transnormer":
        slopes = alibi_slopes(heads) * (1 - layer / max(layers - 1, 1) + 1e-5)
    else:
        slopes = 8 * np.arange(heads) / heads * (1 - layer / layers)
    return jnp.asarray(-slopes)


def gated_log_decay(
    logits: Float[Array, "*shape"], power: float = 1 / 16
) -> Float[Array, "*shape"]:
    """power · log sigmoid(logits), in float32 at least: a gate that a layer learns.

    Raises:
        ValueError: a power that is not above 0, whose state would grow.
    Source: Yang et al. 2023, arXiv:2312.06635.
    """
    logits = as_array("gated_log_decay", "logits", logits)
    check_positive("gated_log_decay", "power", power, needed=True)
    return power * jax.nn.log_sigmoid(logits.astype(sum_dtype(logits)))


class LogDecay(NamedTuple):
    """A rule that gives every key head of a layer its log-decay, which is at most 0.

    Attributes:
        rates: (heads, layer, layers) → constants [heads]; layers count from 0.
        gate: logits → log-decays, element by element; the logits are a learned linear
            map of the token.
        per: "head" or "channel", for which there is one logit.
    """

    rates: Callable[[int, int, int], Float[Array, "N"]] | None = None
    gate: Callable[[Array], Array] | None = None
    per: str = "head"


# By the names of model.attention.decay. Those of mamba2 and kda need more weights than
# a map of the token: `symjax.layers.parts.decays` has them.
LOG_DECAYS = {
    "retention": LogDecay(lambda heads, layer, layers: retention_log_decay(heads)),
    "transnormer": LogDecay(partial(lightning_log_decay, convention="transnormer")),
    "lightning": LogDecay(partial(lightning_log_decay, convention="fla")),
    "gated": LogDecay(gate=gated_log_decay, per="channel"),
    "mamba2": LogDecay(),
    "kda": LogDecay(per="channel"),
    "none": LogDecay(lambda heads, layer, layers: jnp.zeros(heads)),
}
