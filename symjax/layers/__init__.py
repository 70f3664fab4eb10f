"""Flax NNX modules: they own weights and call `symjax.attention` for the maths."""

from symjax.layers.attention import Attention, Constant, Lambda
from symjax.layers.block import Block
from symjax.layers.feedforward import FeedForward
from symjax.layers.gau import GatedBlock
from symjax.layers.linear import Linear
from symjax.layers.norms import norm
from symjax.layers.plug import attention_fn
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
