"""Sampling: one call reads the prompts, then each new token costs one step.

The numbers of rows, of prompt tokens and of entries of the cache are rounded up to
powers of two, so that one compiled program covers a range of sizes. A cache has no more
entries than the model has learned positions.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from symjax.config import LARGEST
from symjax.models import transformer
from symjax.models.decoder import Decoder

MOST = 2**20  # largest number of new tokens in one call
PROMPT, ROOM = 16, 64  # smallest lengths of padded prompts and of caches, in tokens
PIECE = 16  # largest number of tokens between two calls of `until`
GREEDY = 1e-6  # lower temperatures take the likeliest token
HOTTEST = 1e30  # largest divisor of logits: the inverse of 3e38 is 0 in XLA
SLACK = 1e-6  # rounding of a sum of probabilities in float32

AnyArray = Array | np.ndarray


def generate(
    model: Decoder,
    prompt: Int[AnyArray, "B P"],
    count: int,
    key: Array,
    *,
    lengths: Int[AnyArray, "B"] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    until: Callable[[np.ndarray], bool] | None = None,
) -> Int[Array, "B count"]:
    """Draw the `count` tokens that follow each prompt, one after another.

    The model decodes with its cache: keys and values of each layer, or a state whose
    size does not depend on the length. Two programs are compiled for each top_k and
    each combination of three sizes, rounded up to powers of two: rows, prompt tokens,
    and prompt + count tokens. The loop ends early when all rows have stopped.

    Args:
        count: at most 2²⁰.
        key: one for all rows, or one for each row [B]. A row with its own key has the
            same draws in any batch.
        lengths: number of tokens of each prompt, if they differ. Shorter prompts are
            padded on the left with any token. Each prompt is continued as if it were
            alone.
        temperature: divides the logits. Below 1e-6 the likeliest token is taken.
        top_k: draw from this number of likeliest tokens; 0 draws from all. Among equal
            logits lower ids count as likelier, here and for top_p.
        top_p: draw from the fewest likeliest tokens whose probabilities (after
            temperature and top_k) sum to at least top_p, to within 1e-6.
        stop: tokens that end a row. The row repeats the stop token until its end.
        until: function of the tokens so far [B, t], called after 1, 2, 4, 8, 16, 32, 48
            … tokens; True ends the loop, and each row repeats its last token. Not
            possible under `jax.jit`.
    Raises:
        ValueError: an empty prompt, one without an axis of examples or with tokens
            outside the vocabulary, lengths that do not fit the prompts, more tokens
            than learned positions, a temperature below 0 or not finite, a count, top_k
            or stop token that is not a whole number in its range, a top_p outside
            (0, 1], or neither one key nor one per row.
    Source: top_p is nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751.
    """
    count = whole("count", count, 1, MOST)
    _check_prompt(model, prompt, count)
    if lengths is not None:
        lengths = lengths if isinstance(lengths, Tracer) else np.asarray(lengths)
        _check_lengths(lengths, prompt)
    _check_sampling(temperature, top_p)
    top_k, last = whole("top_k", top_k, 0), model.embedding.num_embeddings - 1
    if not isinstance(stop, Iterable) or getattr(stop, "ndim", 1) == 0:
        raise ValueError(f"stop must be a sequence of tokens, got {stop!r}")
    ends = tuple(whole("a token to stop at", x, 0, last) for x in stop)
    if not isinstance(prompt, Tracer):
        _check_tokens(prompt, lengths, last)
    graph, weights = nnx.split(model)
    rows, columns = prompt.shape
    room = bucket(columns + count, ROOM)
    if model.learned_positions:
        room = min(room, model.length)
    kept = top_k if top_k <= last else 0
    stops = np.zeros(last + 1, bool)
    stops[list(ends)] = True
    filled = _padded(prompt, lengths, min(bucket(columns, PROMPT), room))
    keys = _padded_keys(key, rows, len(filled[0]))
    draws = keys, jnp.float32(temperature), jnp.float32(top_p)
    state = _read(graph, room, kept, weights, *filled, rows, stops, *draws)
    index = 1
    while index < count and not (until and until(_so_far(state, rows, index))):
        index = min(count, index + min(index, PIECE)) if until else count
        cache, state = state.cache, state._replace(cache=None)
        state = _write(graph, kept, weights, cache, state, index, stops, *draws)
        if until and int(state.index) < index:  # every row has met a stop token
            break
    if isinstance(state.tokens, Tracer):
        return state.tokens[:rows, :count]
    return jnp.asarray(_so_far(state, rows, count))


def before_stop(row: np.ndarray, stop: Sequence[int]) -> np.ndarray:
    """Return the tokens of a row before its first stop token."""
    stopped = np.isin(row, list(stop))
    return row[: stopped.argmax()] if stopped.any() else row


def bucket(size: int, least: int) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def _padded(
    prompt: AnyArray, lengths: AnyArray | None, columns: int
) -> tuple[AnyArray, AnyArray]:
    """Pad prompts on the left to `columns`, and the number of rows to a power of two.

    Arrays stay on the host unless they are traced: JAX would compile the padding for
    each shape.

    Returns:
        prompts and their lengths.
    """
    traced = isinstance(prompt, Tracer) or isinstance(lengths, Tracer)
    module: Any = jnp if traced else np
    rows = bucket(len(prompt), 1) - len(prompt)
    if lengths is None:
        lengths = np.full(len(prompt), prompt.shape[1])
    prompt = module.asarray(prompt).astype(np.int32)
    prompt = module.pad(prompt, ((0, rows), (columns - prompt.shape[1], 0)))
    lengths = module.asarray(lengths).astype(np.int32)
    return prompt, module.pad(lengths, (0, rows), constant_values=1)


def _padded_keys(key: Array, rows: int, padded: int) -> Array:
    """Return typed PRNG keys: one, or one for each of `padded` rows.

    Raises:
        ValueError: `key` has neither one key nor one for each of `rows`.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.shape not in ((), (rows,)):
        raise ValueError(
            f"key must be one, or one for each of {rows} rows, got {key.shape}"
        )
    if not key.ndim or rows == padded:
        return key
    data = jax.random.key_data(key)
    data = jnp.pad(data, ((0, padded - rows), (0, 0)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def _check_prompt(model: Decoder, prompt: AnyArray, count: int) -> None:
    if prompt.ndim != 2:
        raise ValueError(
            f"generation needs prompts [examples, tokens], got {prompt.shape}"
        )
    if prompt.size < 1:
        raise ValueError(
            f"generation needs prompts of at least 1 token, got {prompt.shape}"
        )
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"the tokens of a prompt must be ints, got {prompt.dtype}")
    if model.learned_positions and prompt.shape[1] + count > model.length:
        raise ValueError(
            f"a prompt of {prompt.shape[1]} and {count} new tokens do not fit the "
            f"{model.length} learned positions of the model"
        )


def _check_sampling(temperature: Any, top_p: Any) -> None:
    if not isinstance(temperature, Tracer) and not (
        _is_number(temperature) and 0 <= temperature < float("inf")
    ):
        raise ValueError(
            f"temperature must be 0 or above, and finite, got {temperature!r}"
        )
    if not isinstance(top_p, Tracer) and not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")


def _is_number(value: Any) -> bool:
    """Return whether a value is one real number; a boolean is none."""
    kind = np.asarray(value).dtype
    real = jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating)
    return np.ndim(value) == 0 and real


