"""Laws that every mechanism that scores pairs obeys.

Each law is a function of a `Scored`: a mechanism as a function of arrays, and its
definition. LAWS says which mechanisms are tested by which law.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import permutations, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import SEGMENTS, B, H, K, N, S, T, V, close, same

from symjax import attention
from symjax.attention.core.devices import lowered_for
from symjax.attention.scores import rows

LAMBDA = np.array([0.8, -0.3, 1.7, 0.0, 0.5, -2.0])
ALL_ROWS = {"is_causal": True, "mask_self": True, "length_base": 5.0}


class Scored(NamedTuple):
    """A mechanism, its definition, and the shapes of its arrays.

    The definition takes the same arrays and `pairs` [B N T S], the visible pairs.
    """

    attend: Callable
    definition: Callable
    shapes: Callable  # (T, S) → the shapes of the arrays; the first is the query
    keys: int  # arrays[:keys] have a time axis of queries or keys; the rest are weights
    rounding: float = 2**-8  # error in bfloat16, relative to the largest value

    def arrays(self, length=T, keys=None, *, seed=0):
        rng = np.random.default_rng(seed)
        shapes = self.shapes(length, length if keys is None else keys)
        arrays = tuple(rng.normal(size=shape) for shape in shapes)
        return (*arrays[:-1], LAMBDA) if arrays[-1].shape == (N,) else arrays

    def oracle(self, *arrays, module=np, **options):
        names = ("is_causal", "window", "mask", "mask_self", "segment_ids")
        seen = {name: options.pop(name) for name in names if name in options}
        value = arrays[2] if self.crosses else arrays[1]
        lengths = arrays[0].shape[1], value.shape[1]
        if self.keys == 4:  # gates of keys that the mask hides from all rows are 0
            mask = np.broadcast_to(seen.get("mask", True), (B, N, *lengths))
            options["seen"] = mask.any(axis=(1, 2))
        pairs = oracles.visible(B, N, *lengths, **seen)
        return self.definition(*arrays, pairs, module=module, **options)

    @property
    def crosses(self):
        """Keys are an argument, so there may be more of them than queries."""
        return self.keys >= 3


def _symmetric(query, value, metric, **options):
    return attention.symmetric(query, value, metric=metric, **options)


def _without_row_weights(*arrays, **options):
    """Softmax without row weights, so that differential attention calls it twice."""
    return attention.softmax(*arrays, **options)


def _pairs(length, keys):
    return (B, length, N, H), (B, keys, K, H), (B, keys, K, V)


def _branches(length, keys):
    return (B, length, 2 * N, H), (B, keys, 2 * K, H), (B, keys, K, V), (N,)


def _groups(length, keys):
    """Return shapes for N noise heads, each shared by two signal heads.

    Masks and biases have one entry per noise head.
    """
    kept = (B, keys, 2 * K, H), (B, keys, K, V)
    return (B, length, 3 * N, H), *kept, (2 * N,)


def _groups_of_keys(length, keys):
    """Return shapes as `_groups`, with a key per signal head and N noise keys."""
    kept = (B, keys, 3 * N, H), (B, keys, 2 * N, V)
    return (B, length, 3 * N, H), *kept, (2 * N,)


def _pairs_of_queries(length, keys):
    lam = (B, length, N)
    return (B, length, 2 * N, H), (B, keys, K, H), (B, keys, K, V), lam


def _gated(length, keys):
    return *_pairs(length, keys), (B, keys, K, 1)


def _gated_branches(length, keys):
    query, key, value, lam = _branches(length, keys)
    return query, key, value, (B, keys, 2 * K, 1), lam


def _with_sinks(length, keys):
    return *_pairs(length, keys), (N,)


def _at_a_distance(length, keys):
    return _pairs(length, keys)


def _by_distance(*arrays, length_base=None, **options):
    """Leave out `length_base`, since a call takes only one law of length."""
    return attention.softmax(*arrays, length_scale="distance", **options)


def _with_slopes(length, keys):
    return *_pairs(length, keys), (B, length, N), (B, length, N)


def _adaptive(query, key, value, slope, power, *, length_base=None, **options):
    law = slope, power
    return attention.entmax15(query, key, value, length_scale=law, **options)


def forgetting(query, key, value, logits, *, attend=attention.softmax, **options):
    log_decay = jax.nn.log_sigmoid(logits[..., 0])
    return attend(query, key, value, log_decay=log_decay, **options)


def _forgetting_twice(query, key, value, logits, lam, **options):
    attend = partial(attention.differential, lam=lam)
    return forgetting(query, key, value, logits, attend=attend, **options)


def _with_sink(query, key, value, sink, *, attend=attention.softmax, **options):
    return attend(query, key, value, sink=sink, **options)


def _tied(length, _):
    return (B, length, N, H), (B, length, N, V), (N, H, H)


def _symmetric_of(normalise):
    return Scored(
        partial(_symmetric, normalise=normalise),
        partial(oracles.symmetric, normalise=normalise),
        _tied,
        2,
        2**-5,  # the key is rounded before scores are computed
    )


SOFTMAX = Scored(attention.softmax, oracles.softmax, _pairs, 3)
DIFFERENTIAL = Scored(attention.differential, oracles.differential, _branches, 3)
OUTPUTS = DIFFERENTIAL._replace(
    attend=partial(attention.differential, attend=_without_row_weights),
    rounding=2**-7,  # the outputs of both branches are rounded, then subtracted
)
GROUPED = DIFFERENTIAL._replace(
    attend=partial(attention.differential, signals=2),
    definition=partial(oracles.differential, signals=2),
    shapes=_groups,
)
SPARSE = Scored(attention.sparsemax, oracles.sparsemax, _pairs, 3)
FORGETTING = Scored(forgetting, oracles.forgetting, _gated, 4)
SINK = Scored(_with_sink, oracles.with_sink, _with_sinks, 3)
DEFINITIONS = {
    "softmax": SOFTMAX,
    "sparsemax": SPARSE,
    "entmax15": SPARSE._replace(attend=attention.entmax15, definition=oracles.entmax15),
    "softpick": SPARSE._replace(attend=attention.softpick, definition=oracles.softpick),
    "pairwise": _symmetric_of(None),
    "unit": _symmetric_of("unit"),
    "rms": _symmetric_of("rms"),
    "differential": DIFFERENTIAL,
    "differential_outputs": OUTPUTS,
    "grouped": GROUPED,
    "grouped_keys": GROUPED._replace(shapes=_groups_of_keys),
    "grouped_outputs": GROUPED._replace(
        attend=partial(OUTPUTS.attend, signals=2), shapes=_groups_of_keys
    ),
    "differential_v2": Scored(
        attention.differential_v2, oracles.differential_v2, _pairs_of_queries, 3
    ),
    "forgetting": FORGETTING,
    "forgetting_twice": Scored(
        _forgetting_twice, oracles.forgetting_twice, _gated_branches, 4
    ),
    "by_distance": Scored(_by_distance, oracles.by_distance, _at_a_distance, 3),
    "adaptive_entmax15": Scored(_adaptive, oracles.adaptive_entmax15, _with_slopes, 3),
    "sink": SINK,
    "sink_of_entmax15": SINK._replace(
        attend=partial(_with_sink, attend=attention.entmax15),
        definition=partial(oracles.with_sink, weights=oracles.entmax15_weights),
    ),
}


@contextmanager
def blocks(size, extents=8, *, batched=False):
    """Set the size of row blocks. `batched`: all examples in one block, as on TPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_ROWS", size)
        patch.setattr(rows, "EXTENTS", extents)
        patch.setattr(rows, "FEW_KEYS", 0)
        with lowered_for("tpu") if batched else nullcontext():
            yield


