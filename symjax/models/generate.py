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

    Decodes with the model's cache: keys and values of every layer, or a state whose
    size does not depend on the length. One compiled loop for a shape of prompt.

    Args:
        lengths: how many tokens each prompt has, where they differ: prompts end
            together and are filled up on the left with any token. Each is continued
            as it would be alone.
        temperature: divides the logits; 0 takes the likeliest token.
    Raises:
        ValueError: an empty prompt, one without an axis of examples, lengths that do
            not fit the prompts, more tokens than learned positions, or a temperature
            that is below 0 or no number.
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
    if not isinstance(temperature, Tracer) and not temperature >= 0:
        raise ValueError(f"temperature must be 0 or above, got {temperature}")
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
    cache = model.init_cache(prompt.shape[0], prompt.shape[1] + count)
    if lengths is None:
        logits, cache = model.decode(prompt, cache)
        logits = logits[:, -1]
    else:  # padding moves to the end, where causal attention ignores it
        prompt = jax.vmap(jnp.roll)(prompt, lengths - prompt.shape[1])
        logits, cache = model.decode(prompt, cache, lengths)
        last = (lengths - 1)[:, None, None]
        logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]

    def draw(logits, key):
        warm = logits / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(key, warm, axis=-1)
        return jnp.where(temperature > 0, drawn, logits.argmax(axis=-1))

    def step(carry, key):
        logits, cache = carry
        token = draw(logits, key)
        logits, cache = model.decode(token[:, None], cache)
        return (logits[:, -1], cache), token

    keys = jax.random.split(key, count)
    (logits, _), tokens = jax.lax.scan(step, (logits, cache), keys[:-1])
    last = draw(logits, keys[-1])
    return jnp.concatenate([tokens.T, last[:, None]], axis=1)
