"""Decorators and casts by which functions run on any mesh and under `jax.vmap`.

A mesh may have axes of type Auto, Explicit or Manual, and arrays any sharding.
`on_any_mesh` decorates engines: it compiles them, and turns mesh axes of type Explicit
into Auto inside them.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

RARE = "rare_case"  # name of branches for rare cases in compiled programs


def varying(tree: Any) -> frozenset[str]:
    """Return the axes of a `jax.shard_map` over which at least one array varies."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)]
    return frozenset().union(*axes)


def vary_alike(tree: Any) -> Any:
    """Return the same arrays, cast so that all vary over the same mesh axes.

    A loop needs a carry whose type does not change. In a `jax.shard_map` the axes over
    which an array varies are part of its type.
    """
    axes = varying(tree)

    def cast(x: Array) -> Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def batched_alike(tree: Any) -> Any:
    """Return equal arrays, all of which `jax.vmap` batches if it batches one of them.

    Results of a function with `jax.custom_vjp` need this, because of a fault of jax
    0.10 and 0.11. If `vmap` over B examples batches only some of the results, the
    gradients of the others are multiplied by B. Here a `jnp.where` makes each array
    depend on all arrays: its condition is computed from all of them, and is always
    False. XLA removes the added operations.
    """
    never = jnp.zeros((), bool)  # False, and batched if one of the arrays is
    for x in jax.tree.leaves(tree):
        element = x[(0,) * x.ndim] if x.size else x.sum()
        never |= (element != element) & False

    def batched(x: Array) -> Array:
        return jnp.squeeze(jnp.where(never, 0, jnp.expand_dims(x, 0)), 0)

    return jax.tree.map(batched, tree)


def spec_of_rows(tokens: Any) -> P:
    """Return the sharding of rows [B T N V]: B T N as in queries, V as in values."""
    return rows_as(jax.typeof(tokens.query).sharding.spec[:3], tokens.value)


def specs_of_rows_and_state(tokens: Any) -> tuple[P, P]:
    """Return the shardings of rows and of a state [B …], whose only split axis is B."""
    rows = spec_of_rows(tokens)
    return rows, P(rows[0])


def rows_as(axes: tuple[Any, Any, Any], value: Array) -> P:
    """Return the sharding P(*axes, mesh axis of V) of rows [B T N V].

    A sharding may name a mesh axis once. If `axes` has the mesh axis of V already, V is
    not split.
    """
    size = jax.typeof(value).sharding.spec[3]
    return P(*axes, None if size in axes else size)


def on_any_mesh(
    *static: str,
    specs: Callable[[Any], Any] = specs_of_rows_and_state,
    inline: bool = False,
) -> Callable[[Callable], Callable]:
    """Decorate a function f(*static, tokens, *arrays) so that it runs on any mesh.

    The function is compiled once per shape and per value of its static arguments. Its
    arrays are cast so that all vary over the same manual axes.

    On mesh axes of type Explicit, every operation would have to declare the sharding of
    its result. Inside the function these axes are of type Auto, so that XLA chooses
    shardings. The results are sharded by specs(tokens).

    Args:
        static: names of the first arguments, which are static.
        specs: tokens → the shardings of the results.
        inline: `jax.jit`'s argument `inline`. XLA (jaxlib 0.11) crashes in a
            `jax.shard_map` on the gradient of a function that calls cuDNN's attention
            and is not inlined.
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


def sharded_like_first(function: Callable[..., Array]) -> Callable[..., Array]:
    """Decorate a function so that it runs on any mesh.

    All its arguments are arrays, and its result gets the sharding of the first.
    """

    @wraps(function)
    def call(*arrays: Array) -> Array:
        return _auto(function, jax.typeof(arrays[0]).sharding.spec, arrays)(*arrays)

    return call


def _auto(function: Callable, specs: Any, arguments: Any) -> Callable:
    """Return the function such that mesh axes of type Explicit are Auto inside it.

    Args:
        specs: shardings of the results.
        arguments: the arguments of the call, whose types have the mesh.
    """
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
