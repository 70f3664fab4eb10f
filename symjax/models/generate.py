"""Sampling: the prompt is read once, then each token costs one step."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from symjax.models.decoder import Decoder


def generate(
    model: Decoder,
    prompt: Int[Array, "B P"],
    count: int,
    key: Array,
    *,
    temperature: float = 1.0,
) -> Int[Array, "B count"]:
    """The `count` tokens that follow each prompt, drawn one after another.

    Decodes with the model's memory: a cache of keys and values, or a state whose size
    does not depend on the length. One compiled loop for a shape of prompt.

    Args:
        temperature: divides the scores; 0 takes the likeliest token.
    Raises:
        ValueError: an empty prompt, or more tokens than learned positions.
    """
    length = prompt.shape[1] + count
    if prompt.shape[1] < 1 or count < 1:
        raise ValueError(
            f"generation needs a prompt and a count of at least 1 token, got "
            f"{prompt.shape[1]} and {count}"
        )
    if model.learned_positions and length > model.length:
        raise ValueError(
            f"a prompt of {prompt.shape[1]} and {count} new tokens do not fit the "
            f"{model.length} learned positions of the model"
        )
    graph, weights = nnx.split(model)
    return _generate(graph, count, weights, prompt, key, jnp.float32(temperature))


@partial(jax.jit, static_argnums=(0, 1))
def _generate(graph, count, weights, prompt, key, temperature):
    model = nnx.merge(graph, weights)
    memory = model.empty(prompt.shape[0], prompt.shape[1] + count)
    scores, memory = model.extend(prompt, memory)

    def draw(scores, key):
        warm = scores / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(key, warm, axis=-1)
        return jnp.where(temperature > 0, drawn, scores.argmax(axis=-1))

    def step(carry, key):
        scores, memory = carry
        token = draw(scores, key)
        scores, memory = model.extend(token[:, None], memory)
        return (scores[:, -1], memory), token

    keys = jax.random.split(key, count)
    (scores, _), tokens = jax.lax.scan(step, (scores[:, -1], memory), keys[:-1])
    last = draw(scores, keys[-1])
    return jnp.concatenate([tokens.T, last[:, None]], axis=1)
