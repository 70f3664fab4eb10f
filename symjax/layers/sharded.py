"""Layers under a mesh: each device computes its own examples and heads.

Without a mesh (`jax.set_mesh`) the functions here shard nothing. Weights are not
annotated here: `symjax.layers.rules` and `symjax.training.sharding` map their paths to
mesh axes.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from symjax.attention.kernels.dispatch import supports_heads

BATCH = ("data", "fsdp")  # mesh axes that split the batch
HEADS = "tensor"
SEQUENCE = "sequence"
LETTERS = {"B": BATCH, "N": HEADS, "K": HEADS}  # letter of an axis → mesh axes
NAMES = {"B": "examples", "N": "heads", "K": "key/value heads"}


class Operand(NamedTuple):
    """Argument of a mechanism, and its sharding.

    Attributes:
        array: an array, or a tree of arrays.
        axes: the letters of the first axes. "BTN" is split over examples and heads,
            "" is replicated. Axes of length 1 are not split.
    """

    array: Any
    axes: str


def has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


def time_axis(length: int, group_size: int = 1) -> str | None:
    """Return the mesh axis that splits rows of `length` tokens, None if there is none.

    Args:
        group_size: consecutive tokens that stay on one device.
    """
    if not has_mesh():
        return None
    count = jax.sharding.get_abstract_mesh().shape.get(SEQUENCE, 1)
    return SEQUENCE if count > 1 and length % (count * group_size) == 0 else None


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """Return `x` sharded over the named mesh axes, one entry per dimension.

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
            f"an array {x.shape} of one device meets the mesh {_axis_sizes(mesh.shape)}"
            ": call the model inside jax.jit, or without jax.set_mesh"
        )
    return jax.lax.with_sharding_constraint(x, P(*axes))


def per_device(
    function: Callable[..., Any],
    operands: dict[str, Operand],
    output: Any,
    *,
    time: str | None,
) -> Any:
    """Call function(**operands) on each device, for its own examples and heads.

    The call is inside a `jax.shard_map`. Otherwise the compiler would gather the batch
    on every device if the function loops over examples. A mesh of one device needs no
    `shard_map`.

    Args:
        output: the axes of the result, or a tuple of them if the result is a tuple.
        time: the mesh axis that splits axis T. The function then exchanges what it
            needs with the other devices of this axis (its argument `axis_name`).
    Raises:
        ValueError: examples or heads do not divide over the mesh.
    """
    values = {name: operand.array for name, operand in operands.items()}
    if not has_mesh() or jax.sharding.get_abstract_mesh().size == 1:
        return function(**values)

    _check_divides(operands)
    divided = {
        axis
        for value, axes in operands.values()
        for leaf in jax.tree.leaves(value)
        for axis, size in zip(axes, leaf.shape, strict=False)
        if size > 1
    }

    letters = LETTERS | {"T": time}

    def spec(axes: str) -> Callable[[Array], P]:
        def leaf(x: Array) -> P:
            sizes = zip(axes, x.shape, strict=False)
            return P(*(letters.get(a) if size > 1 else None for a, size in sizes))

        return leaf

    def spec_of_output(axes: str) -> P:
        return P(*(letters.get(axis) if axis in divided else None for axis in axes))

    specs = {
        name: jax.tree.map(spec(axes), value)
        for name, (value, axes) in operands.items()
    }
    return jax.shard_map(
        lambda values: function(**values),
        in_specs=(specs,),
        out_specs=jax.tree.map(spec_of_output, output),
        check_vma=False,
    )(values)


def heads_per_device(
    function: Callable[..., Array], x: Float[Array, "B T N H"], **more: Operand
) -> Float[Array, "B T N H"]:
    """Return function(x, **more) of heads x.

    If a kernel may compute it, each device calls the function for its own heads, since
    XLA cannot split a kernel over devices.
    """
    if not supports_heads(x):
        return function(x, **{name: operand.array for name, operand in more.items()})
    operands = {"x": Operand(x, "BTN"), **more}
    return per_device(function, operands, "BTN", time=time_axis(x.shape[1]))


def _check_divides(operands: dict[str, Operand]) -> None:
    """Raise if examples or heads do not divide over the mesh, naming the operand."""
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
                        f"mesh {_axis_sizes(over)}"
                    )


def _axis_sizes(axes: Iterable[str]) -> str:
    """Return the sizes of mesh axes for an error message."""
    mesh = jax.sharding.get_abstract_mesh().shape
    return " × ".join(f"{axis} {mesh.get(axis, 1)}" for axis in axes)
