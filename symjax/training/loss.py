"""Loss of every token, in parts if the logits of all tokens would be too large.

With a large vocabulary the logits [B T vocabulary] are the largest array of a step.
Beyond a limit, each device computes the logits of one part of its tokens at a time. It
reduces them to losses, and in a training step also to gradients, before the next part.
A separate backward pass would compute the logits again, by one more product with the
output layer.
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

# Largest number of logits computed at once: 256 MiB in float32. GPUs take larger parts:
# each part reads and writes the gradient of the output layer, so few parts are faster.
MOST_LOGITS = 2**26
ON_GPU = 2**28
# A sum Σ exp(logit) between 1/SAFE_SUM and SAFE_SUM needs no shift: it does not
# overflow, and exponentials that underflow add up to less than its rounding error. Each
# is below e⁻⁸⁷ = 1.6e-38, so with a vocabulary of 10⁵ tokens they add up to less than
# 1.6e-33. The rounding error of the smallest sum is 6e-33.
SAFE_SUM = 1e25
SCOPE = "token_losses"  # prefix of these operations in compiled programs


def hidden_of(model: Any, inputs: Any, dropout_key: Array | None = None) -> Array:
    """Return hidden states [B T D] of tokens, images, or tokens with segment ids."""
    if not isinstance(inputs, SegmentedTokens):
        return model.hidden(inputs, dropout_key=dropout_key)
    tokens, segment_ids = inputs
    return model.hidden(tokens, dropout_key=dropout_key, segment_ids=segment_ids)


class Losses(NamedTuple):
    """Losses of all tokens.

    A token with a negative target has no loss: its `loss` and `normaliser` are 0, and
    `right` is False.

    Attributes:
        loss: −log softmax(logits)[target], in nats.
        right: whether the target has the highest logit.
        normaliser: log Σ exp(logit). Its square is the z-loss.
    """

    loss: Float[Array, "B T"]
    right: Bool[Array, "B T"]
    normaliser: Float[Array, "B T"]


def token_losses(
    model: Model, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Losses:
    """Return the losses of hidden states, for evaluation.

    If there are more than `MOST_LOGITS` logits, each device gathers the output layer
    once and computes its own tokens in parts. A gradient of this function would keep
    all logits: use `objective` for training.
    """
    logits, weights = transformer.output_layer(model)

    def local(weights: Any, hidden: Array, targets: Array) -> tuple[Array, ...]:
        def part(tokens: tuple[Array, Array]) -> Losses:
            return losses(logits(weights, tokens[0]), tokens[1])

        split = _splitter(jax.eval_shape(logits, weights, hidden))
        by_part = jax.lax.map(part, (split(hidden), split(targets)))
        return tuple(jnp.swapaxes(x, 0, 1).reshape(targets.shape) for x in by_part)

    if jax.eval_shape(logits, weights, hidden).size <= MOST_LOGITS:
        return losses(logits(weights, hidden), targets)
    return Losses(*_per_device(local, 3, weights, hidden, targets))


class Objective(NamedTuple):
    """Sums over the tokens that have a target, divided by the number of targets.

    Attributes:
        minimised: Σ (loss + z_loss · normaliser²) / number of targets.
        loss: Σ loss / number of targets, to report; no gradient passes through it.
    """

    minimised: Float[Array, ""]
    loss: Float[Array, ""]


def objective(
    model: Model,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    z_loss: float = 0,
    count: Int[Array, ""] | None = None,
) -> Objective:
    """Return the mean loss over targets, for training.

    If there are more than `MOST_LOGITS` logits, they are computed in parts, and the
    gradient together with the losses. This takes three products with the output layer,
    and has no forward-mode derivative.

    Args:
        z_loss: weight of the squared normalisers.
        count: divisor of the sums. For a micro-batch it is the number of targets of the
            whole batch, so that the results of all micro-batches add up to the mean.
            None counts the targets in `targets`.
    """
    logits, weights = transformer.output_layer(model)
    count = target_count(targets) if count is None else count

    def means(loss: Array, normaliser: Array, count: Array) -> Objective:
        # Sum by rows first: one sum over all tokens grows large, and rounds more.
        mean = minimised = (loss.sum(axis=1) / count).sum()
        if z_loss:
            squares = (normaliser**2).sum(axis=1)
            minimised += z_loss * (squares / count).sum()
        return Objective(minimised, jax.lax.stop_gradient(mean))

    if jax.eval_shape(logits, weights, hidden).size <= MOST_LOGITS:
        found = losses(logits(weights, hidden), targets)
        return means(found.loss, found.normaliser, count)

    def part(weights: Any, hidden: Array, targets: Array, count: Array) -> Any:
        scores, backward = jax.vjp(logits, weights, hidden)
        stored = scores
        if backend() == "gpu":  # store rounded scores once, for all their readers
            stored = jax.lax.optimization_barrier(scores.astype(hidden.dtype))
            scores = stored.astype(scores.dtype)
        shift, total = _exponentials(stored)
        has_target = (targets >= 0)[..., None]
        target = jnp.where(has_target, targets[..., None], 0)
        target_score = jnp.take_along_axis(scores, target, axis=-1)
        loss = jnp.where(has_target, jnp.log(total) - (target_score - shift), 0)
        normaliser = jnp.where(has_target, jnp.log(total) + shift, 0)
        # exp(scores − shift) / total has a smaller rounding error than the equal
        # exp(scores − normaliser).
        weight = (1 + 2 * z_loss * normaliser) / total
        gradient = jnp.exp(scores - shift) * weight
        gradient -= jax.nn.one_hot(targets, scores.shape[-1], dtype=scores.dtype)
        gradient = jnp.where(has_target, gradient / count, 0)
        return means(loss[..., 0], normaliser[..., 0], count), backward(gradient)

    def local(weights: Any, hidden: Array, targets: Array) -> tuple[Array, ...]:
        split = _splitter(jax.eval_shape(logits, weights, hidden))
        total = _sum_over_parts(part)(weights, split(hidden), split(targets), count)
        return tuple(x[None, None] for x in total)

    sums = _per_device(local, 2, weights, hidden, targets)
    return Objective(*(x.sum() for x in sums))


def target_count(targets: Int[Array, "*B"]) -> Int[Array, ""]:
    """Return the number of targets, but at least 1, since sums are divided by it."""
    return jnp.maximum((targets >= 0).sum(), 1)


def _exponentials(logits: Float[Array, "B T vocabulary"]) -> tuple[Array, Array]:
    """Return (shift, Σ exp(logit − shift)) of every token [B T 1], at least in float32.

    The shift is 0 if the sums of all tokens are between 1/`SAFE_SUM` and `SAFE_SUM`,
    that is, if all normalisers are between −57 and 57. XLA for TPUs then fuses the sums
    with the logits. Otherwise the shift of each token is its highest logit, and the
    logits are read twice more.
    """
    kind = jnp.promote_types(logits.dtype, jnp.float32)
    total = jnp.exp(logits.astype(kind)).sum(axis=-1, keepdims=True)

    def shifted() -> tuple[Array, Array]:
        # Without the barrier XLA for GPUs runs both branches, since they are cheap.
        wide = jax.lax.optimization_barrier(logits).astype(kind)
        highest = wide.max(axis=-1, keepdims=True)
        highest = jnp.where(jnp.isfinite(highest), highest, 0)
        return highest, jnp.exp(wide - highest).sum(axis=-1, keepdims=True)

    safe = (total > 1 / SAFE_SUM) & (total < SAFE_SUM)
    with jax.named_scope(RARE):
        return jax.lax.cond(safe.all(), lambda: (jnp.zeros_like(total), total), shifted)


def _sum_over_parts(part: Callable) -> Callable[..., Objective]:
    """Return the function that adds up `part` over hidden states [parts B …].

    Args:
        part: (weights, hidden, targets, count) → (Objective, gradients), where the
            gradients of `minimised` are with respect to weights and hidden states. It
            takes all arrays as arguments, since a function with `jax.custom_vjp` may
            not close over traced arrays.
    """

    def forward(weights: Any, hidden: Array, targets: Array, count: Array) -> Any:
        # Round once: otherwise the output layer rounds its weights in every part.
        rounded = jax.tree.map(lambda x: x.astype(hidden.dtype), weights)

        def add(sums: Any, tokens: tuple[Array, Array]) -> Any:
            result, (by_weights, by_hidden) = part(rounded, *tokens, count)
            by_weights = jax.tree.map(
                lambda x, weight: x.astype(weight.dtype), by_weights, weights
            )
            return jax.tree.map(jnp.add, sums, (result, by_weights)), by_hidden

        kind = jnp.promote_types(hidden.dtype, jnp.float32)
        zero = Objective(*jnp.zeros(2, kind)), jax.tree.map(jnp.zeros_like, weights)
        (result, by_weights), by_hidden = jax.lax.scan(add, zero, (hidden, targets))
        return result, (by_weights, by_hidden)

    def backward(gradients: Any, cotangent: Objective) -> tuple[Any, ...]:
        def scaled(x: Array) -> Array:
            return (cotangent.minimised * x).astype(x.dtype)

        return *jax.tree.map(scaled, gradients), None, None

    total = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    total.defvjp(forward, backward)
    return total


def _per_device(
    local: Callable, outputs: int, weights: Any, hidden: Array, targets: Array
) -> Any:
    """Return local(weights, hidden, targets), computed by each device for its tokens.

    The gradients of the weights are added over devices once.

    Args:
        outputs: number of arrays with two axes that `local` returns.
    """
    operands = {
        "weights": Operand(weights, ""),
        "hidden": Operand(hidden, "BT"),
        "targets": Operand(targets, "BT"),
    }
    local = jax.named_scope(SCOPE)(local)
    time = time_axis(hidden.shape[1])
    return per_device(local, operands, ("BT",) * outputs, time=time)


def _splitter(logits: jax.ShapeDtypeStruct) -> Callable[[Array], Array]:
    """Return a function that splits tokens: [B T …] → [parts B T/parts …].

    Parts are equally long and as few as possible, with at most `MOST_LOGITS` logits
    each (`ON_GPU` on a GPU). If one token of each row has more logits than that, each
    part has one token of each row.

    Args:
        logits: abstract logits of all tokens.
    """
    length, most = logits.shape[1], ON_GPU if backend() == "gpu" else MOST_LOGITS
    counts = (n for n in range(1, length) if length % n == 0)
    count = next((n for n in counts if logits.size <= most * n), length)

    def split(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 0, 1)

    return split


def losses(
    logits: Float[Array, "B T vocabulary"], targets: Int[Array, "B T"]
) -> Losses:
    """Return the losses of given logits."""
    has_target = targets >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(has_target, targets, 0)
    )
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    return Losses(
        jnp.where(has_target, loss, 0),
        logits.argmax(axis=-1) == targets,
        jnp.where(has_target, normaliser, 0),
    )
