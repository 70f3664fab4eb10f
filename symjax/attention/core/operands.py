"""Operands of attention: arrays of one call, and what every block of rows shares."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.meshes import rows_as
from symjax.attention.core.visibility import Visibility


class Tokens(NamedTuple):
    """What a mechanism is given, as it is given."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    operands: tuple[Any, ...] = ()  # more of each token, [#B #T K …]
    mask: Bool[Array, "#B 1 1 #S"] | None = None
    segment_ids: Int[Array, "B T"] | None = None


# Scores [B N t s] and the visible pairs (None: all) → weights, zero where not visible;
# or weights and what divides them, [B N t 1], which is applied to rows of output.
RowWeights = Callable[[Array, Array | None], Array | tuple[Array, Array]]


class Operands(NamedTuple):
    """What a block of rows is computed from; axes of length 1 are broadcast.

    Heads stand before time: a block is then a product of plain matrices, 3–11 % faster
    on CPU.
    """

    query: Float[Array, "B Nq T H"]
    key: Float[Array, "B Nk S H"]
    value: Float[Array, "B K S V"]
    bias: Float[Array, "#B #Nq #T #S"] | None
    slopes: Float[Array, "1 Nq 1 1"] | None
    lam: Float[Array, "#B N #T"] | None
    scale: Float[Array, ""]
    visibility: Visibility

    def swapped(self) -> "Operands":
        """Time before heads, or back."""
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in self[:3])
        return self._replace(query=query, key=key, value=value)

    def branch(self, index: int) -> "Operands":
        """The first or the second head of each pair of query heads, with its keys;
        `value` and `lam` stay those of the pairs."""

        def own(x: Array | None) -> Array | None:
            return x if x is None or x.shape[1] == 1 else x[:, index::2]

        shared = self.key.shape[1] == self.value.shape[1]
        return self._replace(
            query=own(self.query),
            key=self.key if shared else own(self.key),
            bias=own(self.bias),
            slopes=own(self.slopes),
            visibility=replace(self.visibility, mask=own(self.visibility.mask)),
        )

    def map_rows(self, function: Callable) -> "Operands":
        """function(array, axis of rows) of every array that may have it."""
        known = self.visibility
        return self._replace(
            query=function(self.query, 2),
            bias=function(self.bias, 2),
            lam=function(self.lam, 2),
            visibility=replace(
                known,
                rows=function(known.rows, 1),
                mask=function(known.mask, 2),
                row_segments=function(known.row_segments, 1),
            ),
        )

    def map_keys(self, function: Callable) -> "Operands":
        """function(array, axis of keys) of every array that may have it."""
        return self._replace(
            key=function(self.key, 2),
            value=function(self.value, 2),
            bias=function(self.bias, 3),
            visibility=self.visibility.map_keys(function),
        )


class Rule(NamedTuple):
    """The static half of a call: what every block does alike."""

    weights: RowWeights
    scale: float | None  # of the scores; None: known at run time
    length_base: float | None
    offset: int | None  # the place of row 0 among the keys; None: known at run time
    whole: bool  # all rows as one block, without checkpointing
    dtypes: tuple[Any, Any]  # of keys and values where they are multiplied
    block_rows: int
    extents: int
    few_keys: int  # up to which a CPU takes causal rows as two blocks


def rows_spec(operands: Operands) -> P:
    """How rows are sharded: as queries, by value heads where pairs of heads are one."""
    batch, heads, time, _ = jax.typeof(operands.query).sharding.spec
    if operands.lam is not None:
        heads = jax.typeof(operands.value).sharding.spec[1]
    return rows_as((batch, heads, time), operands.value)