def single(arrays):
    return tuple(np.asarray(x, np.float32) for x in arrays)


def every_option(length=T, keys=None, seed=3):
    """Return options with a mask and a bias per head; some rows see no key."""
    keys = length if keys is None else keys
    rng = np.random.default_rng(seed)
    mask = rng.random((B, N, length, keys)) < 0.6
    mask[0, 1, 4 % length] = mask[1, :, 7 % length] = mask[1, 2] = False
    bias = rng.normal(size=(1, N, length, keys))
    return {"mask": mask, "bias": bias, **ALL_ROWS}


def jitted(form, **options):
    return jax.jit(partial(form, **options))


def grading(form, count, **options):
    """Return arrays → (output, gradients of its product with a fixed random array)."""

    def loss(*arrays):
        output = form(*arrays, **options)
        weigh = np.random.default_rng(1).normal(size=output.shape)
        return (output * weigh.astype(output.dtype)).sum(), output

    graded = jitted(jax.grad(loss, tuple(range(count)), has_aux=True))
    return lambda *arrays: graded(*arrays)[::-1]


def graded(form, *arrays, **options):
    return grading(form, len(arrays), **options)(*arrays)


def every_close(actual, wanted, tolerance):
    for one, other in zip(actual, wanted, strict=True):
        close(one, other, tolerance)


