"""Ring attention: softmax over keys that travel from device to device.

Time is split over a mesh axis. Every device keeps its rows; blocks of keys and values
go once around the ring, and each row keeps a running maximum of its scores and the sums
of exp(score − maximum), which are rescaled when a higher score comes. No device holds
the keys of another for longer than a turn, in the backward pass either: there the
blocks go around again, and their gradients travel with them.

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
from symjax.attention.core.operands import Operands, Rule
from symjax.attention.core.sequence import around, if_seen, pass_on
from symjax.attention.core.visibility import Visibility, part
from symjax.attention.scores.rows import scored, weighed


class Given(NamedTuple):
    """What scores are made of; the gradient is with respect to these.

    Rows stand in blocks of t, key and value are a device's own, the bias is of all
    keys.
    """

    query: Float[Array, "C B Nq t H"]
    key: Float[Array, "B Nk s H"]
    value: Float[Array, "B K s V"]
    scale: Float[Array, ""]
    bias: Float[Array, "#B #Nq 1 #S"] | None
    slopes: Float[Array, "1 Nq 1 1"] | None


class Rows(NamedTuple):
    """Positions and segments of rows, in blocks of t."""

    position: Int[Array, "C #B t"]
    segments: Int[Array, "C B t"] | None


class Sums(NamedTuple):
    """Online-softmax accumulators of rows; the sums are times exp(−running_max)."""

    running_max: Float[Array, "C B Nq t"]
    total: Float[Array, "C B Nq t"]
    values: Float[Array, "C B Nq t V"]


class Turn(NamedTuple):
    """The static half of a call."""

    rule: Rule
    axis_name: str


@partial(jax.jit, static_argnums=(0, 2))  # a call outside jit compiles once a shape
def attend_ring(
    rule: Rule, operands: Operands, axis_name: str
) -> Float[Array, "B N T V"]:
    """`attend_rows` of softmax weights over a ring of devices, each with its own T.

    With n devices each one sends its keys and values n − 1 times; in the backward pass
    n − 1 times again, and n times their gradients, in float32 at least. Memory is
    linear in T, not in S = n T. Causal rows skip later blocks, but the last device
    processes all n, so that the ring takes the time of n blocks; a window skips blocks
    on both sides. There is no forward-mode derivative (`jax.jvp`).

    Args:
        operands: query, key and value are a device's own; the bias and the visibility
            are of its rows and of all S keys.
    Raises:
        ValueError: a mask or a bias that differs by row; length_base or mask_self with
            a mask or segments, since no device sees all keys of a row at once.
    """
    _check(rule, operands)
    query, key, value, bias, slopes, lam, scale, known = _without_hidden(operands)
    length = query.shape[2]
    size = -(-length // -(-length // rule.block_rows))
    given = Given(_cut(query, size, 2), key, value, scale, bias, slopes)
    segments = known.row_segments
    rows = Rows(
        _cut(known.rows, size, 1),
        None if segments is None else _cut(segments, size, 1),
    )
    given, rows, known = vary_alike((given, rows, known))
    blocks: Any = _ring(Turn(rule, axis_name), given, rows, known)
    output = jnp.moveaxis(blocks, 0, 2)
    output = output.reshape(*output.shape[:2], -1, output.shape[-1])[:, :, :length]
    if lam is not None:
        lam = lam[..., None].astype(output.dtype)
        output = output[:, 0::2] - lam * output[:, 1::2]
    return output.astype(rule.dtypes[1])


def _without_hidden(operands: Operands) -> Operands:
    """Set a device's own keys and values that the mask hides to 0."""
    known, (key, value) = operands.visibility, operands[1:3]
    mask = part(known.mask, 3, start=known.rows[0, 0], size=key.shape[2])
    if mask is None:
        return operands
    seen = mask.any(axis=(1, 2))[:, None, :, None]
    key, value = (jnp.where(seen, x, 0) for x in (key, value))
    return operands._replace(key=key, value=value)


def _cut(x: Array, size: int, axis: int) -> Array:
    """[… T …] as [C … size …], the last block filled up with zeros."""
    blocks = -(-x.shape[axis] // size)
    edges = [(0, 0)] * x.ndim
    edges[axis] = (0, blocks * size - x.shape[axis])
    x = jnp.pad(x, edges)
    x = x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    turn: Turn, given: Given, rows: Rows, known: Visibility
) -> Float[Array, "C B Nq t V"]:
    return _forward(turn, given, rows, known)[0]


def _forward(
    turn: Turn, given: Given, rows: Rows, known: Visibility
) -> tuple[Array, tuple]:
    """The rows, and what the backward pass needs: the logarithm of their sums."""
    index, wide = jax.lax.axis_index(turn.axis_name), given.scale.dtype
    shape, length = given.query.shape[:-1], given.key.shape[2]
    empty = Sums(
        jnp.full(shape, -jnp.inf, wide),
        jnp.zeros(shape, wide),
        jnp.zeros((*shape, given.value.shape[-1]), wide),
    )
    empty, _ = vary_alike((empty, given.key))

    def meet(sums: Sums, keys: tuple, source: Array) -> tuple[Sums, tuple]:
        def visit(sums: Sums) -> Sums:
            def block(part: tuple) -> Sums:
                query, rows, sums = part
                here = given._replace(query=query, key=keys[0], value=keys[1])
                return _update(turn, here, _seen(known, rows, here, source), sums)

            return jax.lax.map(block, (given.query, rows, sums))

        return if_seen(known.window, length, source - index, visit, sums), keys

    sums, _ = around(turn.axis_name, meet, empty, (given.key, given.value))
    total = jnp.where(sums.total == 0, 1, sums.total)
    output = sums.values / total[..., None]
    logarithm = _finite(sums.running_max) + jnp.log(total)
    return output, (given, rows, known, output, logarithm)


