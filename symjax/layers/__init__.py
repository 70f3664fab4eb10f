"""Flax NNX modules: they own weights and call `symjax.attention` for the maths."""

from symjax.layers.attention import Attention, Constant, Lambda
from symjax.layers.block import Block, FeedForward
from symjax.layers.flax_compat import attention_fn
from symjax.layers.gau import GatedBlock
from symjax.layers.primitives import Linear, norm
from symjax.layers.universal import UniversalBlock

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
]