def it_equals_its_definition(scored):
    """In several blocks, in float64 and in float32."""
    arrays = scored.arrays()
    packed = {"segment_ids": SEGMENTS, "mask_self": True}
    cases = {"is_causal": True, "scale": 0.7}, packed, every_option()
    wanted = [scored.oracle(*arrays, **options) for options in cases]

    def outputs(*arrays):
        return [scored.attend(*arrays, **options) for options in cases]

    with blocks(7, 2):
        every_close(jitted(outputs)(*single(arrays)), wanted, 1e-5)
        with jax.enable_x64(True):
            every_close(jitted(outputs)(*arrays), wanted, 1e-13)


def gradients_equal_those_of_the_definition(scored):
    arrays = scored.arrays()
    options = every_option() | {"segment_ids": SEGMENTS}
    with jax.enable_x64(True), blocks(7, 2):
        _, gradients = graded(scored.attend, *arrays, **options)
        _, wanted = graded(scored.oracle, *arrays, module=jnp, **options)
    every_close(gradients, wanted, 1e-12)


def every_block_size_gives_the_whole(scored):
    """Blocks of one row, a ragged last block, padded inner loops, one large block."""
    sizes = (1, 2), (3, 3), (2, 2), (7, 8), (10, 1), (T, 8), (64, 8)
    arrays, options = scored.arrays(), every_option()
    with jax.enable_x64(True):
        whole = scored.attend(*arrays, implementation="whole", **options)
        close(whole, scored.oracle(*arrays, **options), 1e-13)
        for size, extents in sizes:
            with blocks(size, extents, batched=size in (2, 7)):
                close(jitted(scored.attend, **options)(*arrays), whole, 1e-13)


def queries_and_keys_may_differ_in_number(scored):
    """Causal queries end at the last key. Otherwise there may also be fewer keys."""
    cases = (T, S, {"is_causal": True}), (T, 11, {}), (1, S, {"is_causal": True})
    for length, keys, options in cases:
        arrays = scored.arrays(length, keys)
        options = every_option(length, keys) | {"is_causal": False} | options
        with jax.enable_x64(True), blocks(5, 2):
            output = jitted(scored.attend, **options)(*arrays)
        close(output, scored.oracle(*arrays, **options), 1e-13)


def a_mask_or_bias_may_have_any_broadcastable_shape(scored):
    rng, full = np.random.default_rng(2), np.array([B, N, T, T])
    cases = [
        {
            "mask": rng.random(np.where(whole, full, 1)) < 0.7,
            "bias": rng.normal(size=np.where(whole, 1, full)),
            "length_base": 3.0,
        }
        for whole in product((False, True), repeat=4)
    ]
    arrays = scored.arrays()
    wanted = [scored.oracle(*arrays, **options) for options in cases]

    def outputs(*arrays):
        return [scored.attend(*arrays, **options) for options in cases]

    with jax.enable_x64(True), blocks(10):
        every_close(jitted(outputs)(*arrays), wanted, 1e-13)


