"""Laws that every mechanism of linear time obeys.

A law in LAWS is a function of a `Mechanism`: the forms of a mechanism, and its
definition by pairs. Test files run all of LAWS on their mechanisms, or CAUSAL_LAWS on
mechanisms that have only a causal form.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from symjax.attention.core.devices import lowered_for

B, T, S, N, K, H, V = 2, 19, 23, 6, 3, 5, 7
CHUNK = 8  # does not divide T, and T needs three of them
# Segments start inside a chunk, at the first token of a chunk, and after one token.
SEGMENTS = np.array([[0] * 6 + [1] * 7 + [0] * 6, [4] * 8 + [2, 3] + [1] * 9])


class Mechanism(NamedTuple):
    """The forms of a mechanism, and the weights of all pairs by definition.

    `products` returns (log |w|, sign of w) of all pairs of queries and keys.
    """

    whole: Callable
    causal: Callable  # in chunks of CHUNK tokens unless chunk_size is given
    step: Callable
    state: Callable
    products: Callable

    @classmethod
    def of(cls, forms, products, projection=None, **options):
        """Bind options and a projection to the forms (whole, causal, step, state)."""
        whole, causal, step, state = (partial(form, **options) for form in forms)
        causal = partial(causal, chunk_size=CHUNK)
        if projection is None:
            return cls(whole, causal, step, state, products)

        def with_mask(form):
            return lambda query, key, value, mask=None, **more: form(
                query, key, value, projection, mask, **more
            )

        return cls(
            with_mask(whole),
            with_mask(causal),
            lambda past, *now: step(past, *now, projection),
            lambda *sizes, **more: state(*sizes, projection, **more),
            products,
        )

    @property
    def both(self):
        return self.whole, self.causal

    def oracle(self, query, key, value, *, module=np, **seen):
        """Attention by definition, pair by pair."""
        pairs = oracles.seen(*query.shape[:2], key.shape[1], **seen)
        logarithms, signs = self.products(query, key, module=module)
        return oracles.weighted_mean(logarithms, signs, value, pairs, module)


def inputs(length=T, keys=None, *, heads=N, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = (B, length, heads, H), (B, keys, K, H), (B, keys, K, V)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def hiding(keys, seed=5):
    """Return a mask that hides some keys, in one example the first and the last."""
    mask = np.random.default_rng(seed).random((B, 1, 1, keys)) < 0.7
    mask[0, 0, 0, [0, 1, -1]] = False
    return mask


def close(actual, wanted, tolerance):
    """Assert that every error is at most tolerance × the largest wanted value."""
    assert actual.shape == wanted.shape
    wanted = np.asarray(wanted, np.float64)
    limit = tolerance * np.abs(wanted).max()
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, 0, limit)


def same(actual, wanted):
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))


@cache
def _gradient(form):
    def loss(weigh, mask, *arrays):
        return (form(*arrays, mask=mask) * weigh).sum()

    return jax.jit(jax.grad(loss, (2, 3, 4)))


def gradient(form, query, key, value, mask=None, rows=slice(None)):
    """Return the gradients of a random sum of some output rows: query, key, value."""
    weigh = np.random.default_rng(1).normal(size=(*query.shape[:3], value.shape[-1]))
    some = np.zeros_like(weigh)
    some[:, rows] = weigh[:, rows]
    parts = _gradient(form)(some.astype(value.dtype), mask, query, key, value)
    return [np.asarray(part) for part in parts]


def run(form, *arrays, **options):
    """Return the output as a NumPy array: its slices compile nothing."""
    return np.asarray(form(*arrays, **options))


def stepwise(mechanism, query, key, value, state):
    outputs = []
    for t in range(query.shape[1]):
        now = (x[:, t : t + 1] for x in (query, key, value))
        output, state = mechanism.step(state, *now)
        outputs.append(np.asarray(output))
    return np.concatenate(outputs, axis=1), state


def it_equals_its_definition(mechanism):
    """The whole form and the causal form, each without and with hidden keys."""
    arrays, mask = inputs(), hiding(T)
    for form, causal in zip(mechanism.both, (False, True), strict=True):
        wanted = mechanism.oracle(*arrays, causal=causal)
        close(run(form, *_single(arrays)), wanted, 3e-6)
        wanted = mechanism.oracle(*arrays, causal=causal, mask=mask)
        with jax.enable_x64(True):
            close(run(form, *arrays, mask), wanted, 1e-12)


def keys_may_be_more_or_fewer_than_queries(mechanism):
    arrays = inputs(keys=S)
    close(run(mechanism.whole, *_single(arrays)), mechanism.oracle(*arrays), 3e-6)


def segments_do_not_see_each_other(mechanism):
    arrays, mask = inputs(), hiding(T)
    options = dict(mask=mask, segment_ids=SEGMENTS)
    for form, causal in zip(mechanism.both, (False, True), strict=True):
        wanted = mechanism.oracle(*arrays, causal=causal, **options)
        with jax.enable_x64(True):
            close(run(form, *arrays, **options), wanted, 1e-12)


def gradients_equal_those_of_the_definition(mechanism):
    arrays, mask = inputs(), hiding(T)
    for form, causal in zip(mechanism.both, (False, True), strict=True):
        oracle = partial(mechanism.oracle, module=jnp, causal=causal)
        single = gradient(form, *_single(arrays), mask)
        with jax.enable_x64(True):
            wanted = gradient(oracle, *arrays, mask)
        for part, exact in zip(single, wanted, strict=True):
            close(part, exact, 5e-6)


def chunks_of_any_size_agree(mechanism):
    arrays = inputs()
    with jax.enable_x64(True):
        wanted = run(mechanism.causal, *arrays)
        for chunk_size in (1, 64):
            output = run(mechanism.causal, *arrays, chunk_size=chunk_size)
            close(output, wanted, 1e-12)
        close(wanted[:, -1], run(mechanism.whole, *arrays)[:, -1], 1e-12)


def parallel_chunks_agree(mechanism):
    """Accelerators merge the states of chunks of 128 tokens; here with segments too."""
    length = 300
    arrays = inputs(length)
    segments = np.broadcast_to(np.arange(length) // 70, (B, length))
    for seen in ({}, {"segment_ids": segments}):
        with jax.enable_x64(True):
            wanted = run(mechanism.causal, *arrays, **seen)
            with lowered_for("tpu"):
                found = run(mechanism.causal, *arrays, **seen)
        close(found, wanted, 1e-11)


def a_prefill_goes_on_in_chunks_and_steps(mechanism):
    """Read 9 tokens, 9 more and one, and read all of them one by one."""
    arrays = inputs()
    first, second, last = (
        [x[:, start:end] for x in arrays] for start, end in ((0, 9), (9, 18), (18, 19))
    )
    with jax.enable_x64(True):
        wanted, end = mechanism.causal(*arrays, return_state=True)
        wanted = np.asarray(wanted)
        outputs, state = [None] * 3, mechanism.state(B, K, H, V, dtype=jnp.float64)
        steps, stepped = stepwise(mechanism, *arrays, state)
        options = dict(return_state=True)
        outputs[0], state = mechanism.causal(*first, state=state, **options)
        outputs[1], state = mechanism.causal(*second, state=state, **options)
        outputs[2], state = mechanism.step(state, *last)
    close(steps, wanted, 1e-12)
    close(np.concatenate(outputs, axis=1), wanted, 1e-12)
    for one in (stepped, state):
        for part, whole in zip(one, end, strict=True):
            assert (part is None) == (whole is None)
            if part is not None:
                close(part, whole, 1e-12)


def the_future_changes_nothing(mechanism):
    """Earlier chunks are bitwise equal; inside the chunk rounding may differ."""
    arrays = _single(inputs())
    other = [x.copy() for x in arrays]
    for x in other:
        x[:, 10:] *= -3
    one, two = run(mechanism.causal, *arrays), run(mechanism.causal, *other)
    same(one[:, :CHUNK], two[:, :CHUNK])
    close(one[:, :10], two[:, :10], 2e-6)
    assert np.abs(one[:, 10:] - two[:, 10:]).max() > 0.1


def the_future_gets_no_gradient(mechanism):
    arrays = _single(inputs())
    visible = np.ones((B, 1, 1, T), bool)
    for part in gradient(mechanism.causal, *arrays, visible, rows=slice(10)):
        assert part[:, :10].any() and not part[:, 10:].any()


def hidden_keys_change_nothing(mechanism):
    """Hidden keys may be NaN or infinite. The output is as if they were absent, and
    their gradient is zero."""
    query, key, value = _single(inputs())
    mask = hiding(T)
    hidden = ~mask[:, 0, 0]
    bad_key, bad_value = key.copy(), value.copy()
    bad_key[hidden], bad_value[hidden] = np.nan, np.inf
    for form in mechanism.both:
        output = run(form, query, key, value, mask)
        same(run(form, query, bad_key, bad_value, mask), output)
        assert np.isfinite(output).all()
        gradients = gradient(form, query, bad_key, bad_value, mask)
        assert all(np.isfinite(part).all() for part in gradients)
        assert not gradients[1][hidden].any() and not gradients[2][hidden].any()
        left = np.flatnonzero(mask[0])
        absent = run(form, *(x[:1, left] for x in (query, key, value)))
        close(output[:1, left], absent, 3e-6)


def all_rows_read_the_visible_keys_alone(mechanism):
    """Rows of hidden tokens see the visible keys, too."""
    query, key, value = _single(inputs())
    mask = hiding(T)
    left = np.flatnonzero(mask[0])
    output = run(mechanism.whole, query, key, value, mask)
    absent = run(mechanism.whole, query[:1], key[:1, left], value[:1, left])
    close(output[:1], absent, 3e-6)


def a_row_without_keys_is_zero(mechanism):
    query, key, value = _single(inputs())
    mask = np.ones((B, 1, 1, T), bool)
    mask[0], mask[1, ..., :9] = False, False
    zeros = np.zeros((T, N, V))
    output = run(mechanism.causal, query, key, value, mask)
    same(output[0], zeros)
    same(output[1, :9], zeros[:9])
    assert np.abs(output[1, 9:]).min() > 0
    same(run(mechanism.whole, query, key, value, mask)[0], zeros)
    for form in mechanism.both:
        gradients = gradient(form, query, key, value, mask)
        assert all(np.isfinite(part).all() for part in gradients)


def the_rest_of_the_batch_changes_nothing(mechanism):
    arrays = _single(inputs())
    other = [np.stack([x[0], x[1] * 30]) for x in arrays]
    for form in mechanism.both:
        same(run(form, *arrays)[0], run(form, *other)[0])


def bfloat16_is_as_good_as_its_rounding(mechanism):
    """Sums are in float32, so the error is that of a rounded output: 2⁻⁸."""
    rounded = [x.astype(jnp.bfloat16) for x in inputs()]
    for form in mechanism.both:
        output = run(form, *rounded)
        assert output.dtype == jnp.bfloat16
        wanted = run(form, *_single(rounded))
        error = np.abs(output.astype(np.float32) - wanted)
        assert (error <= 2**-8 * np.abs(wanted) + 1e-6).all()
    now = [x[:, :1] for x in rounded]
    state = mechanism.state(B, K, H, V, dtype=jnp.bfloat16)
    output, state = mechanism.step(state, *now)
    assert output.dtype == jnp.bfloat16 and state[0].dtype == jnp.float32


def bfloat16_products_cost_what_rounded_inputs_do(graded, form, exact):
    """Products of bfloat16 operands cost no more than rounding inputs and result.

    Errors are against float64 with unrounded inputs. They may be 1.5 times the errors
    of float64 with rounded inputs and a rounded result.

    Args:
        graded: (form, given=inputs, dtype=dtype) → the output and its gradients.
    """
    wanted = graded(exact, dtype=np.float64)
    rounded = [x.astype(jnp.bfloat16) for x in graded.keywords["given"]]
    least = graded(exact, given=rounded, dtype=np.float64)
    found = graded(form, dtype=jnp.bfloat16)
    for one, other, whole in zip(found, least, wanted, strict=True):
        assert one.dtype == jnp.bfloat16
        limit = np.linalg.norm(other.astype(jnp.bfloat16).astype(np.float64) - whole)
        assert np.linalg.norm(one.astype(np.float64) - whole) <= 1.5 * limit


def grouped_heads_share_their_key_head(mechanism):
    query, key, value = _single(inputs())
    repeated = key.repeat(N // K, axis=2), value.repeat(N // K, axis=2)
    for form in mechanism.both:
        close(run(form, query, *repeated), run(form, query, key, value), 1e-6)


def vmap_changes_nothing(mechanism):
    arrays = _single(inputs())
    one_by_one = jax.vmap(lambda *x: mechanism.causal(*(y[None] for y in x))[0])
    close(run(one_by_one, *arrays), run(mechanism.causal, *arrays), 1e-6)


def nothing_gives_nothing(mechanism):
    """No example, no token or values of size 0 give an output of size 0, with
    gradients."""
    query, key, value = arrays = _single(inputs(3))
    segments = np.zeros((B, 3), int)
    for empty, ids in (
        ([x[:0] for x in arrays], segments[:0]),
        ([x[:, :0] for x in arrays], segments[:, :0]),
        ([query, key, value[..., :0]], segments),
    ):
        for form in (*mechanism.both, partial(mechanism.whole, segment_ids=ids)):

            def graded(*arrays, form=form):
                output, back = jax.vjp(form, *arrays)
                return output, back(output)

            output, gradients = jax.eval_shape(graded, *empty)
            assert output.shape == (*empty[0].shape[:3], empty[2].shape[3])
            assert [x.shape for x in gradients] == [x.shape for x in empty]


def no_keys_give_zeros(mechanism):
    query, key, value = _single(inputs(3))
    same(mechanism.whole(query, key[:, :0], value[:, :0]), np.zeros((B, 3, N, V)))


def wrong_shapes_are_named(mechanism):
    query, key, value = _single(inputs())
    wrong = [
        ((query[..., :4], key, value), (query[..., :4], key)),
        ((query[:1], key, value), (query[:1], key)),
        ((query[:, :, :5], key, value), (query[:, :, :5], key)),
        ((query, key[:, :9], value), (key[:, :9], value)),
        ((query, key, value[:, :, :2]), (key, value[:, :, :2])),
        ((query[0], key, value), (query[0], key)),
    ]
    for arrays, named in wrong:
        for form in mechanism.both:
            _refused(named, form, *arrays)
    short = query, key[:, :9], value[:, :9]
    _refused(short[:2], mechanism.causal, *short)
    _refused((short[0],), partial(mechanism.whole, segment_ids=SEGMENTS), *short)
    for shape in ((B, 1, T, T), (B, N, 1, T), (B, 1, 1, T - 1), (3, 1, 1, T)):
        mask = np.ones(shape, bool)
        _refused((mask, key), mechanism.whole, query, key, value, mask)
        _refused((mask, key), mechanism.causal, query, key, value, mask)
    mask = np.ones((B, 1, 1, T), np.float32)
    with pytest.raises(ValueError, match="float32"):
        mechanism.whole(query, key, value, mask)
    segments = partial(mechanism.causal, segment_ids=SEGMENTS[:, :-1])
    _refused((query, SEGMENTS[:, :-1]), segments, query, key, value)
    state = mechanism.state(B, K, H, V - 1)
    now = query[:, :1], key[:, :1], value[:, :1]
    _refused((value[:, :1], state[0]), mechanism.step, state, *now)
    later = partial(mechanism.causal, state=state)
    _refused((value, state[0]), later, query, key, value)
    with pytest.raises(ValueError, match="State of (sums|fit) .*got a tuple"):
        mechanism.step((1, 2), *now)
    with pytest.raises(ValueError, match="key must be .*floating.*int"):
        mechanism.whole(query, key.astype(int), value)
    state = mechanism.state(B, K, H, V)
    _refused((query,), mechanism.step, state, query, key, value)
    with pytest.raises(ValueError, match="chunk_size"):
        mechanism.causal(query, key, value, chunk_size=0)


def nothing_of_size_T_T_or_T_M_V_is_kept(mechanism):
    """The largest array of the gradient has at most twice the size of an input."""
    length = 2**17
    arrays = [np.zeros((1, length, 1, size), np.float32) for size in (H, H, V)]

    def loss(*arrays):
        return mechanism.causal(*arrays).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays)
    assert _largest(jaxpr.jaxpr) <= 2 * length * max(H, V)


def _largest(jaxpr):
    sizes = [1]
    for equation in jaxpr.eqns:
        sizes += [np.prod(x.aval.shape, dtype=int) for x in equation.outvars]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            sizes.append(_largest(inner))
    return max(sizes)


def _refused(named, form, *arrays):
    with pytest.raises(ValueError) as refusal:
        form(*arrays)
    for array in named:
        assert str(array.shape) in str(refusal.value)


def _single(arrays):
    return tuple(x.astype(np.float32) for x in arrays)


LAWS = (
    it_equals_its_definition,
    keys_may_be_more_or_fewer_than_queries,
    segments_do_not_see_each_other,
    gradients_equal_those_of_the_definition,
    chunks_of_any_size_agree,
    parallel_chunks_agree,
    a_prefill_goes_on_in_chunks_and_steps,
    the_future_changes_nothing,
    the_future_gets_no_gradient,
    hidden_keys_change_nothing,
    all_rows_read_the_visible_keys_alone,
    a_row_without_keys_is_zero,
    the_rest_of_the_batch_changes_nothing,
    bfloat16_is_as_good_as_its_rounding,
    grouped_heads_share_their_key_head,
    vmap_changes_nothing,
    nothing_gives_nothing,
    no_keys_give_zeros,
    wrong_shapes_are_named,
    nothing_of_size_T_T_or_T_M_V_is_kept,
)
# Laws of mechanisms that have only a causal form. It is also their `whole`.
CAUSAL_LAWS = tuple(
    law
    for law in LAWS
    if law
    not in (
        all_rows_read_the_visible_keys_alone,
        keys_may_be_more_or_fewer_than_queries,
        no_keys_give_zeros,
    )
)
every_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
