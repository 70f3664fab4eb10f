"""Adapters of the recurrent kernels for NVIDIA GPUs, and their derivatives.

An adapter makes the arrays of the kernels from the arrays of a call: hidden tokens are
0, and time is padded to whole chunks.

A row of exponential features underflows if a later key of its chunk has features that
are much larger than those of the keys that the row sees. The fallback computes such
rows again (`core.underflow`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.core.feature_maps import UNDERFLOW, Features, LogFeatures
from symjax.attention.core.operands import Tokens
from symjax.attention.core.sequence import id_changes
from symjax.attention.core.underflow import recompute_underflow
from symjax.attention.kernels.gpu import delta, features, gated, gated_channels
from symjax.attention.kernels.gpu.chunks import (
    pad_to_chunks,
    sum_query_heads,
    unsupported_values,
)
from symjax.attention.kernels.gpu.feature_operands import (
    FeatureForm,
    SegmentNumbers,
    mean_weights,
    pad_features,
    padded_feature_count,
)
from symjax.attention.kernels.gpu.features import FeatureResiduals
from symjax.attention.kernels.operands import (
    MOST_FEATURES,
    RESIDUAL,
    feature_count,
    key_features,
    log_decay_of,
    unsupported,
    visible_arrays,
)


class GpuFeatures(NamedTuple):
    """Performer, linear and cosine attention of bfloat16 arrays, with TF32 products.

    Features must be bounded or never negative. The kernels compute elementwise features
    of queries and keys whose head size is 16, 32 or a multiple of 64. XLA computes all
    other features, in float32.
    """

    recurrence: Any
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
        self, tokens: Tokens, parameters: Any, fallback: Any
    ) -> Float[Array, "B T N V"]:
        maps = self.recurrence.features
        if key_features(maps, tokens.key, parameters).exponent is None:
            form, *arrays = _feature_operands(maps, self.interpret, tokens, parameters)
            rows, _ = cast(tuple, _attend(FeatureKernels(form), *arrays))
            return rows[:, : tokens.query.shape[1]]
        constants = tokens.mask, tokens.segment_ids
        return recompute_underflow(
            partial(_rows_and_underflow, maps, self.interpret),
            partial(_exact_rows, fallback),
            constants,
            (*tokens[:3], parameters),
        )


class GpuDecay(NamedTuple):
    """Linear attention with a decay per head or per channel, with bfloat16 operands.

    The kernels store states in bfloat16, and sums of log-decays in float32.

    In one run on an H200, forward and backward passes of 4 examples of 4096 tokens with
    16 heads of 128 took 2.8 ms with a decay per channel and 1.0 ms with a decay per
    head. XLA took 24 and 2.4 ms (docs/performance.md has current figures).
    """

    recurrence: Any
    interpret: Any = False

    def refusal(self, tokens: Tokens, parameters: Array | None) -> str | None:
        """Return why the kernels do not support a call; None if they do."""
        return unsupported(tokens) or unsupported_values(tokens, keys=True)

    def attend(
        self, tokens: Tokens, parameters: Array | None, fallback: Callable
    ) -> Float[Array, "B T N V"]:
        log_decay = log_decay_of(tokens.operands, parameters)
        kernels = gated_channels if log_decay.shape[3] > 1 else gated
        arrays = visible_arrays(tokens, log_decay, None)[:4]
        return _attend_in_chunks(kernels, self.interpret, arrays)


class GpuDelta(NamedTuple):
    """The delta rule, with bfloat16 operands.

    In one run on an H200, with the sizes given in `GpuDecay`, it took 1.9 ms, and 5.6
    ms with a decay per channel. XLA took 12 and 27 ms.
    """

    recurrence: Any
    interpret: Any = False

    def refusal(self, tokens: Tokens, parameters: Array | None) -> str | None:
        """Return why the kernels do not support a call; None if they do."""
        return unsupported(tokens) or unsupported_values(tokens, keys=True)

    def attend(
        self, tokens: Tokens, parameters: Array | None, fallback: Callable
    ) -> Float[Array, "B T N V"]:
        beta, *decays = tokens.operands
        log_decay = log_decay_of(decays, parameters)
        arrays = visible_arrays(tokens, log_decay, beta.astype(jnp.float32))
        return _attend_in_chunks(delta, self.interpret, arrays)


class ChunkKernels(NamedTuple):
    """Kernels of a decay or of the delta rule."""

    module: Any  # has `forward` and `backward`
    interpret: Any

    def forward(self, arrays: tuple, *, keep: bool) -> tuple[Array, list[Array]]:
        """Return the output and the residuals, which these kernels always store."""
        results = self.module.forward(self.interpret, *arrays)
        output, *stored = checkpoint_name(results, RESIDUAL)
        return output, stored

    def backward(
        self, arrays: tuple, stored: list[Array], change: Array
    ) -> tuple[Array, ...]:
        gradients = self.module.backward(self.interpret, arrays, stored, change)
        return tuple(map(sum_query_heads, gradients, arrays))


class FeatureKernels(NamedTuple):
    """Kernels of normalised linear attention over features.

    Their arrays are the segment numbers, queries, keys and values.
    """

    form: FeatureForm

    def forward(
        self, arrays: tuple, *, keep: bool
    ) -> tuple[tuple[Array, Array], FeatureResiduals | None]:
        """Return the output with its denominators [B N T], and the residuals."""
        ids, query, key, value = arrays
        output, denominator, stored = features.forward(
            self.form, query, key, value, ids, keep=keep
        )
        if stored is None:
            return (output, denominator), None
        states, *rows = stored
        output, *rows = checkpoint_name((output, *rows), RESIDUAL)
        stored = FeatureResiduals(states, *rows)
        return (output, stored.denominator), stored

    def backward(
        self, arrays: tuple, stored: FeatureResiduals, changes: tuple[Array, Array]
    ) -> tuple:
        """Return the gradients; denominators and segment numbers have none."""
        ids, query, key, value = arrays
        gradients = features.backward(
            self.form, query, key, value, ids, stored, changes[0]
        )
        return None, *map(sum_query_heads, gradients, (query, key, value))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernels: ChunkKernels | FeatureKernels, *arrays: Any) -> Any:
    """Return the results of the kernels for arrays padded to whole chunks."""
    return kernels.forward(arrays, keep=False)[0]


def _forward(kernels: Any, *arrays: Any) -> tuple[Any, tuple]:
    results, stored = kernels.forward(arrays, keep=True)
    return results, (arrays, stored)


def _backward(kernels: Any, residuals: tuple, changes: Any) -> tuple:
    return kernels.backward(*residuals, changes)


_attend.defvjp(_forward, _backward)


def _attend_in_chunks(
    module: Any, interpret: Any, arrays: Sequence[Array]
) -> Float[Array, "B T N V"]:
    """Pad the arrays to whole chunks, and call the kernels of a module."""
    kernels = ChunkKernels(module, interpret)
    output: Array = _attend(kernels, *map(pad_to_chunks, arrays))
    return output[:, : arrays[0].shape[1]]


def _feature_operands(
    maps: Features, interpret: Any, tokens: Tokens, parameters: Any
) -> tuple[FeatureForm, SegmentNumbers, Array, Array, Array]:
    """Return the form of the features, and the arrays of `FeatureKernels`."""
    query, key, value, ids = SegmentNumbers.of(tokens)
    if maps.in_kernels and query.shape[3] == padded_feature_count(query.shape[3]):
        return FeatureForm(False, maps, interpret), ids, query, key, value
    query, key = (x.astype(jnp.float32) for x in (query, key))
    of_query = maps.query(query, parameters)
    of_key = maps.key(key, parameters).where((ids.key >= 0)[..., None])
    if maps.bounded:
        of_query = LogFeatures(mean_weights(of_query.amplitude, ids), None)
    form = FeatureForm(of_key.exponent is not None, None, interpret, maps.bounded)
    query, key = (
        pad_features(x.exponent if form.has_exponents else x.amplitude, form.nothing)
        for x in (of_query, of_key)
    )
    return form, ids, query, key, value


def _rows_and_underflow(
    maps: Features, interpret: Any, constants: tuple, inputs: tuple
) -> tuple[Float[Array, "B T N V"], Bool[Array, "B T N"]]:
    """Return the rows, and which of them see a key but underflow."""
    tokens, parameters = _tokens_of(constants, inputs)
    form, ids, *operands = _feature_operands(maps, interpret, tokens, parameters)
    results = _attend(FeatureKernels(form), ids, *operands)
    rows, denominator = cast(tuple, results)
    time = jnp.arange(rows.shape[1])
    first = jax.lax.cummax(jnp.where(id_changes(ids.query), time, 0), axis=1)
    latest = jax.lax.cummax(jnp.where(ids.key >= 0, time, -1), axis=1)
    small = jnp.swapaxes(jax.lax.stop_gradient(denominator) < UNDERFLOW, 1, 2)
    underflows = (latest >= first)[..., None] & small
    length = tokens.query.shape[1]
    return rows[:, :length], underflows[:, :length]


def _exact_rows(
    fallback: Any, constants: tuple, inputs: tuple
) -> Float[Array, "B T N V"]:
    return fallback.by_tokens(*_tokens_of(constants, inputs))


def _tokens_of(constants: tuple, inputs: tuple) -> tuple[Tokens, Any]:
    """Return the arguments of the fallback."""
    (mask, segment_ids), (query, key, value, parameters) = constants, inputs
    return Tokens(query, key, value, (), mask, segment_ids), parameters