def a_decoded_row_is_a_row_of_the_whole(scored):
    """One query with the keys up to its token, with log-n scaling by their number."""
    options = {"is_causal": True, "mask_self": True, "length_base": 3.0}
    with jax.enable_x64(True):
        arrays = scored.arrays(S)
        form = jitted(scored.attend, **options)
        whole = form(*arrays)
        query, *of_keys = arrays[: scored.keys]
        for t in (0, 15, 16):
            read = [x[:, : t + 1] for x in of_keys]
            now = query[:, t : t + 1], *read, *arrays[scored.keys :]
            close(form(*now), whole[:, t : t + 1], 1e-13)


def the_future_changes_nothing(scored):
    """Outputs are bitwise equal, and later tokens get no gradient."""
    arrays = single(scored.arrays())
    weights = arrays[scored.keys :]
    other = [
        np.concatenate([x[:, :10], -3 * x[:, 10:]], 1) for x in arrays[: scored.keys]
    ]

    def early(*arrays):
        output = scored.attend(*arrays, is_causal=True, length_base=3.0)
        return jnp.where(np.arange(T)[None, :, None, None] < 10, output, 0)

    with blocks(7, 2):
        form = jitted(scored.attend, is_causal=True, length_base=3.0)
        one, two = form(*arrays), form(*other, *weights)
        _, gradients = graded(early, *arrays)
    same(one[:, :10], two[:, :10])
    assert np.abs(one[:, 10:] - two[:, 10:]).max() > 0.1
    for part in gradients[: scored.keys]:
        assert part[:, :10].any() and not part[:, 10:].any()


def hidden_keys_change_nothing(scored):
    """Hidden keys may be large. They get no gradient, and the output is as if they were
    absent."""
    arrays = single(scored.arrays())
    examples, weights = arrays[: scored.keys], arrays[scored.keys :]
    first = 1 if scored.crosses else 0
    hidden = np.zeros((B, T), bool)
    hidden[0, [0, 3, 18]] = hidden[1, 4:9] = True
    large = [np.where(hidden[..., None, None], 1e4 * x, x) for x in examples[first:]]
    changed = hidden & (not scored.crosses)  # rows whose query is a hidden key

    def answers(*arrays):
        mask = ~hidden[:, None, None]
        output = scored.attend(*arrays, mask=mask, length_base=3.0)
        return jnp.where(changed[..., None, None], 0, output)

    with blocks(7):
        grade = grading(answers, len(arrays))
        output, _ = grade(*arrays)
        other, gradients = grade(*examples[:first], *large, *weights)
        same(output, other)
        for part in gradients[first : scored.keys]:
            assert part[~hidden].any() and not part[hidden].any()
        left = np.flatnonzero(~hidden[0])
        # Decays depend on positions, so that the rows of hidden keys are absent too.
        rows = np.arange(T) if scored.keys == 3 else left
        fewer = [x[:1, rows] for x in examples[:first]]
        fewer += [x[:1, left] for x in examples[first:]]
        absent = scored.attend(*fewer, *weights, length_base=3.0)
    close(output[:1, rows], absent, 1e-5)


def a_row_without_keys_is_zero(scored):
    """Its gradients are finite, with every option."""
    arrays = single(scored.arrays())
    mask = np.ones((B, 1, T, T), bool)
    mask[0], mask[1, :, :9] = False, False
    options = {"mask": mask, "bias": np.ones((1, 1, 1, T), np.float32), **ALL_ROWS}
    with blocks(7, 2):
        output, gradients = graded(scored.attend, *arrays, **options)
    same(output[0], np.zeros((T, N, V)))
    same(output[1, :9], np.zeros((9, N, V)))
    assert np.abs(output[1, 9:]).max(axis=(1, 2)).min() > 0
    for part in gradients:
        assert np.isfinite(part).all() and np.abs(part).max() > 0
    for part in gradients[: scored.keys]:
        assert not part[0].any()


