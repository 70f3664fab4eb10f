"""Flax NNX modules: they own weights and call `symjax.attention` for the maths."""

from typing import Any

from jax.sharding import PartitionSpec

from symjax.layers import attention, convolution, gau, universal
from symjax.layers.attention import Attention, Lambda
from symjax.layers.block import Block, FeedForward
from symjax.layers.flax_compat import attention_fn
from symjax.layers.gau import GatedBlock
from symjax.layers.norms import norm
from symjax.layers.parts.part import Constant
from symjax.layers.parts.table import PARTS
from symjax.layers.primitives import Linear
from symjax.layers.universal import UniversalBlock


def rules() -> tuple[tuple[str, PartitionSpec], ...]:
    """Return how weights are sharded: (pattern of the path in the block, axes).

    The first that matches counts. Those of mechanisms that users add are among them.
    """
    return (
        *attention.RULES,
        *convolution.RULES,
        *(
            (f"attention/{pattern}", axes)
            for part in PARTS.values()
            for pattern, axes in part.rules
        ),
        *gau.RULES,
        *universal.RULES,
    )


def __getattr__(name: str) -> Any:
    """`RULES` are those of `rules` at the time that they are asked for."""
    if name == "RULES":
        return rules()
    raise AttributeError(f"module 'symjax.layers' has no attribute {name!r}")


__all__ = [
    "Attention",
    "Block",
    "Constant",
    "FeedForward",
    "GatedBlock",
    "Lambda",
    "Linear",
    "UniversalBlock",
    "attention_fn",
    "norm",
    "rules",
]
