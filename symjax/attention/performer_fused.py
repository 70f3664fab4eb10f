"""Causal Performer and linear attention on TPU kernels: what they serve, and when.

They serve `performer_causal` with features that are powers of e, and `linear_causal`
with features that are never negative, a few by name, without a state given or wanted,
for 128 tokens or more on one TPU. What runs is decided where the program is lowered:
the kernels for a TPU, a scan over chunks for any other machine.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.checks import check
from symjax.attention.chunks import Tokens, attend_causal
from symjax.attention.features import RandomFeatures
from symjax.attention.kernels import performer as kernels
from symjax.attention.kernels.blocks import LANES, LOG2E
from symjax.attention.kernels.performer import EMPTY, Operands, Plan
from symjax.attention.masks import only_seen, segment_runs, starts, visible_keys
from symjax.attention.meshes import backend, on_any_mesh, on_one_device
from symjax.attention.normalised import Normalised

RANDOM = "favor#", "favor++", "hyperbolic", "positive"
PLAIN = "elu", "relu", "relu2"
LARGEST_HEAD = 256
MOST_FEATURES = 1024


class Choice(NamedTuple):
    """The static half of a call."""

    who: str
    features: Any  # by name
    recurrence: Normalised
    chunk_size: int
    block: int = LANES
    interpret: Any = False

    def scan(
        self, tokens: Tokens, random: RandomFeatures | None
    ) -> Float[Array, "B T N V"]:
        """Without kernels: for other machines, and for gradients of projections."""
        return attend_causal(
            self.who,
            self.recurrence,
            *tokens[:3],
            tokens.mask,
            parameters=random,
            chunk_size=self.chunk_size,
            segment_ids=tokens.segment_ids,
        )


def attend_causal_or_fused(
    choice: Choice,
    tokens: Tokens,
    random: RandomFeatures | None = None,
    *,
    state: Any = None,
    return_state: bool = False,
    axis_name: str | None = None,
) -> Any:
    """`attend_causal` of these tokens, by the kernels where they serve.

    Raises:
        ValueError: as `attend_causal`.
    """
    query, key, value, _, mask, segment_ids = tokens
    whole = state is None and not return_state and axis_name is None
    if whole and backend() == "tpu":
        check(choice.who, query, key, value, mask, segment_ids, causal=True)
        if served(choice.features, tokens, random):
            return _by_platform(choice, tokens, random)[0]
    return attend_causal(
        choice.who,
        choice.recurrence,
        query,
        key,
        value,
        mask,
        parameters=random,
        chunk_size=choice.chunk_size,
        state=state,
        return_state=return_state,
        segment_ids=segment_ids,
        axis_name=axis_name,
    )


def served(features: Any, tokens: Tokens, random: RandomFeatures | None) -> bool:
    """Whether the kernels may run, on a TPU."""
    return (
        features in (PLAIN if random is None else RANDOM)
        and _dtype(tokens) in (jnp.bfloat16, jnp.float32)
        and tokens.query.shape[1] >= LANES
        and max(tokens.key.shape[3], tokens.value.shape[3]) <= LARGEST_HEAD
        and (random is None or _count(features, random) <= MOST_FEATURES)
        and backend() == "tpu"
        and on_one_device()
    )


@on_any_mesh(1)
def _by_platform(
    choice: Choice, tokens: Tokens, random: RandomFeatures | None
) -> tuple[Float[Array, "B T N V"], tuple]:
    output = jax.lax.platform_dependent(
        tokens, random, tpu=partial(attend, choice), default=choice.scan
    )
    return output, ()


def attend(
    choice: Choice, tokens: Tokens, random: RandomFeatures | None
) -> Float[Array, "B T N V"]:
    """`performer_causal` or `linear_causal` by the kernels."""
    query, key, value, _, mask, segment_ids = tokens
    query, key, value = (x.astype(_dtype(tokens)) for x in (query, key, value))
    visible = segment = None
    if mask is not None:
        visible = visible_keys(mask, *key.shape[:2])
        key, value = only_seen(visible, key, value)
    if random is None:
        maps = choice.recurrence.features
        query = maps.query(query.astype(jnp.float32), None).amplitude
        key = maps.key(key.astype(jnp.float32), None).amplitude
        if visible is not None:
            (key,) = only_seen(visible, key)
    if segment_ids is not None:
        segment = segment_runs(segment_ids)
    output: Array = _attend(choice, query, key, value, random, visible, segment)
    return output.astype(tokens.value.dtype)


def _count(features: str, random: RandomFeatures) -> int:
    """Hyperbolic features come with both signs."""
    return random.rows.shape[0] * (1 + (features == "hyperbolic"))


def _dtype(tokens: Tokens) -> Any:
    return jnp.result_type(tokens.query, tokens.key, tokens.value)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    choice: Choice,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    random: RandomFeatures | None,
    visible: Bool[Array, "B T"] | None,
    segment: Int[Array, "B T"] | None,
) -> Float[Array, "B T N V"]:
    plan, operands = _operands(choice, query, key, value, random, visible, segment)
    output, *_ = kernels.forward(plan, operands, keep=False)
    return _output(plan, output, value).astype(value.dtype)


def _forward(choice: Choice, *given: Any) -> tuple[Array, tuple]:
    values = jax.tree.map(lambda x: x.value, given, is_leaf=_is_primal)
    learned = [x.perturbed for x in jax.tree.leaves(given[3], is_leaf=_is_primal)]
    plan, operands = _operands(choice, *values)
    output, *kept = kernels.forward(plan, operands, keep=True)
    saved = values, operands, output, kept, () if any(learned) else None
    return _output(plan, output, values[2]).astype(values[2].dtype), saved


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(choice: Choice, saved: tuple, change: Array) -> tuple:
    given, operands, output, kept, learned = saved
    query, key, value, random, visible, segment = given
    plan = _plan(choice, query, value, random)
    wide = _side_by_side(plan, change, plan.value_size)
    found = kernels.backward(plan, operands, wide, output, kept)
    gradients = []
    for x, like in zip(found, (query, key, value), strict=True):
        x = _output(plan, x, like)  # key heads are summed over their query heads
        x = x.reshape(*like.shape[:3], -1, like.shape[3]).sum(axis=3)
        gradients.append(x.astype(like.dtype))
    of_random = jax.tree.map(jnp.zeros_like, random)
    if learned is not None:
        mask = None if visible is None else visible[:, None, None]
        again = Tokens(query, key, value, (), mask, segment)
        of_random = jax.vjp(partial(choice.scan, again), random)[1](change)[0]
    return *gradients, of_random, None, None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _plan(
    choice: Choice, query: Array, value: Array, random: RandomFeatures | None
) -> Plan:
    batch, length, heads, size = query.shape
    packed = LANES // size
    fits = size == value.shape[3] and packed * size == LANES and heads % packed == 0
    packed = packed if fits else 1
    head_size = size if packed > 1 else _even(size, LANES)
    features = LANES if packed > 1 else head_size
    if random is not None:
        features = _even(_count(choice.features, random), LANES)
    return Plan(
        batch,
        heads,
        heads // value.shape[2],
        packed,
        _even(length, choice.block),
        head_size,
        size if packed > 1 else _even(value.shape[3], LANES),
        features,
        random is None,
        choice.block,
        choice.interpret,
    )


def _even(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _operands(
    choice: Choice,
    query: Array,
    key: Array,
    value: Array,
    random: RandomFeatures | None,
    visible: Array | None,
    segment: Array | None,
) -> tuple[Plan, Operands]:
    plan = _plan(choice, query, value, random)
    rows = offset = norm = flags = None
    if random is not None:
        rows, offset = _projection(choice, plan, random, query.dtype)
        norm = (0.5 * LOG2E * random.scale.astype(jnp.float32)).reshape(1)
    missing = plan.length - query.shape[1]
    if missing or visible is not None or segment is not None:
        visible = jnp.ones(query.shape[:2], bool) if visible is None else visible
        visible = jnp.pad(visible, ((0, 0), (0, missing)))
        if segment is not None:
            segment = jnp.pad(segment, ((0, 0), (0, missing)), mode="edge")
        flags = _flags(plan, visible, segment)[:, None]
        segment = None if segment is None else segment[:, None]
    return plan, Operands(
        _side_by_side(plan, query, plan.head_size),
        _side_by_side(plan, key, plan.head_size),
        _side_by_side(plan, value, plan.value_size),
        rows,
        offset,
        norm,
        flags,
        segment,
    )


def _projection(
    choice: Choice, plan: Plan, random: RandomFeatures, dtype: Any
) -> tuple[Float[Array, "parts M H"], Float[Array, "1 M"]]:
    """Rows and offsets of packed heads; bfloat16 rows in two parts."""
    rows = random.rows.astype(jnp.float32)
    rows = rows * (LOG2E * jnp.sqrt(random.scale.astype(jnp.float32)))
    if choice.features == "hyperbolic":
        rows = jnp.concatenate([rows, -rows])
    offset = jnp.zeros(rows.shape[0]) if random.offset is None else random.offset
    offset = offset.astype(jnp.float32) * LOG2E
    count, size = rows.shape
    rows = jnp.pad(rows, ((0, plan.features - count), (0, plan.head_size - size)))
    offset = jnp.pad(offset, (0, plan.features - count), constant_values=EMPTY)
    rows = jnp.kron(jnp.eye(plan.packed), rows)
    parts = [rows]
    if dtype == jnp.bfloat16:
        high = jax.lax.reduce_precision(rows, 8, 7)
        parts = [high, rows - high]
    return jnp.stack(parts).astype(dtype), jnp.tile(offset, plan.packed)[None]


def _side_by_side(plan: Plan, x: Float[Array, "B T N h"], size: int) -> Array:
    """Heads in lanes, one for each query head, and time filled up."""
    x = jnp.repeat(x, plan.heads // x.shape[2], axis=2)
    missing = plan.length - x.shape[1], size - x.shape[3]
    x = jnp.pad(x, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1])))
    return x.reshape(*x.shape[:2], -1)


def _output(plan: Plan, x: Array, like: Array) -> Array:
    """The inverse, of such a size, in the dtype of the kernel's result."""
    x = x.reshape(*x.shape[:2], plan.heads, -1)
    return x[:, : like.shape[1], :, : like.shape[3]]


def _flags(
    plan: Plan, visible: Bool[Array, "B T"], segment: Int[Array, "B T"] | None
) -> Int[Array, "B T"]:
    seen = jnp.cumsum(visible, axis=1)
    if segment is None:
        return visible * kernels.VISIBLE + (seen > 0) * kernels.SEES
    before = jnp.where(starts(segment), seen - visible, 0)  # the segment's first token
    sees = seen > jax.lax.cummax(before, axis=1)
    chunks = segment.reshape(segment.shape[0], -1, plan.block)
    last = chunks[..., -1:]
    first = jnp.concatenate([chunks[:, :1, :1], last[:, :-1]], axis=1)
    of_state = kernels.REACHES * (chunks == first) + kernels.JOINS * (chunks == last)
    of_state += kernels.KEEPS * (first == last)
    flags = visible * kernels.VISIBLE + sees * kernels.SEES
    return flags + of_state.reshape(flags.shape)
