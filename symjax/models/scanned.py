"""Blocks of a deep model as one loop (model.scan_layers), whose body is one period.

A period is one block, or one block for each entry of model.pattern. The size of the
program does not grow with depth.
"""

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

Values = dict[str, Array]  # path of an attribute inside the block → its value


def run_scanned(
    model: Any,
    x: Float[Array, "B T D"],
    keys: Sequence[Array | None],
    padding_mask: Bool[Array, "B T"] | None = None,
    segments: Segments | None = None,
) -> Float[Array, "B T D"]:
    """Run x through all blocks by `jax.lax.scan` over the periods of the pattern.

    The weights of block i of all periods are stacked, with kernels in the dtype of the
    computation. Each training step thus copies the weights once. The model, its
    optimizer and its checkpoints have the weights of each block separately.

    Args:
        model: has blocks, remat, dtype and period, the number of blocks of a period.
        keys: dropout keys, one per block.
        padding_mask, segments: as in `symjax.layers.Block`.
    Raises:
        ValueError: block i of two periods differs in more than weights and the
            attributes named in `BY_DEPTH`, such as λ_init.
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
        (_weights(block, model.dtype), values_by_depth(block), key)
        for block, key in zip(blocks, keys, strict=True)
    ]
    stacked = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs[first::period])
        for first in range(period)
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
    """Scan over the stacked weights; jitted, so that eager calls compile it once."""

    def run(graph: nnx.GraphDef, inputs: Any, x: Array) -> Array:
        weights, values, key = inputs
        block = nnx.merge(graph, weights)
        set_values(block, values)
        return block(x, padding_mask, segments, dropout_key=key)

    def step(x: Array, inputs: list[Any]) -> tuple[Array, None]:
        for graph, of_block in zip(graphs, inputs, strict=True):
            block = rematerialised(partial(run, graph), remat, in_scan=True)
            x = block(of_block, features_last(x))
        return x, None

    return jax.lax.scan(step, x, stacked)[0]


def _graph(block: nnx.Module) -> nnx.GraphDef:
    """Return the static structure of a block without the attributes in `BY_DEPTH`."""
    bare = nnx.merge(*nnx.split(block))
    set_values(bare, dict.fromkeys(values_by_depth(bare)))
    return nnx.graphdef(bare)


def _weights(block: nnx.Module, dtype: Any) -> Any:
    """Return the arrays of a block, with kernels in the dtype of the computation.

    In bfloat16 the copy, and what fsdp gathers, is half as large as in float32.
    """

    def cast(path: tuple, weight: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return weight.astype(dtype) if name.endswith("/kernel") else weight

    return jax.tree_util.tree_map_with_path(cast, nnx.to_pure_dict(nnx.state(block)))


def values_by_depth(block: nnx.Module) -> Values:
    """Return the attributes named in BY_DEPTH of a block and its modules, by path."""
    return {
        "/".join(map(str, (*path, name))): jnp.asarray(getattr(module, name))
        for path, module in nnx.iter_modules(block)
        for name in getattr(module, "BY_DEPTH", ())
    }


def set_values(block: Any, values: Values | dict[str, None]) -> None:
    """Set the attributes that `values_by_depth` returned."""
    for path, value in values.items():
        *modules, name = path.split("/")
        module = block
        for step in modules:
            module = getattr(module, step)
        setattr(module, name, value if value is None else nnx.data(value))
