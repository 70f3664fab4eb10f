"""Layers that are alike as one stack, so that an optimizer is one program for them.

The weights of 20 layers and their moments are hundreds of arrays, and each would have
its own update for the compiler to fuse, place and schedule. Stacked they are as many
as those of one layer. States and checkpoints keep the layers apart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Stacks(NamedTuple):
    """Where equal layers stand among the blocks of a model.

    Attributes:
        depth: the number of blocks.
        period: the same place of another period has weights of the same shapes; 0: no
            layers are stacked.
    """

    depth: int
    period: int

    def stack(self, tree: Any) -> Any:
        """Arrays [layers of a place, ...] under `blocks`, by place in a period."""

        def stacked(blocks: dict[int, Any], place: int) -> Any:
            alike = [blocks[i] for i in range(place, self.depth, self.period)]
            return jax.tree.map(lambda *layers: jnp.stack(layers), *alike)

        return self._map(tree, stacked, self.period)

    def split(self, tree: Any) -> Any:
        """The layers of `stack(tree)` apart, as they were."""

        def layer(stacks: dict[int, Any], i: int) -> Any:
            index, place = divmod(i, self.period)
            return jax.tree.map(lambda stack: stack[index], stacks[place])

        return self._map(tree, layer, self.depth)

    def first(self, tree: Any) -> Any:
        """`tree` with the layers of the first period alone, one for each stack."""
        return self._map(tree, lambda blocks, place: blocks[place], self.period)

    def _map(self, tree: Any, choose: Callable, count: int) -> Any:
        """`tree` with count entries choose(blocks, i) in place of any `blocks`."""

        def of_weights(x: Any) -> bool:
            return isinstance(x, dict) and "blocks" in x

        def chosen(x: Any) -> Any:
            if not of_weights(x):
                return x
            return {**x, "blocks": {i: choose(x["blocks"], i) for i in range(count)}}

        return jax.tree.map(chosen, tree, is_leaf=of_weights) if self.period else tree