def _backward(turn: Turn, residuals: tuple, change: Array) -> tuple[Given, None, None]:
    """Gradients of rows stay and those of keys travel, both in wide floats.

    With weights w = exp(score − logarithm) and Σ w = 1 the output is Σ w v / Σ w: the
    gradient passes through both sums, the logarithm is a constant.
    """
    given, rows, known, output, logarithm = residuals
    index, wide = jax.lax.axis_index(turn.axis_name), given.scale.dtype
    length = given.key.shape[2]
    against = -(change * output).sum(axis=-1)  # the gradient of Σ w

    def zeros(tree):
        return jax.tree.map(lambda x: jnp.zeros_like(x, wide), tree)

    def meet(own: tuple, moving: tuple, source: Array) -> tuple[tuple, tuple]:
        keys, gradient = moving

        def visit(gradients: tuple) -> tuple:
            def block(shared: tuple, part: tuple) -> tuple:
                query, rows, logarithm, against, change = part
                seen = _seen(known, rows, given, source)

                def weigh(here: Given) -> tuple[Array, Array]:
                    scores = _scores(turn, here, seen)
                    weights = jnp.exp(scores - logarithm[..., None])
                    # In wide floats, so that both changes of weights cancel.
                    values = weighed(weights, here.value.astype(wide))
                    return weights.sum(axis=-1), values

                here = given._replace(query=query, key=keys[0], value=keys[1])
                (found,) = jax.vjp(weigh, here)[1]((against, change))
                new = jax.tree.map(jnp.add, shared, tuple(found[1:]))
                return new, found.query.astype(wide)

            query, *shared = gradients
            parts = (given.query, rows, logarithm, against, change)
            shared, new = jax.lax.scan(block, tuple(shared), parts)
            return (query + new, *shared)

        everything = (own[0], *gradient, *own[1:])
        distance = source - index
        query, key, value, *rest = if_seen(
            known.window, length, distance, visit, everything
        )
        return (query, *rest), (keys, (key, value))

    keys = (given.key, given.value)
    rest = zeros((given.query, given.scale, given.bias, given.slopes))
    start = vary_alike((rest, (keys, zeros(keys))))
    own, (_, gradient) = around(turn.axis_name, meet, *start)
    key, value = pass_on(gradient, turn.axis_name)  # back on their own device
    found = Given(own[0], key, value, *own[1:])
    found = jax.tree.map(lambda x, like: x.astype(like.dtype), found, given)
    return found, None, None


_ring.defvjp(_forward, _backward)


def _seen(known: Visibility, rows: Rows, given: Given, source: Array) -> tuple:
    """Visibility of a block of rows and the keys of one device, and the bias there."""
    length = given.key.shape[2]
    keys = partial(part, start=source * length, size=length)
    known = replace(known, rows=rows.position, row_segments=rows.segments)
    return known.map_keys(keys), source


def _scores(turn: Turn, given: Given, seen: tuple) -> Array:
    """A block of rows against the keys of one device; −∞ where they do not see."""
    visibility, source = seen
    length = given.key.shape[2]
    bias = part(given.bias, 3, start=source * length, size=length)
    operands = Operands(
        given.query,
        given.key,
        given.value,
        bias,
        given.slopes,
        None,
        given.scale,
        visibility,
    )
    visible = visibility.pairs()
    scores = scored(turn.rule, operands, visible)
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def _update(turn: Turn, given: Given, seen: tuple, sums: Sums) -> Sums:
    """The sums of rows after the keys of one more device."""
    scores = _scores(turn, given, seen)
    running_max = jnp.maximum(sums.running_max, scores.max(axis=-1))
    rescale = jnp.exp(sums.running_max - _finite(running_max))
    weights = jnp.exp(scores - _finite(running_max)[..., None])
    values = weighed(weights, given.value)
    return Sums(
        running_max,
        sums.total * rescale + weights.sum(axis=-1),
        sums.values * rescale[..., None] + values,
    )


def _finite(running_max: Array) -> Array:
    """A maximum to subtract: 0 where no key was seen, since −∞ − (−∞) is NaN."""
    return jnp.where(jnp.isneginf(running_max), 0, running_max)


def _check(rule: Rule, operands: Operands) -> None:
    """Refuse what needs all keys of a row at once, or differs by row."""
    known, bias = operands.visibility, operands.bias
    for name, pairs in (("bias", bias), ("mask", known.mask)):
        if pairs is not None and pairs.shape[2] > 1:
            batch, heads, _, _ = operands.query.shape
            raise ValueError(
                f"implementation 'ring': a {name} must be the same for all rows, "
                f"broadcast to {(batch, heads, 1, known.length)}, got {pairs.shape}"
            )
    for name, option in (
        ("length_base", rule.length_base),
        ("mask_self", known.mask_self),
    ):
        for other, given in (
            ("a mask", known.mask),
            ("segment_ids", known.row_segments),
        ):
            if option and given is not None:
                raise ValueError(
                    f"implementation 'ring' with {other} cannot count the keys that a "
                    f"row sees, as {name} {option} needs: choose 'rows'"
                )
