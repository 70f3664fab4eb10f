"""Functions compiled once a shape, on meshes with axes of any type, and under vmap."""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

RARE = "rare_case"  # of branches for rare cases, as compiled programs name them


def varying(tree: Any) -> frozenset[str]:
    """The mesh axes of a `jax.shard_map` over which an array is known to differ."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)]
    return frozenset().union(*axes)


def vary_alike(tree: Any) -> Any:
    """The arrays, each varying over all mesh axes that one of them varies over.

    A loop wants its carry as it will be after a turn, and `jax.shard_map` counts the
    axes over which an array differs among its type.
    """
    axes = varying(tree)

    def cast(x: Array) -> Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def batched_alike(tree: Any) -> Any:
    """The arrays, of which `jax.vmap` batches all or none, along their first axis.

    Results of a function with a derivative of its own need that: jax counts the
    cotangent of a result of `jax.custom_vjp` that is not batched beside others that are
    once an example, and takes the batch axes of the function for those of its rule
    (jax 0.10 and 0.11). XLA leaves nothing of it.
    """
    none = jnp.zeros((), bool)
    for x in jax.tree.leaves(tree):
        one = x[(0,) * x.ndim] if x.size else x.sum()
        none |= (one != one) & False

    def alike(x: Array) -> Array:
        return jnp.squeeze(jnp.where(none, 0, jnp.expand_dims(x, 0)), 0)

    return jax.tree.map(alike, tree)


def rows_alone(tokens: Any) -> P:
    """How rows [B T N V] are sharded: as the queries, and their features as values."""
    return rows_as(jax.typeof(tokens.query).sharding.spec[:3], tokens.value)


def rows_and_state(tokens: Any) -> tuple[P, P]:
    """As `rows_alone`, and a state [B …] by example."""
    rows = rows_alone(tokens)
    return rows, P(rows[0])


def rows_as(axes: tuple[Any, Any, Any], value: Array) -> P:
    size = jax.typeof(value).sharding.spec[3]
    return P(*axes, None if size in axes else size)


def on_any_mesh(
    *static: str,
    specs: Callable[[Any], Any] = rows_and_state,
    inline: bool = False,
) -> Callable[[Callable], Callable]:
    """Decorate a function f(*static, tokens, *arrays): compile it, for any mesh.

    The function is compiled once per shape and per value of its static arguments. It
    sees arrays that all vary over the same manual axes.

    Under mesh axes of type Explicit every operation would have to say how its result is
    sharded. Inside the function XLA chooses, as it does for Auto axes; the results are
    sharded by specs(tokens).

    Args:
        static: names of the first arguments, which are static.
        specs: tokens → the shardings of the results.
        inline: make no separate call inside another program. XLA (jaxlib 0.11) crashes
            on a call in a `jax.shard_map` whose gradient contains cuDNN's attention.
    """

    def decorate(function: Callable) -> Callable:
        count = len(static)
        names = tuple(inspect.signature(function).parameters)
        if names[:count] != static:
            raise TypeError(f"{function.__name__} begins with {names}, not {static}")

        @partial(jax.jit, static_argnums=tuple(range(count)), inline=inline)
        @wraps(function)
        def compiled(*arguments: Any) -> Any:
            tokens, *more = vary_alike(arguments[count:])
            call = partial(function, *arguments[:count])
            return _auto(call, specs(tokens), (tokens, *more))(tokens, *more)

        return compiled

    return decorate


def like_its_first(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function of arrays whose result is sharded as the first, on any mesh."""

    @wraps(function)
    def call(*arrays: Array) -> Array:
        return _auto(function, jax.typeof(arrays[0]).sharding.spec, arrays)(*arrays)

    return call


def _auto(function: Callable, specs: Any, arguments: Any) -> Callable:
    """The function, to be called with these arguments: it sees mesh axes of type
    Explicit as Auto ones. specs: of its results."""
    types = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)]
    mesh = next((x for x in types if not x.empty), jax.sharding.get_abstract_mesh())
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not axes:
        return function
    out = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out)
