"""Causal Performer, linear and cosine attention on NVIDIA GPUs' kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.core.feature_maps import UNDERFLOW, Features, LogFeatures
from symjax.attention.core.meshes import vary_alike
from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import TILE
from symjax.attention.core.sequence import starts
from symjax.attention.kernels.gpu.chunks import sum_query_heads, unsupported_values
from symjax.attention.kernels.gpu.feature_operands import (
    FeatureForm,
    SegmentNumbers,
    mean_weights,
    pad_features,
    padded_feature_count,
)
from symjax.attention.kernels.gpu.features import FeatureResiduals, backward, forward
from symjax.attention.kernels.operands import (
    MOST_FEATURES,
    RESIDUAL,
    feature_count,
    unsupported,
)
from symjax.attention.recurrent.chunks import layout, merge_heads, scan
from symjax.attention.recurrent.normalised import Normalised
from symjax.attention.recurrent.schedule import run_as_one_chunk
from symjax.attention.recurrent.underflow import recompute_underflow


def _exponents(x: Array, _: None) -> LogFeatures:
    return LogFeatures(None, x)


_BY_EXPONENTS = Normalised(Features(_exponents, _exponents))


class GpuFeatures(NamedTuple):
    """The kernels, as a `Kernel` of the engine, of bfloat16 and of features that are
    never negative or bounded. XLA makes them in float32, except elementwise ones."""

    recurrence: Normalised
    interpret: Any = False

    def refusal(self, tokens: Tokens, parameters: Any) -> str | None:
        """Return why the kernels do not support a call; None if they do."""
        if reason := unsupported(tokens) or unsupported_values(tokens):
            return reason
        maps = self.recurrence.features
        if (maps.signed or maps.pairs) and not maps.bounded:
            return "it takes features that are never negative"
        count = feature_count(maps, tokens.key, parameters)
        if count is None or count > MOST_FEATURES:
            return f"it takes at most {MOST_FEATURES} features, got {count}"
        return None

    def attend(
        self, tokens: Tokens, parameters: Any, fallback: Callable
    ) -> Float[Array, "B T N V"]:
        query, key, value, ids = SegmentNumbers.of(tokens)
        maps = self.recurrence.features
        if maps.elementwise and query.shape[3] == padded_feature_count(query.shape[3]):
            form = FeatureForm(False, maps, self.interpret)
        else:
            query, key = (x.astype(jnp.float32) for x in (query, key))
            asking = maps.query(query, parameters)
            asked = maps.key(key, parameters).where((ids.key >= 0)[..., None])
            if maps.bounded:
                asking = LogFeatures(mean_weights(asking.amplitude, ids), None)
            exponents = asked.exponent is not None
            form = FeatureForm(exponents, None, self.interpret, maps.bounded)
            query, key = (
                pad_features(
                    x.exponent if form.exponents else x.amplitude, form.nothing
                )
                for x in (asking, asked)
            )
        if form.exponents:
            given = query, key, value
            rows: Array = recompute_underflow(
                partial(_quick, form), _exactly, ids, given
            )
        else:
            rows = cast(tuple, _attend(form, ids, query, key, value))[0]
        return rows[:, : tokens.query.shape[1]]


def _quick(
    form: FeatureForm, ids: SegmentNumbers, given: tuple[Array, Array, Array]
) -> tuple[Float[Array, "B T N V"], Bool[Array, "B T N"]]:
    """Rows, and which of them see a key but have lost all of them to rounding."""
    rows, denominator = cast(tuple, _attend(form, ids, *given))
    time = jnp.arange(rows.shape[1])
    first = jax.lax.cummax(jnp.where(starts(ids.query), time, 0), axis=1)
    latest = jax.lax.cummax(jnp.where(ids.key >= 0, time, -1), axis=1)
    small = jax.lax.stop_gradient(denominator) < UNDERFLOW
    return rows, (latest >= first)[..., None] & jnp.swapaxes(small, 1, 2)


def _exactly(
    ids: SegmentNumbers, given: tuple[Array, Array, Array]
) -> Float[Array, "B T N V"]:
    """By one chunk after the other in XLA, which takes least memory."""
    key, value = given[1:]
    mask = (ids.key >= 0)[:, None, None]
    span = layout(Tokens(*given, mask=mask, segment_ids=ids.query))
    sizes = *key.shape[::2], key.shape[3], value.shape[3]
    empty = _BY_EXPONENTS.empty(None, sizes, jnp.float32)
    state, span = vary_alike((empty, span))
    _, rows = scan(partial(run_as_one_chunk, _BY_EXPONENTS), TILE, None, state, span)
    return merge_heads(rows, value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    form: FeatureForm,
    ids: SegmentNumbers,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """The output, and its denominators, which have no gradient."""
    return forward(form, query, key, value, ids, keep=False)[:2]


def _forward(
    form: FeatureForm, ids: SegmentNumbers, query: Array, key: Array, value: Array
) -> tuple[tuple, tuple]:
    output, _, kept = forward(form, query, key, value, ids, keep=True)
    states, *rows = cast(FeatureResiduals, kept)
    output, *rows = checkpoint_name((output, *rows), RESIDUAL)
    kept = FeatureResiduals(states, *rows)
    return (output, kept.denominator), (ids, (query, key, value), kept)


def _backward(form: FeatureForm, saved: tuple, changes: tuple[Array, Array]) -> tuple:
    ids, given, kept = saved
    query, key, value = given
    found = backward(form, query, key, value, ids, kept, changes[0])
    return None, *map(sum_query_heads, found, given)


_attend.defvjp(_forward, _backward)
