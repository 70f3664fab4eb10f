"""Ring attention: softmax over keys that travel from device to device.

Time is split over a mesh axis. Every device keeps its rows; blocks of keys and values
go once around the ring, and each row keeps the highest score it has met and the sums
of exp(score − highest), which are rescaled when a higher one comes. No device holds
the keys of another for longer than a turn, in the backward pass either: there the
blocks go around again, and their gradients travel with them.

Source: Liu et al. 2023, arXiv:2310.01889; the online softmax is Milakov & Gimelshein
2018, arXiv:1805.02867.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.chunks import cut
from symjax.attention.masks import only_seen
from symjax.attention.rows import (
    BLOCK_ROWS,
    Operands,
    RowWeights,
    Rule,
    attend_rows,
    check_shapes,
    scored,
)
from symjax.attention.scaling import head_scale, length_scale
from symjax.attention.shards import first_token, pass_on, segment_runs_over


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


class Known(NamedTuple):
    """Where rows are, and what they may see."""

    position: Int[Array, "C t"]
    row_runs: Int[Array, "C B t"] | None
    runs: Int[Array, "B S"] | None
    mask: Bool[Array, "#B #Nq 1 #S"] | None


class Sums(NamedTuple):
    """What rows have met so far; the sums are times exp(−highest)."""

    highest: Float[Array, "C B Nq t"]
    total: Float[Array, "C B Nq t"]
    values: Float[Array, "C B Nq t V"]


class Turn(NamedTuple):
    """The static half of a call."""

    rule: Rule
    mask_self: bool
    axis_name: str


def attend_ring(
    weights: RowWeights,
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B T Nk H"],
    value: Float[Array, "B T K V"],
    bias: Float[Array, "#B #Nq 1 #S"] | None = None,
    mask: Bool[Array, "#B #Nq 1 #S"] | None = None,
    *,
    lam: Float[Array, "#B #T N"] | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    length_base: float | None = None,
    mask_self: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
    """`attend_rows` of softmax weights over a ring of devices, each with its own T.

    With n devices each one sends its keys and values n − 1 times; in the backward pass
    n − 1 times again, and n times their gradients, in float32 at least. Memory is
    linear in T, not in S = n T. A causal row has nothing to do with later blocks, but
    the last device meets every block: it takes the time of n blocks all the same.

    Args:
        weights: those of softmax, for `attend_rows` where there is no axis.
        bias, mask: of all S keys, the same for all rows.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over.
    Raises:
        ValueError: as `attend_rows`; a mask or a bias that differs by row; length_base
            or mask_self with a mask or segments, since no device sees all keys of a
            row at once.
    """
    arrays = query, key, value, bias, mask
    if axis_name is None:
        return attend_rows(
            weights,
            *arrays,
            lam=lam,
            scale=scale,
            is_causal=is_causal,
            length_base=length_base,
            mask_self=mask_self,
            segment_ids=segment_ids,
        )
    count, length = jax.lax.axis_size(axis_name), query.shape[1]
    first = first_token(query, key, axis_name)
    _check(arrays, segment_ids, length_base, mask_self, count, lam is not None)
    position = first + jnp.arange(length)
    wide = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
    own = _own(mask, first, length)
    if own is not None:
        key, value = only_seen(own.any(axis=(1, 2)), key, value)
    if scale is None:
        scale = head_scale(query.shape[-1])
    if length_base:  # a factor of a row's scores is one of its query
        visible = position + 1 if is_causal else jnp.full(length, count * length)
        factor = length_scale(jnp.maximum(visible - mask_self, 1), length_base)
        query = query.astype(wide) * factor.astype(wide)[None, :, None, None]
    own_runs, runs = segment_runs_over(segment_ids, axis_name)
    blocks = -(-length // BLOCK_ROWS)
    size = -(-length // blocks)
    given = Given(
        cut(jnp.swapaxes(query, 1, 2), size, 2),
        jnp.swapaxes(key, 1, 2),
        jnp.swapaxes(value, 1, 2),
        jnp.asarray(scale, wide),
        bias,
    )
    known = Known(
        cut(position, size, 0),
        None if own_runs is None else cut(own_runs, size, 1),
        runs,
        mask,
    )
    rule = Rule(weights, is_causal, False, None, 0, whole=False, block_rows=size)
    rows = _joined(_ring(Turn(rule, mask_self, axis_name), given, known), length, lam)
    return rows.astype(value.dtype)


def _joined(
    blocks: Float[Array, "C B Nq t V"], length: int, lam: Float[Array, "#B #T N"] | None
) -> Float[Array, "B T N V"]:
    """Rows out of their blocks, without the filling, and the difference of branches."""
    rows = jnp.moveaxis(blocks, 0, 1).swapaxes(2, 3)
    rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]
    if lam is None:
        return rows
    return rows[:, :, 0::2] - lam[..., None].astype(rows.dtype) * rows[:, :, 1::2]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(turn: Turn, given: Given, known: Known) -> Float[Array, "C B Nq t V"]:
    return _forward(turn, given, known)[0]


def _forward(turn: Turn, given: Given, known: Known) -> tuple[Array, tuple]:
    """The rows, and what the backward pass needs: the logarithm of their sums."""
    count, index, wide = *_place(turn), given.scale.dtype
    rows = given.query.shape[:-1]
    empty = Sums(
        jnp.full(rows, -jnp.inf, wide),
        jnp.zeros(rows, wide),
        jnp.zeros((*rows, given.value.shape[-1]), wide),
    )

    def meet(sums: Sums, keys: tuple, source: Array) -> Sums:
        def visit(sums: Sums) -> Sums:
            def block(part: tuple) -> Sums:
                query, position, runs, sums = part
                here = given._replace(query=query, key=keys[0], value=keys[1])
                facts = known._replace(position=position, row_runs=runs)
                return _absorb(turn, here, facts, source, sums)

            parts = (given.query, known.position, known.row_runs, sums)
            return jax.lax.map(block, parts)

        return _unless_future(turn, source, index, visit, sums)

    def step(carry: tuple, distance: Array) -> tuple[tuple, None]:
        sums, keys = carry
        coming = pass_on(keys, turn.axis_name)
        return (meet(sums, keys, (index - distance) % count), coming), None

    keys = (given.key, given.value)
    (sums, keys), _ = jax.lax.scan(step, (empty, keys), jnp.arange(count - 1))
    sums = meet(sums, keys, (index + 1) % count)
    total = jnp.where(sums.total == 0, 1, sums.total)
    output = sums.values / total[..., None]
    return output, (given, known, output, _finite(sums.highest) + jnp.log(total))


def _backward(turn: Turn, residuals: tuple, change: Array) -> tuple[Given, None]:
    """Gradients of rows stay and those of keys travel, both in wide floats.

    With weights w = exp(score − logarithm) and Σ w = 1 the output is Σ w v / Σ w: the
    gradient passes through both sums, the logarithm is a constant.
    """
    given, known, output, logarithm = residuals
    count, index, wide = *_place(turn), given.scale.dtype
    against = -(change * output).sum(axis=-1)  # the gradient of Σ w

    def zeros(tree):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, wide), tree)

    def meet(own: tuple, moving: tuple, source: Array) -> tuple[tuple, tuple]:
        keys, gradient = moving

        def visit(gradients: tuple) -> tuple:
            def block(shared: tuple, part: tuple) -> tuple:
                query, position, runs, logarithm, against, change = part
                facts = known._replace(position=position, row_runs=runs)

                def weigh(here: Given) -> tuple[Array, Array]:
                    scores = _scores(turn, here, facts, source)
                    return _weighed(here, jnp.exp(scores - logarithm[..., None]))

                here = given._replace(query=query, key=keys[0], value=keys[1])
                (found,) = jax.vjp(weigh, here)[1]((against, change))
                new = jax.tree.map(jnp.add, shared, tuple(found[1:]))
                return new, found.query.astype(wide)

            query, *shared = gradients
            places = (known.position, known.row_runs, logarithm)
            parts = (given.query, *places, against, change)
            shared, rows = jax.lax.scan(block, tuple(shared), parts)
            return (query + rows, *shared)

        everything = (own[0], *gradient, *own[1:])
        query, key, value, *rest = _unless_future(
            turn, source, index, visit, everything
        )
        return (query, *rest), (keys, (key, value))

    def step(carry: tuple, distance: Array) -> tuple[tuple, None]:
        own, moving = carry
        own, moving = meet(own, moving, (index - distance) % count)
        return (own, pass_on(moving, turn.axis_name)), None

    keys = (given.key, given.value)
    start = (zeros((given.query, given.scale, given.bias)), (keys, zeros(keys)))
    (own, moving), _ = jax.lax.scan(step, start, jnp.arange(count - 1))
    own, (_, gradient) = meet(own, moving, (index + 1) % count)
    key, value = pass_on(gradient, turn.axis_name)  # home
    found = Given(own[0], key, value, own[1], own[2])
    return jax.tree.map(lambda x, like: x.astype(like.dtype), found, given), None


_ring.defvjp(_forward, _backward)


def _place(turn: Turn) -> tuple[int, Array]:
    """How many devices there are, and which one this is."""
    name = turn.axis_name
    return jax.lax.axis_size(name), jax.lax.axis_index(name)


def _unless_future(turn: Turn, source: Array, index: Array, visit, start):
    """visit(start), or `start` where causal rows cannot see the device `source`."""
    if not turn.rule.is_causal:
        return visit(start)
    return jax.lax.cond(source <= index, visit, lambda start: start, start)


def _scores(turn: Turn, given: Given, known: Known, source: Array) -> Array:
    """A block of rows against the keys of one device; −∞ where they do not see."""
    length = given.key.shape[2]
    first = source * length
    keys = first + jnp.arange(length)
    operands = Operands(
        given.query,
        given.key,
        given.value,
        _own(given.bias, first, length),
        _own(known.mask, first, length),
        None,
        known.row_runs,
        _own(known.runs, first, length),
        given.scale,
        None,
    )
    scores, visible = scored(turn.rule, operands, known.position, keys)
    if turn.mask_self:
        row = known.position[:, None]
        others = (row != keys[None]) | (turn.rule.is_causal & (row == 0))
        others = others[None, None]
        visible = others if visible is None else visible & others
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def _absorb(turn: Turn, given: Given, known: Known, source: Array, sums: Sums) -> Sums:
    """What rows have met after the keys of one more device."""
    scores = _scores(turn, given, known, source)
    highest = jnp.maximum(sums.highest, scores.max(axis=-1))
    faded = jnp.exp(sums.highest - _finite(highest))
    total, values = _weighed(given, jnp.exp(scores - _finite(highest)[..., None]))
    return Sums(
        highest, sums.total * faded + total, sums.values * faded[..., None] + values
    )


def _weighed(given: Given, weights: Array) -> tuple[Array, Array]:
    """The sum of a row's weights, and of the values by these weights."""
    batch, kv_heads, _, size = given.value.shape
    values = jnp.einsum(
        "bkgts,bksv->bkgtv",
        weights.reshape(batch, kv_heads, -1, *weights.shape[2:]).astype(
            given.value.dtype
        ),
        given.value,
        preferred_element_type=weights.dtype,
    )
    return weights.sum(axis=-1), values.reshape(*weights.shape[:3], size)


