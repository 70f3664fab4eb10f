"""Sampling: the prompt is read once, then each token costs one step."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Int

from symjax.models.decoder import Decoder


def generate(
    model: Decoder,
    prompt: Int[Array, "B P"],
    count: int,
    key: Array,
    *,
    lengths: Int[Array, "B"] | None = None,
    temperature: float = 1.0,
) -> Int[Array, "B count"]:
    """The `count` tokens that follow each prompt, drawn one after another.

    Decodes with the model's memory: a cache of keys and values, or a state whose size
    does not depend on the length. One compiled loop for a shape of prompt.

    Args:
        lengths: how many tokens each prompt has, where they differ: prompts end
            together and are filled up on the left with any token. Each is continued
            as it would be alone.
        temperature: divides the scores; 0 takes the likeliest token.
    Raises:
        ValueError: an empty prompt, one without an axis of examples, lengths that do
            not fit the prompts, or more tokens than learned positions.
    """
    if prompt.ndim != 2:
        raise ValueError(
            f"generation needs prompts [examples, tokens], got {prompt.shape}"
        )
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
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        _check_lengths(lengths, prompt)
    graph, weights = nnx.split(model)
    return _generate(
        graph, count, weights, prompt, lengths, key, jnp.float32(temperature)
    )


def _check_lengths(lengths: Array, prompt: Array) -> None:
    known = not isinstance(lengths, Tracer)
    if lengths.shape != prompt.shape[:1] or (
        known and not all(1 <= length <= prompt.shape[1] for length in lengths)
    ):
        raise ValueError(
            f"lengths must be one of 1 to {prompt.shape[1]} for each prompt of "
            f"{prompt.shape}, got {lengths if known else lengths.shape}"
        )


@partial(jax.jit, static_argnums=(0, 1))
def _generate(graph, count, weights, prompt, lengths, key, temperature):
    model = nnx.merge(graph, weights)
    memory = model.empty(prompt.shape[0], prompt.shape[1] + count)
    if lengths is None:
        scores, memory = model.extend(prompt, memory)
        scores = scores[:, -1]
    else:  # filling moves to the end, where nothing that counts sees it
        prompt = jax.vmap(jnp.roll)(prompt, lengths - prompt.shape[1])
        scores, memory = model.extend(prompt, memory, lengths)
        last = (lengths - 1)[:, None, None]
        scores = jnp.take_along_axis(scores, last, axis=1)[:, 0]

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
    (scores, _), tokens = jax.lax.scan(step, (scores, memory), keys[:-1])
    last = draw(scores, keys[-1])
    return jnp.concatenate([tokens.T, last[:, None]], axis=1)
