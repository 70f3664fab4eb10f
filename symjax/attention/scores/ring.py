"""Ring attention: softmax over keys that travel from device to device.

Time is split over a mesh axis. Every device keeps its rows, while keys and values pass
once around the ring of devices. So a device holds the keys of only one other device at
a time. Each row keeps a running maximum of its scores and sums of exp(score − maximum),
which are rescaled when a higher score comes. In the backward pass keys and values go
around again, together with their gradients.

Source: Liu et al. 2023, arXiv:2310.01889; the online softmax is Milakov & Gimelshein
2018, arXiv:1805.02867.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax.attention.core.meshes import vary_alike
from symjax.attention.core.operands import Adjustment, ScoreArrays, ScoreSettings
from symjax.attention.core.sequence import around_ring, if_seen, pass_on
from symjax.attention.core.visibility import Visibility, slice_axis
from symjax.attention.scores.rows import scored, weighted_sum


class RingRows(NamedTuple):
    """Rows of one device, in C blocks of t rows."""

    query: Float[Array, "C B Nq t H"]
    decay: Float[Array, "C #B Nq t 1"] | None


class RingInputs(NamedTuple):
    """Arrays that the ring differentiates with respect to.

    Key and value are those of one device. Bias and decay are for the keys of all
    devices.
    """

    rows: RingRows
    key: Float[Array, "B Nk s H"]
    value: Float[Array, "B K s V"]
    scale: Float[Array, ""]
    bias: Float[Array, "#B #Nq 1 #S"] | None
    slopes: Float[Array, "1 Nq 1 1"] | None
    decay: Float[Array, "#B Nq 1 S"] | None
    sink: Float[Array, "1 Nq 1 1"] | None


class RowPositions(NamedTuple):
    """Positions and segments of rows, in C blocks of t rows."""

    position: Int[Array, "C #B t"]
    segments: Int[Array, "C B t"] | None


class OnlineSums(NamedTuple):
    """Sums of online softmax for rows, divided by exp(running_max)."""

    running_max: Float[Array, "C B Nq t"]
    total: Float[Array, "C B Nq t"]
    values: Float[Array, "C B Nq t V"]


class RingSettings(NamedTuple):
    """Static settings of one call."""

    score_settings: ScoreSettings
    axis_name: str


@partial(jax.jit, static_argnums=(0, 2))
def attend_ring(
    score_settings: ScoreSettings, arrays: ScoreArrays, axis_name: str
) -> Float[Array, "B N T V"]:
    """Return the rows of softmax attention over a ring of devices with T tokens each.

    With n devices, each device sends keys and values n − 1 times. In the backward pass
    it sends them n − 1 times again, and their gradients n times, in float32 at least.
    Memory is linear in T, not in S = n T.

    Causal rows skip the keys of later devices. That saves no time, since all devices
    wait for the last one, which needs the keys of all n. Windows save time. There is no
    forward-mode derivative (`jax.jvp`).

    Args:
        arrays: query, key and value are those of one device. Bias and visibility are
            for the rows of one device and all S keys.
    Raises:
        ValueError: a mask or a bias that differs by row; a length_scale of slope and
            power; length_base, length_scale "floor" or mask_self together with a mask
            or segments, because no device sees all keys of a row.
    """
    _check(score_settings, arrays)
    arrays = _without_hidden(arrays)
    query, key, value, bias, slopes, lam, scale, visibility, adjustment = arrays
    row_decay, key_decay, sink, _ = adjustment or Adjustment()
    length = query.shape[2]
    size = -(-length // -(-length // score_settings.block_rows))
    of_rows = RingRows(
        _cut(query, size, 2), None if row_decay is None else _cut(row_decay, size, 2)
    )
    inputs = RingInputs(of_rows, key, value, scale, bias, slopes, key_decay, sink)
    segments = visibility.row_segments
    rows = RowPositions(
        _cut(visibility.row_positions, size, 1),
        None if segments is None else _cut(segments, size, 1),
    )
    inputs, rows, visibility = vary_alike((inputs, rows, visibility))
    blocks: Any = _ring(
        RingSettings(score_settings, axis_name), inputs, rows, visibility
    )
    output = jnp.moveaxis(blocks, 0, 2)
    output = output.reshape(*output.shape[:2], -1, output.shape[-1])[:, :, :length]
    if lam is not None:
        lam = lam[..., None].astype(output.dtype)
        output = output[:, 0::2] - lam * output[:, 1::2]
    return output.astype(score_settings.dtypes[1])


def _without_hidden(arrays: ScoreArrays) -> ScoreArrays:
    """Set the keys and values of this device that the mask hides to 0."""
    visibility, (key, value) = arrays.visibility, arrays[1:3]
    mask = slice_axis(
        visibility.mask, 3, start=visibility.row_positions[0, 0], size=key.shape[2]
    )
    if mask is None:
        return arrays
    visible = mask.any(axis=(1, 2))[:, None, :, None]
    key, value = (jnp.where(visible, x, 0) for x in (key, value))
    return arrays._replace(key=key, value=value)


def _cut(x: Array, size: int, axis: int) -> Array:
    """Return [… T …] as C blocks [C … size …]; zeros fill up the last block."""
    blocks = -(-x.shape[axis] // size)
    edges = [(0, 0)] * x.ndim
    edges[axis] = (0, blocks * size - x.shape[axis])
    x = jnp.pad(x, edges)
    x = x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    settings: RingSettings,
    inputs: RingInputs,
    rows: RowPositions,
    visibility: Visibility,
) -> Float[Array, "C B Nq t V"]:
    return _ring_forward(settings, inputs, rows, visibility)[0]


def _ring_forward(
    settings: RingSettings,
    inputs: RingInputs,
    rows: RowPositions,
    visibility: Visibility,
) -> tuple[Array, tuple]:
    """Return the rows and residuals, among them log Σ exp(score) of each row."""
    index, wide = jax.lax.axis_index(settings.axis_name), inputs.scale.dtype
    shape, length = inputs.rows.query.shape[:-1], inputs.key.shape[2]
    sink = -jnp.inf if inputs.sink is None else inputs.sink[..., 0]
    empty = OnlineSums(
        jnp.full(shape, sink, wide),
        jnp.full(shape, 0 if inputs.sink is None else 1, wide),
        jnp.zeros((*shape, inputs.value.shape[-1]), wide),
    )
    empty, _ = vary_alike((empty, inputs.key))

    def meet(sums: OnlineSums, keys: tuple, source: Array) -> tuple[OnlineSums, tuple]:
        def visit(sums: OnlineSums) -> OnlineSums:
            def block(part: tuple) -> OnlineSums:
                of_rows, rows, sums = part
                here = inputs._replace(rows=of_rows, key=keys[0], value=keys[1])
                return _update(
                    settings,
                    here,
                    _visibility_of_source(visibility, rows, here, source),
                    sums,
                )

            return jax.lax.map(block, (inputs.rows, rows, sums))

        return if_seen(visibility.window, length, source - index, visit, sums), keys

    sums, _ = around_ring(settings.axis_name, meet, empty, (inputs.key, inputs.value))
    total = jnp.where(sums.total == 0, 1, sums.total)
    output = sums.values / total[..., None]
    logarithm = _finite(sums.running_max) + jnp.log(total)
    return output, (inputs, rows, visibility, output, logarithm)


def _ring_backward(
    settings: RingSettings, residuals: tuple, output_gradient: Array
) -> tuple[RingInputs, None, None]:
    """Return the gradients of the inputs, summed in float32 at least.

    Gradients of rows stay on their device; those of keys and values pass around the
    ring. The weights are w = exp(score − logarithm), with the logarithm as a constant.
    The output is Σ w v / Σ w, where Σ w includes the sink. The value of Σ w is 1, but
    its gradient is needed, since Σ w depends on the scores.
    """
    inputs, rows, visibility, output, logarithm = residuals
    index, wide = jax.lax.axis_index(settings.axis_name), inputs.scale.dtype
    length = inputs.key.shape[2]
    total_gradient = -(output_gradient * output).sum(axis=-1)  # gradient of Σ w

    def zeros(tree):
        return jax.tree.map(lambda x: jnp.zeros_like(x, wide), tree)

    def meet(own: tuple, moving: tuple, source: Array) -> tuple[tuple, tuple]:
        keys, gradient = moving

        def visit(gradients: tuple) -> tuple:
            def block(shared: tuple, part: tuple) -> tuple:
                of_rows, rows, logarithm, *sum_gradients = part
                of_source = _visibility_of_source(visibility, rows, inputs, source)

                def weigh(here: RingInputs) -> tuple[Array, Array]:
                    scores = _scores(settings, here, of_source)
                    weights = jnp.exp(scores - logarithm[..., None])
                    # In float32 at least, or the two gradients of w would not cancel.
                    values = weighted_sum(weights, here.value.astype(wide))
                    return weights.sum(axis=-1), values

                here = inputs._replace(rows=of_rows, key=keys[0], value=keys[1])
                (found,) = jax.vjp(weigh, here)[1](tuple(sum_gradients))
                new = jax.tree.map(jnp.add, shared, tuple(found[1:]))
                return new, jax.tree.map(lambda x: x.astype(wide), found.rows)

            of_rows, *shared = gradients
            parts = (inputs.rows, rows, logarithm, total_gradient, output_gradient)
            shared, new = jax.lax.scan(block, tuple(shared), parts)
            return (jax.tree.map(jnp.add, of_rows, new), *shared)

        gradients = (own[0], *gradient, *own[1:])
        distance = source - index
        of_rows, key, value, *rest = if_seen(
            visibility.window, length, distance, visit, gradients
        )
        return (of_rows, *rest), (keys, (key, value))

    keys = (inputs.key, inputs.value)
    rest = zeros((inputs.rows, *inputs[3:]))
    start = vary_alike((rest, (keys, zeros(keys))))
    own, (_, gradient) = around_ring(settings.axis_name, meet, *start)
    key, value = pass_on(gradient, settings.axis_name)  # to the device of the keys
    found = RingInputs(own[0], key, value, *own[1:])
    if inputs.sink is not None:
        weight = jnp.exp(inputs.sink[None, ..., 0] - logarithm)
        sink = (weight * total_gradient).sum(axis=(0, 1, 3))
        found = found._replace(sink=sink[None, :, None, None])
    found = jax.tree.map(lambda x, like: x.astype(like.dtype), found, inputs)
    return found, None, None


_ring.defvjp(_ring_forward, _ring_backward)


def _visibility_of_source(
    visibility: Visibility, rows: RowPositions, inputs: RingInputs, source: Array
) -> tuple:
    """Return the visibility of rows and keys of device `source`, and `source`."""
    length = inputs.key.shape[2]
    keys = partial(slice_axis, start=source * length, size=length)
    visibility = replace(
        visibility, row_positions=rows.position, row_segments=rows.segments
    )
    return visibility.map_keys(keys), source


def _scores(settings: RingSettings, inputs: RingInputs, of_source: tuple) -> Array:
    """Return the scores of a block of rows and the keys of a device; −∞ if hidden.

    Args:
        of_source: the result of `_visibility_of_source`.
    """
    visibility, source = of_source
    length = inputs.key.shape[2]
    cut = partial(slice_axis, axis=3, start=source * length, size=length)
    arrays = ScoreArrays(
        inputs.rows.query,
        inputs.key,
        inputs.value,
        cut(inputs.bias),
        inputs.slopes,
        None,
        inputs.scale,
        visibility,
        Adjustment(inputs.rows.decay, cut(inputs.decay)),
    )
    visible = visibility.pairs()
    scores = scored(settings.score_settings, arrays, visible)
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def _update(
    settings: RingSettings, inputs: RingInputs, of_source: tuple, sums: OnlineSums
) -> OnlineSums:
    """Return the sums of rows after the keys of one more device."""
    scores = _scores(settings, inputs, of_source)
    running_max = jnp.maximum(sums.running_max, scores.max(axis=-1))
    rescale = jnp.exp(sums.running_max - _finite(running_max))
    weights = jnp.exp(scores - _finite(running_max)[..., None])
    values = weighted_sum(weights, inputs.value)
    return OnlineSums(
        running_max,
        sums.total * rescale + weights.sum(axis=-1),
        sums.values * rescale[..., None] + values,
    )


def _finite(running_max: Array) -> Array:
    """Return the maximum, or 0 if no key was seen, because −∞ − (−∞) is NaN."""
    return jnp.where(jnp.isneginf(running_max), 0, running_max)


def _check(score_settings: ScoreSettings, arrays: ScoreArrays) -> None:
    """Refuse masks and biases that differ by row, and options that the ring lacks."""
    visibility, bias = arrays.visibility, arrays.bias
    for name, pairs in (("bias", bias), ("mask", visibility.mask)):
        if pairs is not None and pairs.shape[2] > 1:
            batch, heads, _, _ = arrays.query.shape
            raise ValueError(
                f"implementation 'ring': a {name} must be the same for all rows, "
                f"broadcast to {(batch, heads, 1, visibility.length)}, got "
                f"{pairs.shape}"
            )
    if score_settings.length_scale == "adaptive":
        raise ValueError(
            "implementation 'ring' takes a length_scale by name alone: choose 'rows'"
        )
    counted = score_settings.length_scale == "floor" and "floor"
    for name, option in (
        ("length_base", score_settings.length_base),
        ("length_scale", counted),
        ("mask_self", visibility.mask_self),
    ):
        for other, array in (
            ("a mask", visibility.mask),
            ("segment_ids", visibility.row_segments),
        ):
            if option and array is not None:
                raise ValueError(
                    f"implementation 'ring' with {other} cannot count the keys that a "
                    f"row sees, as {name} {option} needs: choose 'rows'"
                )
