"""Sampling: the prompt is read once, then each token costs one step."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from symjax.config import LARGEST
from symjax.models.decoder import Decoder

MOST = 2**20  # new tokens of one call, whose cache stands in memory as a whole


def generate(
    model: Decoder,
    prompt: Int[Array, "B P"],
    count: int,
    key: Array,
    *,
    lengths: Int[Array, "B"] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
) -> Int[Array, "B count"]:
    """The `count` tokens that follow each prompt, drawn one after another.

    Decodes with the model's cache: keys and values of every layer, or a state whose
    size does not depend on the length. One compiled loop for a shape of prompt, a top_k
    and a set of stop tokens; it ends early where every row has stopped.

    Args:
        count: at most 2²⁰.
        lengths: how many tokens each prompt has, where they differ: prompts end
            together and are filled up on the left with any token. Each is continued
            as it would be alone.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the likeliest so many tokens; 0: from all.
        top_p: draw from the fewest likeliest tokens whose probabilities, after the
            temperature and among those of top_k, sum up to at least this much.
        stop: tokens that end a row: after the first of them it is filled up with it.
    Raises:
        ValueError: an empty prompt, one without an axis of examples or with tokens
            outside the vocabulary, lengths that do not fit the prompts, more tokens
            than learned positions, a temperature that is below 0 or not finite, a
            count, a top_k or a token to stop at that is no whole number of its range,
            or a top_p outside (0, 1].
    Source: top_p is nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751.
    """
    if prompt.ndim != 2:
        raise ValueError(
            f"generation needs prompts [examples, tokens], got {prompt.shape}"
        )
    count = whole("count", count, 1, MOST)
    length = prompt.shape[1] + count
    if prompt.size < 1:
        raise ValueError(
            f"generation needs prompts of at least 1 token, got {prompt.shape}"
        )
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"the tokens of a prompt must be ints, got {prompt.dtype}")
    if model.learned_positions and length > model.length:
        raise ValueError(
            f"a prompt of {prompt.shape[1]} and {count} new tokens do not fit the "
            f"{model.length} learned positions of the model"
        )
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        _check_lengths(lengths, prompt)
    if not isinstance(temperature, Tracer) and not (
        _is_number(temperature) and 0 <= temperature < float("inf")
    ):
        raise ValueError(
            f"temperature must be 0 or above, and finite, got {temperature!r}"
        )
    if not isinstance(top_p, Tracer) and not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")
    top_k, last = whole("top_k", top_k, 0), model.embedding.num_embeddings - 1
    if not isinstance(stop, Iterable) or getattr(stop, "ndim", 1) == 0:
        raise ValueError(f"stop must be a sequence of tokens, got {stop!r}")
    ends = tuple(whole("a token to stop at", x, 0, last) for x in stop)
    if not isinstance(prompt, Tracer):
        _check_tokens(prompt, lengths, last)
    graph, weights = nnx.split(model)
    chosen = jnp.float32(temperature), jnp.float32(top_p)
    return _generate(graph, count, top_k, ends, weights, prompt, lengths, key, *chosen)


def _is_number(value: Any) -> bool:
    """Whether it is a single number, which True is not."""
    kind = np.asarray(value).dtype
    real = jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating)
    return np.ndim(value) == 0 and real


def whole(name: str, value: Any, least: int, most: int = LARGEST) -> int:
    """Raises: ValueError: a value is no whole number, or outside its range."""
    number = np.asarray(value)
    known = number.ndim == 0 and number.dtype.kind in "iuf"
    if not (known and least <= number <= most and number % 1 == 0):
        raise ValueError(
            f"{name} must be a whole number from {least} to {most}, got {value!r}"
        )
    return int(number)


def _check_lengths(lengths: Array, prompt: Array) -> None:
    known = not isinstance(lengths, Tracer)
    if lengths.shape != prompt.shape[:1] or (
        known and not all(1 <= length <= prompt.shape[1] for length in lengths)
    ):
        raise ValueError(
            f"lengths must be one of 1 to {prompt.shape[1]} for each prompt of "
            f"{prompt.shape}, got {lengths if known else lengths.shape}"
        )


def _check_tokens(prompt: Array, lengths: Array | None, last: int) -> None:
    tokens = np.asarray(prompt)
    if lengths is not None and not isinstance(lengths, Tracer):
        first = tokens.shape[1] - np.asarray(lengths)[:, None]
        tokens = tokens[np.arange(tokens.shape[1]) >= first]  # without the padding
    if tokens.min() < 0 or tokens.max() > last:
        raise ValueError(
            f"the tokens of a prompt must be from 0 to {last}, the model's vocabulary, "
            f"got {tokens.min()} to {tokens.max()}"
        )


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    graph, count, top_k, stop, weights, prompt, lengths, key, temperature, top_p
):
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
    keys, stops = jax.random.split(key, count), jnp.array(stop, jnp.int32)

    def draw(logits, key):
        warm = logits / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(key, _likely(warm, top_k, top_p), axis=-1)
        return jnp.where(temperature > 0, drawn, logits.argmax(axis=-1))

    def going(carry):
        index, token, *_ = carry
        return (index < count) & ~jnp.isin(token, stops).all()

    def step(carry):
        index, before, tokens, cache = carry
        logits, cache = model.decode(before[:, None], cache)
        drawn = draw(logits[:, -1], keys[index])
        token = jnp.where(jnp.isin(before, stops), before, drawn)
        return index + 1, token, tokens.at[:, index].set(token), cache

    first = draw(logits, keys[0])
    tokens = jnp.broadcast_to(first[:, None], (len(first), count))
    end, last, tokens, _ = jax.lax.while_loop(going, step, (1, first, tokens, cache))
    return jnp.where(jnp.arange(count)[None] < end, tokens, last[:, None])


def _likely(
    logits: Float[Array, "B vocabulary"], top_k: int, top_p: Float[Array, ""]
) -> Float[Array, "B vocabulary"]:
    """The logits of the likeliest tokens; those of the others are −∞."""
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)

    def nucleus(logits):
        ordered = jnp.sort(logits, axis=-1, descending=True)
        share = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share  # of those that are likelier
        least = jnp.where(before < top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
        return jnp.where(logits < least, -jnp.inf, logits)

    return jax.lax.cond(top_p < 1, nucleus, lambda logits: logits, logits)
