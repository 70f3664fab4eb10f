"""Layers under a mesh: what each device computes on its own part.

Without a mesh (`jax.set_mesh`) every function here does nothing, so that modules work
in a notebook. Weights are not annotated here: their places are a table in
`symjax.training.sharding`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

BATCH = ("data", "fsdp")  # mesh axes that split the batch
HEADS = "tensor"
SEQUENCE = "sequence"
LETTERS = {"B": BATCH, "N": HEADS, "K": HEADS}  # of axes that are split
NAMES = {"B": "examples", "N": "heads", "K": "key/value heads"}


class Operand(NamedTuple):
    """What a mechanism is given, and how a mesh splits it.

    Attributes:
        array: or a tree of arrays.
        axes: the letters of the first axes: "BTN" is split over examples and heads,
            "" is whole on every device. Axes of length 1 are not split.
    """

    array: Any
    axes: str


def has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


def time_axis(length: int, group_size: int = 1) -> str | None:
    """The mesh axis that splits rows of so many tokens; None if none does.

    Args:
        group_size: tokens that cannot be parted.
    """
    if not has_mesh():
        return None
    count = jax.sharding.get_abstract_mesh().shape.get(SEQUENCE, 1)
    return SEQUENCE if count > 1 and length % (count * group_size) == 0 else None


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """Return `x` laid out over the named mesh axes, one entry a dimension.

    Raises:
        ValueError: outside jax.jit, `x` is not placed over the mesh.
    """
    if not has_mesh():
        return x
    if not isinstance(x, Tracer) and not isinstance(x.sharding, NamedSharding):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size == 1:
            return x
        raise ValueError(
            f"an array {x.shape} of one device meets the mesh {_shown(mesh.shape)}: "
            "call the model inside jax.jit, or without jax.set_mesh"
        )
    return jax.lax.with_sharding_constraint(x, P(*axes))


def per_device(
    function: Callable[..., Any],
    operands: dict[str, Operand],
    output: Any,
    *,
    time: str | None,
) -> Any:
    """function(**operands), each device on its own examples and heads.

    Attention needs no communication between examples or heads; inside a `shard_map`
    the compiler cannot add any (a loop over a sharded batch would gather it). A
    mesh of one device needs none; on CPU every gradient would be copied to be summed
    over it.

    Args:
        output: the axes of the result, or a tuple of them for a tuple.
        time: the mesh axis that splits the letter T. The function then has to tell
            other devices of this axis what they need, by `axis_name`.
    Raises:
        ValueError: examples or heads do not divide over the mesh.
    """
    values = {name: operand.array for name, operand in operands.items()}
    if not has_mesh() or jax.sharding.get_abstract_mesh().size == 1:
        return function(**values)

    _check_divides(operands)
    several = {
        axis
        for value, axes in operands.values()
        for leaf in jax.tree.leaves(value)
        for axis, size in zip(axes, leaf.shape, strict=False)
        if size > 1
    }

    letters = LETTERS | {"T": time}

    def place(axes: str) -> Callable[[Array], P]:
        def leaf(x: Array) -> P:
            sizes = zip(axes, x.shape, strict=False)
            return P(*(letters.get(a) if size > 1 else None for a, size in sizes))

        return leaf

    def place_output(axes: str) -> P:
        return P(*(letters.get(axis) if axis in several else None for axis in axes))

    places = {
        name: jax.tree.map(place(axes), value)
        for name, (value, axes) in operands.items()
    }
    return jax.shard_map(
        lambda values: function(**values),
        in_specs=(places,),
        out_specs=jax.tree.map(place_output, output),
        check_vma=False,
    )(values)


def _check_divides(operands: dict[str, Operand]) -> None:
    """Raises: ValueError: naming the operand, its size and the mesh."""
    mesh = jax.sharding.get_abstract_mesh().shape
    for name, (value, axes) in operands.items():
        for leaf in jax.tree.leaves(value):
            for axis, size in zip(axes, leaf.shape, strict=False):
                over = LETTERS.get(axis, ())
                over = (over,) if isinstance(over, str) else over
                parts = math.prod(mesh.get(x, 1) for x in over)
                if size > 1 and size % parts:
                    raise ValueError(
                        f"{name} {leaf.shape}: {size} {NAMES[axis]} do not divide over "
                        f"mesh {_shown(over)}"
                    )


def _shown(axes: Iterable[str]) -> str:
    """The sizes of axes of the mesh, as error messages have them."""
    mesh = jax.sharding.get_abstract_mesh().shape
    return " × ".join(f"{axis} {mesh.get(axis, 1)}" for axis in axes)
