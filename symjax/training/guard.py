"""Steps that would harm: a gradient that is not finite, or far larger than usual."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

MEMORY = 0.98  # of the running mean of gradient norms: the last 50 steps
ENOUGH = 20  # steps, before which no norm counts as unusual


class Guarded(NamedTuple):
    """The state of a guarded optimizer."""

    taken: Int[Array, ""]
    skipped: Int[Array, ""]
    norm: Float[Array, ""]  # Σ (1 − MEMORY) MEMORYᵏ |g| over the steps taken
    inner: Any


def guarded(
    transform: optax.GradientTransformation, spike: float
) -> optax.GradientTransformation:
    """`transform`, but a harmful step changes nothing except the count of such steps.

    Harmful is a gradient whose norm is not finite or, where `spike` is above 0, larger
    than spike times the running mean of the norms of the steps taken. A skipped step
    does not move the schedule either.

    Cost: the norm, which clipping needs too, and one selection per weight and moment,
    which the compiler fuses with their update.
    """

    def init(params: Any) -> Guarded:
        zero = jnp.zeros((), jnp.int32)
        return Guarded(zero, zero, jnp.zeros(()), transform.init(params))

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(gradient)
        good = jnp.isfinite(norm)
        if spike:
            usual = state.norm / (1 - MEMORY ** jnp.maximum(state.taken, 1))
            good &= (state.taken < ENOUGH) | (norm <= spike * usual)
        updates, inner = transform.update(gradient, state.inner, params)
        mean = MEMORY * state.norm + (1 - MEMORY) * norm
        new = Guarded(state.taken + 1, state.skipped, mean, inner)
        old = state._replace(skipped=state.skipped + 1)
        none = jax.tree.map(jnp.zeros_like, updates)
        return jax.tree.map(
            lambda one, other: jnp.where(good, one, other), (updates, new), (none, old)
        )

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))