def whole(name: str, value: Any, least: int, most: int = LARGEST) -> int:
    """Return a value as int.

    Raises:
        ValueError: it is not a whole number, or outside its range.
    """
    number = np.asarray(value)
    is_number = number.ndim == 0 and number.dtype.kind in "iuf"
    if not (is_number and least <= number <= most and number % 1 == 0):
        raise ValueError(
            f"{name} must be a whole number from {least} to {most}, got {value!r}"
        )
    return int(number)


def _check_lengths(lengths: AnyArray, prompt: AnyArray) -> None:
    is_concrete = not isinstance(lengths, Tracer)
    if lengths.shape != prompt.shape[:1] or (
        is_concrete and not all(1 <= length <= prompt.shape[1] for length in lengths)
    ):
        raise ValueError(
            f"lengths must be one of 1 to {prompt.shape[1]} for each prompt of "
            f"{prompt.shape}, got {lengths if is_concrete else lengths.shape}"
        )


def _check_tokens(prompt: AnyArray, lengths: AnyArray | None, last: int) -> None:
    tokens = np.asarray(prompt)
    if lengths is not None and not isinstance(lengths, Tracer):
        first = tokens.shape[1] - np.asarray(lengths)[:, None]
        tokens = tokens[np.arange(tokens.shape[1]) >= first]  # without the padding
    if tokens.min() < 0 or tokens.max() > last:
        raise ValueError(
            f"the tokens of a prompt must be from 0 to {last}, the model's vocabulary, "
            f"got {tokens.min()} to {tokens.max()}"
        )


class _State(NamedTuple):
    """State of the loop over new tokens.

    Attributes:
        index: number of tokens that are written.
        stopped: rows that have drawn a stop token, and rows of padding.
        tokens: new tokens of each row; from `index` on the last one is repeated.
        cache: cache of the model, which has read all tokens except the last.
    """

    index: Int[Array, ""]
    stopped: Bool[Array, "B"]
    tokens: Int[Array, "B room"]
    cache: Any


