"""Layers under a mesh: what each device computes on its own part.

Without a mesh (`jax.set_mesh`) every function here does nothing, so that modules work
in a notebook. Weights are not annotated here: their places are a table in
`symjax.training.sharding`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

BATCH = ("data", "fsdp")  # mesh axes that split the batch
HEADS = "tensor"
LETTERS = {"B": BATCH, "N": HEADS, "K": HEADS}  # of axes that are split


def has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """`x` laid out over the named mesh axes, one entry a dimension."""
    return jax.lax.with_sharding_constraint(x, P(*axes)) if has_mesh() else x


def per_device(
    function: Callable[..., Any], arrays: dict[str, tuple[Any, str]], output: Any
) -> Any:
    """function(**arrays), each device on its own examples and heads.

    Attention needs no communication between examples or heads; inside a `shard_map`
    the compiler cannot add any (a loop over a sharded batch would gather it).

    Args:
        arrays: name → (array or tree of arrays, its first axes): "BTN" is split over
            examples and heads, "" is whole on every device. Axes of length 1 are not
            split.
        output: the axes of the result, or a tuple of them for a tuple.
    """
    values = {name: value for name, (value, _) in arrays.items()}
    if not has_mesh():
        return function(**values)

    several = {
        axis
        for value, axes in arrays.values()
        for leaf in jax.tree.leaves(value)
        for axis, size in zip(axes, leaf.shape, strict=False)
        if size > 1
    }

    def place(axes: str) -> Callable[[Array], P]:
        def leaf(x: Array) -> P:
            sizes = zip(axes, x.shape, strict=False)
            return P(*(LETTERS.get(a) if size > 1 else None for a, size in sizes))

        return leaf

    def place_output(axes: str) -> P:
        return P(*(LETTERS.get(axis) if axis in several else None for axis in axes))

    places = {
        name: jax.tree.map(place(axes), value) for name, (value, axes) in arrays.items()
    }
    return jax.shard_map(
        lambda values: function(**values),
        in_specs=(places,),
        out_specs=jax.tree.map(place_output, output),
        check_vma=False,
    )(values)
