"""Flax NNX modules: they hold weights and call `symjax.attention` for the maths.

Read them from the outside to the inside:

block.py       Block: norm, attention, norm, feed-forward; the values of model.remat
attention.py   Attention: projections, λ of differential attention, output
mixer.py       Mixer: runs the mechanism over a row, or over new tokens with a cache
parts/         what a mechanism adds to its layer: weights, operands, sharding rules
gau.py         GatedBlock: one block in place of attention and feed-forward
universal.py   UniversalBlock: one block repeated until a token halts

primitives.py  Linear, dropout, rotary positions
convolution.py norms.py position_term.py   smaller modules of a layer
segments.py    documents in a row: positions, and the masks that mechanisms receive
sharded.py     each device of a mesh computes its own examples and heads
validate.py    checks model.* and returns the sizes and the mechanism's options by depth
flax_compat.py attention_fn: mechanisms inside Flax's own attention layers

Sharding. `RULES` of these files and `rules` of the parts map the path of a weight to
mesh axes. `rules()` collects them. `symjax.training.sharding` adds the rules for the
other weights of a model; a weight that no rule matches is an error.

Choices that differ by layer. model.pattern sets the mechanism of each layer
(`config.mechanism_of`). All layers of one mechanism have the same options, from
`validate.mechanism_options`. docs/mechanism.md, section 6, lists the changes that make
options differ by layer, such as a window in every second layer.
"""

from typing import Any

from jax.sharding import PartitionSpec

from symjax.layers import attention, convolution, gau, position_term, universal
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
    """Return the sharding rules: (pattern of a weight's path in its block, mesh axes).

    The first pattern that matches counts. Mechanisms that users add have rules too, so
    the table is made at each call.
    """
    return (
        *attention.RULES,
        *convolution.RULES,
        *position_term.RULES,
        *(
            (f"attention/{pattern}", axes)
            for part in PARTS.values()
            for pattern, axes in part.rules
        ),
        *gau.RULES,
        *universal.RULES,
    )


def __getattr__(name: str) -> Any:
    """Return `rules()` for `RULES`, a former name that users' code may still use."""
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