def _so_far(state: _State, rows: int, count: int) -> np.ndarray:
    """Return the first `count` tokens of the rows that are not padding."""
    return np.asarray(state.tokens)[:rows, :count]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    graph, room, top_k, weights, prompt, lengths, rows, stops, keys, temperature, top_p
) -> _State:
    """Read the prompts and draw the first token of each."""
    model = nnx.merge(graph, weights)
    cache = model.init_cache(prompt.shape[0], room)
    # Padding moves to the end, where causal attention ignores it.
    prompt = jax.vmap(jnp.roll)(prompt, lengths - prompt.shape[1])
    hidden, cache = model.read(prompt, cache, lengths)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    logits = transformer.logits(model, last)[:, 0]
    first = _draw(logits, _keys(keys, room)[0], top_k, temperature, top_p)
    padding = jnp.arange(len(first)) >= rows
    tokens = jnp.broadcast_to(first[:, None], (len(first), room))
    return _State(jnp.int32(1), stops[first] | padding, tokens, cache)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _write(
    graph, top_k, weights, cache, state, count, stops, keys, temperature, top_p
) -> _State:
    """Draw tokens until there are `count`, or all rows have stopped."""
    model, room = nnx.merge(graph, weights), state.tokens.shape[1]
    keys = _keys(keys, room)

    def is_unfinished(state: _State) -> Array:
        return (state.index < count) & ~state.stopped.all()

    def step(state: _State) -> _State:
        index, stopped, tokens, cache = state
        before = tokens[:, index - 1]
        logits, cache = model.decode(before[:, None], cache)
        drawn = _draw(logits[:, -1], keys[index], top_k, temperature, top_p)
        token = jnp.where(stopped, before, drawn)
        tokens = tokens.at[:, index].set(token)
        return _State(index + 1, stopped | stops[token], tokens, cache)

    state = jax.lax.while_loop(is_unfinished, step, state._replace(cache=cache))
    written = jnp.arange(room) < state.index
    last = state.tokens[:, state.index - 1]
    return state._replace(tokens=jnp.where(written, state.tokens, last[:, None]))


def _keys(keys: Array, count: int) -> Array:
    """Return the keys of `count` tokens, [count] or [count B].

    The key of a token does not depend on `count`.
    """
    if not keys.ndim:
        return jax.random.split(keys, count)
    return jax.vmap(partial(jax.random.split, num=count), out_axes=1)(keys)


def _draw(
    logits: Float[Array, "B vocabulary"],
    keys: Array,
    top_k: int,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
) -> Int[Array, "B"]:
    """Draw one token per row, with one key for all rows or one key per row."""
    logits = logits.astype(jnp.float32)
    warm = temperature >= GREEDY
    divisor = jnp.where(warm, temperature.clip(max=HOTTEST), 1)
    highest = logits.max(axis=-1, keepdims=True)
    # With the highest logit at 0, a low temperature makes the others −∞, not NaN.
    shifted = logits - jnp.where(jnp.isfinite(highest), highest, 0)
    likely = _likely(shifted / divisor, top_k, top_p)
    draw = jax.vmap(jax.random.categorical) if keys.ndim else jax.random.categorical
    drawn = draw(keys, likely)
    return jnp.where(warm, drawn, logits.argmax(axis=-1)).astype(jnp.int32)


def _likely(
    logits: Float[Array, "B vocabulary"], top_k: int, top_p: Float[Array, ""]
) -> Float[Array, "B vocabulary"]:
    """Set logits outside top_k and top_p to −∞; in float32."""
    logits = logits.astype(jnp.float32)
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = _highest(logits, least, jnp.int32(top_k))

    def nucleus(logits: Array) -> Array:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        reached = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        count = 1 + (reached < top_p - SLACK).sum(axis=-1, keepdims=True)
        count = jnp.minimum(count, logits.shape[-1])
        least = jnp.take_along_axis(ordered, count - 1, axis=-1)
        return _highest(logits, least, count)

    return jax.lax.cond(top_p < 1, nucleus, lambda logits: logits, logits)


def _highest(
    logits: Float[Array, "B vocabulary"],
    least: Float[Array, "B 1"],
    count: Int[Array, "..."],
) -> Float[Array, "B vocabulary"]:
    """Keep the `count` highest logits, the last of which is `least`; others become −∞.

    Among logits equal to `least`, those of lower ids are kept.
    """
    above, equal = logits > least, logits == least
    rest = count - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (jnp.cumsum(equal, axis=-1) <= rest))
    return jnp.where(chosen, logits, -jnp.inf)
