"""Functions compiled once a shape, on meshes with axes of any type."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array


def vary_alike(tree: Any) -> Any:
    """The arrays, each varying over all mesh axes that one of them varies over.

    A loop wants its carry as it will be after a turn, and `jax.shard_map` counts the
    axes over which an array differs among its type.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)]
    axes = frozenset().union(*varying)

    def cast(x: Array) -> Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def on_any_mesh(
    static: int, rows_like: Callable[[Any], Array] = lambda tokens: tokens.query
) -> Callable[[Callable], Callable]:
    """Compiles a function (…, tokens, *more) → (rows [B T N V], a state [B …]).

    The first `static` arguments are static; `tokens` is a NamedTuple with `query` and
    `value`. The function sees arrays that all vary over the same manual axes. Heads may
    also stand before time, in all of them.

    Under mesh axes of type Explicit every operation would have to say how its result
    is sharded; in here XLA chooses, as it does for Auto axes. The rows come out sharded
    as `rows_like` and value are, the state by example.
    """

    def decorate(function: Callable) -> Callable:
        @partial(jax.jit, static_argnums=tuple(range(static)))
        @wraps(function)
        def compiled(*arguments: Any) -> Any:
            tokens, *more = vary_alike(arguments[static:])
            call = partial(function, *arguments[:static])
            mesh = jax.typeof(tokens.query).sharding.mesh
            types = zip(mesh.axis_names, mesh.axis_types, strict=True)
            axes = tuple(name for name, kind in types if kind == AxisType.Explicit)
            if axes:
                batch, time, heads, _ = jax.typeof(rows_like(tokens)).sharding.spec
                size = jax.typeof(tokens.value).sharding.spec[3]
                size = None if size in (batch, time, heads) else size
                specs = P(batch, time, heads, size), P(batch)
                out = tuple(NamedSharding(mesh, spec) for spec in specs)
                call = jax.sharding.auto_axes(call, axes=axes, out_sharding=out)
            return call(tokens, *more)

        return compiled

    return decorate