def _finite(highest: Array) -> Array:
    """A maximum to subtract: 0 where no key was seen, since −∞ − (−∞) is NaN."""
    return jnp.where(jnp.isneginf(highest), 0, highest)


def _own(pairs: Array | None, first: Array, length: int) -> Array | None:
    """The keys of one device out of [… #S]."""
    if pairs is None or pairs.shape[-1] == 1:
        return pairs
    return jax.lax.dynamic_slice_in_dim(pairs, first, length, axis=-1)


def _check(
    arrays: tuple,
    segment_ids: Array | None,
    length_base: float | None,
    mask_self: bool,
    count: int,
    differential: bool,
) -> None:
    """Refuse what does not fit, and what a ring cannot know."""
    query, key, value, bias, mask = arrays
    check_shapes(query, key, value, None, None, segment_ids, False)
    if not differential and key.shape[2] != value.shape[2]:
        raise ValueError(
            f"key and value must agree in heads, got {key.shape} and {value.shape}"
        )
    keys = (query.shape[0], query.shape[2], 1, count * key.shape[1])
    for name, pairs in (("bias", bias), ("mask", mask)):
        if pairs is not None and not (
            pairs.ndim == 4
            and all(x in (1, y) for x, y in zip(pairs.shape, keys, strict=True))
        ):
            raise ValueError(
                f"implementation 'ring': a {name} must be the same for all rows, "
                f"broadcast to {keys}, got {pairs.shape}"
            )
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True = attend), got {mask.dtype}")
    for name, option in (("length_base", length_base), ("mask_self", mask_self)):
        for other, given in (("a mask", mask), ("segment_ids", segment_ids)):
            if option and given is not None:
                raise ValueError(
                    f"implementation 'ring' with {other} cannot count the keys that a "
                    f"row sees, as {name} {option} needs: choose 'rows'"
                )
