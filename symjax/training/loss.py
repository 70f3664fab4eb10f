"""The loss of every token, without the logits of all tokens at once.

Logits [B T vocabulary] are the largest array of a step where the vocabulary is large.
Beyond a limit a device makes those of a few tokens, reduces them to losses, and makes
them again for the backward pass, which costs one more product with the output layer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from symjax.data.documents import Separate
from symjax.layers.sharded import Operand, per_device, time_axis
from symjax.models import transformer
from symjax.models.build import Model

# Logits at once: 256 MiB in float32. The gradient of the output layer is read and
# written once for each part.
LARGEST = 2**26
SCOPE = "token_losses"  # of operations, as compiled programs name them


def hidden_of(model: Any, inputs: Any, dropout_key: Array | None = None) -> Array:
    """Hidden states [B T D] of inputs: tokens, images, or tokens with documents."""
    if not isinstance(inputs, Separate):
        return model.hidden(inputs, dropout_key=dropout_key)
    tokens, segment_ids = inputs
    return model.hidden(tokens, dropout_key=dropout_key, segment_ids=segment_ids)


class Losses(NamedTuple):
    """Loss, normaliser and correctness of every token; 0 and False where there is no
    target (below 0)."""

    loss: Float[Array, "B T"]  # −log softmax(logits)[target], in nats
    right: Bool[Array, "B T"]  # whether the target has the highest logit
    normaliser: Float[Array, "B T"]  # (log Σ exp(logit))², which z-loss keeps small


def token_losses(
    model: Model, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Losses:
    """The losses of hidden states: all logits at once, or `LARGEST` a device.

    In parts each device has the whole output layer, gathered once a step, and its own
    tokens; the gradient of the layer is added over devices once.
    """
    logits, weights = transformer.output_layer(model)
    if jax.eval_shape(logits, weights, hidden).size <= LARGEST:
        return losses(logits(weights, hidden), targets)

    @jax.named_scope(SCOPE)
    def own(weights: Any, hidden: Array, targets: Array) -> tuple[Array, ...]:
        size = jax.eval_shape(logits, weights, hidden).size
        length = hidden.shape[1]
        count = next(n for n in range(1, length + 1) if _fits(size, n, length))

        def split(x: Array) -> Array:
            x = x.reshape(x.shape[0], count, -1, *x.shape[2:])
            return jnp.swapaxes(x, 0, 1)

        @jax.checkpoint
        def part(tokens: tuple[Array, Array]) -> Losses:
            return losses(logits(weights, tokens[0]), tokens[1])

        found = jax.lax.map(part, (split(hidden), split(targets)))
        return tuple(jnp.swapaxes(x, 0, 1).reshape(targets.shape) for x in found)

    operands = {
        "weights": Operand(weights, ""),
        "hidden": Operand(hidden, "BT"),
        "targets": Operand(targets, "BT"),
    }
    time = time_axis(hidden.shape[1])
    return Losses(*per_device(own, operands, ("BT",) * 3, time=time))


def _fits(size: int, count: int, length: int) -> bool:
    """Whether `count` equal parts of a row are small enough, or single tokens."""
    return length % count == 0 and (size <= LARGEST * count or count == length)


def losses(
    logits: Float[Array, "B T vocabulary"], targets: Int[Array, "B T"]
) -> Losses:
    asked = targets >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(asked, targets, 0)
    )
    normaliser = jax.nn.logsumexp(logits, axis=-1) ** 2
    return Losses(
        jnp.where(asked, loss, 0),
        logits.argmax(axis=-1) == targets,
        jnp.where(asked, normaliser, 0),
    )