def a_lonely_token_sees_itself(scored):
    """In segments of two tokens each sees the other; the last token is alone."""
    arrays = single(scored.arrays())
    segments = np.arange(T)[None].repeat(B, axis=0) // 2
    other = np.append(np.arange(T - 1) ^ 1, T - 1)
    with blocks(7):
        output = jitted(scored.attend, mask_self=True, segment_ids=segments)(*arrays)
    chosen = np.eye(T, dtype=bool)[other][None, None]
    close(output, scored.oracle(*arrays, mask=chosen), 1e-6)


def the_rest_of_the_batch_changes_nothing(scored):
    arrays = single(scored.arrays())
    other = [np.stack([x[0], x[1] * 30]) for x in arrays[: scored.keys]]
    for batched in (False, True):
        with blocks(7, 2, batched=batched):
            form = jitted(scored.attend, is_causal=True)
            one, two = form(*arrays), form(*other, *arrays[scored.keys :])
        same(one[0], two[0])
        assert np.abs(one[1] - two[1]).max() > 1


def bfloat16_is_as_good_as_its_rounding(scored):
    """Scores, sums and λ are float32; weights, values and the output are rounded."""
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in scored.arrays()]
    with blocks(10):
        form = jitted(scored.attend, is_causal=True)
        output = form(*rounded)
        wanted = np.asarray(form(*(x.astype(jnp.float32) for x in rounded)))
    assert output.dtype == jnp.bfloat16
    error = np.abs(np.asarray(output, np.float32) - wanted)
    assert error.max() <= scored.rounding * np.abs(wanted).max()


def the_result_has_the_dtype_of_the_values(scored):
    with jax.enable_x64(True):
        for dtypes in permutations((jnp.bfloat16, jnp.float32, jnp.float64)):
            arrays = zip(scored.arrays(), (*dtypes, jnp.float32), strict=False)
            arrays = [jnp.asarray(x, dtype) for x, dtype in arrays]
            assert jax.eval_shape(scored.attend, *arrays).dtype == dtypes[2]
            wanted = scored.oracle(*(np.asarray(x, np.float64) for x in arrays))
            close(jitted(scored.attend)(*arrays), wanted, scored.rounding)


def vmap_and_checkpoint_change_nothing(scored):
    arrays = scored.arrays()

    def mapped(*arrays):
        def one(*example):
            whole = *(x[None] for x in example), *arrays[scored.keys :]
            return scored.attend(*whole, is_causal=True)[0]

        return jax.vmap(jax.checkpoint(one))(*arrays[: scored.keys])

    with jax.enable_x64(True), blocks(7, 2):
        output, gradients = graded(mapped, *arrays)
        wanted = graded(scored.oracle, *arrays, is_causal=True, module=jnp)
    every_close((output, *gradients), (wanted[0], *wanted[1]), 1e-12)


MECHANISMS = [name for name, scored in DEFINITIONS.items() if scored.shapes is _pairs]
ADJUSTED = "forgetting", "sink"
LENGTHS = "by_distance", "adaptive_entmax15"
KINDS = *MECHANISMS, "pairwise", "differential", *ADJUSTED
KEYED = *MECHANISMS, "differential", "differential_outputs", *ADJUSTED
ENGINE = *MECHANISMS, "differential", *ADJUSTED
LAWS = {
    it_equals_its_definition: DEFINITIONS,
    gradients_equal_those_of_the_definition: DEFINITIONS,
    every_block_size_gives_the_whole: (*ENGINE, "grouped", *LENGTHS),
    queries_and_keys_may_differ_in_number: (*KEYED, *LENGTHS),
    a_mask_or_bias_may_have_any_broadcastable_shape: KEYED,
    a_decoded_row_is_a_row_of_the_whole: (*ENGINE, "grouped", "by_distance"),
    the_future_changes_nothing: KINDS,
    hidden_keys_change_nothing: KINDS,
    a_row_without_keys_is_zero: KINDS,
    a_lonely_token_sees_itself: ENGINE,
    the_rest_of_the_batch_changes_nothing: ENGINE,
    bfloat16_is_as_good_as_its_rounding: KINDS,
    the_result_has_the_dtype_of_the_values: KEYED,
    vmap_and_checkpoint_change_nothing: ENGINE,
}
