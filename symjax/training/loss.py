"""The loss of every token, without the logits of all tokens at once.

Logits [B T vocabulary] are the largest array of a step where the vocabulary is large.
Beyond a limit a device makes those of a few tokens and reduces them to losses, and for
a training step to gradients, before it makes the next ones. A backward pass of its own
would make them again, by one more product with the output layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.devices import backend
from symjax.attention.core.meshes import RARE
from symjax.data.documents import SegmentedTokens
from symjax.layers.sharded import Operand, per_device, time_axis
from symjax.models import transformer
from symjax.models.build import Model

# Logits at once: 256 MiB in float32. For each part the gradient of the output layer is
# read and written; a GPU, which has the memory, takes larger parts.
LARGEST = 2**26
ON_GPU = 2**28
# Sums of exponentials from 1/TAME to TAME need no shift: infinity is as far, and words
# whose exponential float32 loses, below −87, are less than 2e-8 of it for 10⁵ of them.
TAME = 1e25
SCOPE = "token_losses"  # of operations, as compiled programs name them


def hidden_of(model: Any, inputs: Any, dropout_key: Array | None = None) -> Array:
    """Hidden states [B T D] of inputs: tokens, images, or tokens with documents."""
    if not isinstance(inputs, SegmentedTokens):
        return model.hidden(inputs, dropout_key=dropout_key)
    tokens, segment_ids = inputs
    return model.hidden(tokens, dropout_key=dropout_key, segment_ids=segment_ids)


class Losses(NamedTuple):
    """Loss, normaliser and correctness of every token; 0 and False where there is no
    target (below 0)."""

    loss: Float[Array, "B T"]  # −log softmax(logits)[target], in nats
    right: Bool[Array, "B T"]  # whether the target has the highest logit
    normaliser: Float[Array, "B T"]  # log Σ exp(logit), whose square is the z-loss


def token_losses(
    model: Model, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Losses:
    """The losses of hidden states: all logits at once, or a part of them a device.

    In parts each device has the whole output layer, gathered once, and its own tokens.
    For evaluation: a gradient would keep all logits; `objective` is for that.
    """
    logits, weights = transformer.output_layer(model)

    def own(weights: Any, hidden: Array, targets: Array) -> tuple[Array, ...]:
        def part(tokens: tuple[Array, Array]) -> Losses:
            return losses(logits(weights, tokens[0]), tokens[1])

        split = _splitter(jax.eval_shape(logits, weights, hidden))
        found = jax.lax.map(part, (split(hidden), split(targets)))
        return tuple(jnp.swapaxes(x, 0, 1).reshape(targets.shape) for x in found)

    if jax.eval_shape(logits, weights, hidden).size <= LARGEST:
        return losses(logits(weights, hidden), targets)
    return Losses(*_per_device(own, 3, weights, hidden, targets))


class Objective(NamedTuple):
    """Sums over tokens that have a target, divided by the number of targets."""

    minimised: Float[Array, ""]  # loss + z_loss · normaliser²
    loss: Float[Array, ""]  # as reported: no gradient passes through it


def objective(
    model: Model,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    z_loss: float = 0,
    count: Int[Array, ""] | None = None,
) -> Objective:
    """Return the means of `token_losses`, of which to take a gradient.

    In parts that gradient is computed with the losses, by three products with the
    output layer in all. There is no forward mode then.

    Args:
        count: what sums are divided by: the targets of a whole batch, of which these
            are a part. The results of the parts then add up to the mean over the
            batch. None: the targets given here are all.
    """
    logits, weights = transformer.output_layer(model)
    count = target_count(targets) if count is None else count

    def means(loss: Array, normaliser: Array, count: Array) -> Objective:
        # A sum for each row: one over all tokens rounds to the places of thousands.
        mean = minimised = (loss.sum(axis=1) / count).sum()
        if z_loss:
            squares = (normaliser**2).sum(axis=1)
            minimised += z_loss * (squares / count).sum()
        return Objective(minimised, jax.lax.stop_gradient(mean))

    if jax.eval_shape(logits, weights, hidden).size <= LARGEST:
        found = losses(logits(weights, hidden), targets)
        return means(found.loss, found.normaliser, count)

    def part(weights: Any, hidden: Array, targets: Array, count: Array) -> Any:
        made, backward = jax.vjp(logits, weights, hidden)
        kept = made
        if backend() == "gpu":  # all that reads them does so in memory, and rounded
            kept = jax.lax.optimization_barrier(made.astype(hidden.dtype))
            made = kept.astype(made.dtype)
        shift, total = _exponentials(kept)
        asked = (targets >= 0)[..., None]
        target = jnp.where(asked, targets[..., None], 0)
        logit = jnp.take_along_axis(made, target, axis=-1)
        each = jnp.where(asked, jnp.log(total) - (logit - shift), 0)
        normaliser = jnp.where(asked, jnp.log(total) + shift, 0)
        # By the sum: exp(logit − normaliser) would have the normaliser's rounding.
        weight = (1 + 2 * z_loss * normaliser) / total
        slope = jnp.exp(made - shift) * weight
        slope -= jax.nn.one_hot(targets, made.shape[-1], dtype=made.dtype)
        slope = jnp.where(asked, slope / count, 0)
        return means(each[..., 0], normaliser[..., 0], count), backward(slope)

    def own(weights: Any, hidden: Array, targets: Array) -> tuple[Array, ...]:
        split = _splitter(jax.eval_shape(logits, weights, hidden))
        found = _added_up(part)(weights, split(hidden), split(targets), count)
        return tuple(x[None, None] for x in found)

    return Objective(*(x.sum() for x in _per_device(own, 2, weights, hidden, targets)))


def target_count(targets: Int[Array, "*B"]) -> Int[Array, ""]:
    """Return the number of targets, and 1 if there is none: sums are divided by it."""
    return jnp.maximum((targets >= 0).sum(), 1)


def _exponentials(logits: Float[Array, "B T vocabulary"]) -> tuple[Array, Array]:
    """(shift, Σ exp(logit − shift)) of every token [B T 1], in float32 at least.

    The shift is 0 where all sums are within `TAME`: a TPU then adds them up as it
    multiplies. One sum beyond, a normaliser of ±57, and the shift of all these tokens
    is their highest logit; logits are read twice more.
    """
    kind = jnp.promote_types(logits.dtype, jnp.float32)
    total = jnp.exp(logits.astype(kind)).sum(axis=-1, keepdims=True)

    def shifted() -> tuple[Array, Array]:
        # Else XLA for GPUs runs both branches: it finds only sums and maxima here.
        wide = jax.lax.optimization_barrier(logits).astype(kind)
        highest = wide.max(axis=-1, keepdims=True)
        highest = jnp.where(jnp.isfinite(highest), highest, 0)
        return highest, jnp.exp(wide - highest).sum(axis=-1, keepdims=True)

    tame = (total > 1 / TAME) & (total < TAME)
    with jax.named_scope(RARE):
        return jax.lax.cond(tame.all(), lambda: (jnp.zeros_like(total), total), shifted)


def _added_up(part: Callable) -> Callable[..., Objective]:
    """The sum of `part` over parts [parts B …] of hidden states and targets.

    Args:
        part: (weights, hidden, targets, count) → Objective, and the gradients of what
            is minimised by weights and hidden states. Arrays are all operands, since
            `jax.custom_vjp` wants none in a closure.
    """

    def forward(weights: Any, hidden: Array, targets: Array, count: Array) -> Any:
        # As the layer rounds them, to the type of its inputs, but once for all parts.
        rounded = jax.tree.map(lambda x: x.astype(hidden.dtype), weights)

        def add(sums: Any, tokens: tuple[Array, Array]) -> Any:
            found, (by_weights, by_hidden) = part(rounded, *tokens, count)
            by_weights = jax.tree.map(
                lambda x, weight: x.astype(weight.dtype), by_weights, weights
            )
            return jax.tree.map(jnp.add, sums, (found, by_weights)), by_hidden

        kind = jnp.promote_types(hidden.dtype, jnp.float32)
        nothing = Objective(*jnp.zeros(2, kind))
        start = nothing, jax.tree.map(jnp.zeros_like, weights)
        (found, by_weights), by_hidden = jax.lax.scan(add, start, (hidden, targets))
        return found, (by_weights, by_hidden)

    def backward(gradients: Any, cotangent: Objective) -> tuple[Any, ...]:
        def scaled(x: Array) -> Array:
            return (cotangent.minimised * x).astype(x.dtype)

        return *jax.tree.map(scaled, gradients), None, None

    total = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    total.defvjp(forward, backward)
    return total


def _per_device(
    own: Callable, outputs: int, weights: Any, hidden: Array, targets: Array
) -> Any:
    """own(weights, hidden, targets) of each device's tokens, so many arrays [B T]; the
    gradient of the layer is added over devices once."""
    operands = {
        "weights": Operand(weights, ""),
        "hidden": Operand(hidden, "BT"),
        "targets": Operand(targets, "BT"),
    }
    own = jax.named_scope(SCOPE)(own)
    time = time_axis(hidden.shape[1])
    return per_device(own, operands, ("BT",) * outputs, time=time)


def _splitter(logits: jax.ShapeDtypeStruct) -> Callable[[Array], Array]:
    """[B T …] → [parts B T …], the fewest equal parts of the rows that have no more
    logits than `LARGEST` or `ON_GPU`, or single tokens."""
    length, most = logits.shape[1], ON_GPU if backend() == "gpu" else LARGEST
    counts = (n for n in range(1, length) if length % n == 0)
    count = next((n for n in counts if logits.size <= most * n), length)

    def split(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 0, 1)

    return split


def losses(
    logits: Float[Array, "B T vocabulary"], targets: Int[Array, "B T"]
) -> Losses:
    asked = targets >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(asked, targets, 0)
    )
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    return Losses(
        jnp.where(asked, loss, 0),
        logits.argmax(axis=-1) == targets,
        jnp.where(asked, normaliser, 0),
    )
