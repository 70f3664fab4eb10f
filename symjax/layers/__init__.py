"""Flax NNX modules: they own weights and call `symjax.attention` for the maths."""

from symjax.layers import attention, convolution, gau, universal
from symjax.layers.attention import Attention, Lambda
from symjax.layers.block import Block, FeedForward
from symjax.layers.flax_compat import attention_fn
from symjax.layers.gau import GatedBlock
from symjax.layers.mechanisms import PARTS
from symjax.layers.norms import norm
from symjax.layers.parts import Constant
from symjax.layers.primitives import Linear
from symjax.layers.universal import UniversalBlock

# Sharding of weights: (pattern of the path in the block, axes), the first that matches.
RULES = (
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

__all__ = [
    "RULES",
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
]
