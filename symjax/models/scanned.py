"""The blocks of a deep model as one loop: its program is that of one period."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from symjax.layers.block import rematerialised
from symjax.layers.primitives import features_last
from symjax.layers.segments import Segments

Values = dict[str, Array]  # path of the attribute inside the block → its value


def run_scanned(
    model: Any,
    x: Float[Array, "B T D"],
    keys: Sequence[Array | None],
    padding_mask: Bool[Array, "B T"] | None = None,
    segments: Segments | None = None,
) -> Float[Array, "B T D"]:
    """`x` through all blocks, as `jax.lax.scan` over the periods of a pattern.

    The weights of the blocks at one place of every period are stacked first, matrices
    in the type of the computation. So a step copies the weights once; the model, its
    optimizer and its checkpoints keep those of each block apart.

    Args:
        model: its blocks, their remat, the dtype of the computation, and the period:
            blocks that are unrolled inside the loop, of which the same place of another
            period has the same modules.
        keys: of dropout, one a block.
        padding_mask, segments: as in `symjax.layers.Block`.
    Raises:
        ValueError: blocks differ in more than weights and numbers of their depth.
    """
    blocks, period = model.blocks, model.period
    graphs = [_graph(block) for block in blocks]
    for depth, graph in enumerate(graphs):
        if graph != graphs[depth % period]:
            raise ValueError(
                f"block {depth} differs from block {depth % period} in more than its "
                "weights: model.scan_layers cannot run both as one program"
            )

    inputs = [
        (_weights(block, model.dtype), of_depth(block), key)
        for block, key in zip(blocks, keys, strict=True)
    ]
    stacked = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs[place::period])
        for place in range(period)
    ]
    return _scan(
        tuple(graphs[:period]), model.remat, x, padding_mask, segments, stacked
    )


@partial(jax.jit, static_argnums=(0, 1))
def _scan(
    graphs: tuple[nnx.GraphDef, ...],
    remat: str,
    x: Array,
    padding_mask: Array | None,
    segments: Segments | None,
    stacked: list[Any],
) -> Array:
    """A function of its own, so that a call outside `jax.jit` is compiled once."""

    def run(graph: nnx.GraphDef, inputs: Any, x: Array) -> Array:
        weights, values, key = inputs
        block = nnx.merge(graph, weights)
        give(block, values)
        return block(x, padding_mask, segments, dropout_key=key)

    def step(x: Array, inputs: list[Any]) -> tuple[Array, None]:
        for graph, own in zip(graphs, inputs, strict=True):
            block = rematerialised(partial(run, graph), remat, in_scan=True)
            x = block(own, features_last(x))
        return x, None

    return jax.lax.scan(step, x, stacked)[0]


def _graph(block: nnx.Module) -> nnx.GraphDef:
    """The static structure of a block without its numbers of depth."""
    bare = nnx.merge(*nnx.split(block))
    give(bare, dict.fromkeys(of_depth(bare)))
    return nnx.graphdef(bare)


def _weights(block: nnx.Module, dtype: Any) -> Any:
    """Its arrays, the kernels as the layers will use them.

    Narrow ones are half the copy, and half of what fsdp gathers.
    """

    def cast(path: tuple, weight: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return weight.astype(dtype) if name.endswith("/kernel") else weight

    return jax.tree_util.tree_map_with_path(cast, nnx.to_pure_dict(nnx.state(block)))


def of_depth(block: nnx.Module) -> Values:
    """The attributes named in BY_DEPTH, of a block and the modules in it, by path."""
    return {
        "/".join(map(str, (*path, name))): jnp.asarray(getattr(module, name))
        for path, module in nnx.iter_modules(block)
        for name in getattr(module, "BY_DEPTH", ())
    }


def give(block: Any, values: Values | dict[str, None]) -> None:
    """Put the values where `of_depth` found them."""
    for path, value in values.items():
        *modules, name = path.split("/")
        module = block
        for step in modules:
            module = getattr(module, step)
        setattr(module, name, value if value is None else nnx.data(value))
