"""The laws of every mechanism made of features, each a function of a mechanism."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

B, T, S, N, K, H, V = 2, 19, 23, 6, 3, 5, 7
CHUNK = 8  # does not divide T, and T needs more than two of them
SEGMENTS = np.array([[0] * 6 + [1] * 7 + [0] * 6, [4] * 9 + [2, 3] + [1] * 8])


class Mechanism(NamedTuple):
    """The forms of a mechanism, and (log w, sign of w) of all pairs by definition."""

    whole: Callable
    causal: Callable
    step: Callable
    state: Callable
    products: Callable

    @classmethod
    def of(cls, forms, products, projection=None, **options):
        """Bind options to whole, causal, step and state; a projection is positional."""
        bound = [partial(form, **options) for form in forms]
        if projection is not None:
            whole, causal, step, state = bound

            def with_mask(form):
                return lambda q, k, v, mask=None, **more: form(
                    q, k, v, projection, mask, **more
                )

            bound = [
                with_mask(whole),
                with_mask(causal),
                lambda past, q, k, v: step(past, q, k, v, projection),
                lambda *sizes, **more: state(*sizes, projection, **more),
            ]
        return cls(*bound, products)

    @property
    def both(self):
        """The whole form, and the causal one in small chunks."""
        return self.whole, partial(self.causal, chunk_size=CHUNK)

    def oracle(self, query, key, value, *, module=np, **seen):
        """The definition, pair by pair."""
        pairs = oracles.seen(*query.shape[:2], key.shape[1], **seen)
        logarithms, signs = self.products(query, key, module=module)
        return oracles.weighted_mean(logarithms, signs, value, pairs, module)


def inputs(length=T, keys=None, *, heads=N, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = (B, length, heads, H), (B, keys, K, H), (B, keys, K, V)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def hiding(keys, seed=5):
    """A mask that hides some keys, the first and the last of one example among them."""
    mask = np.random.default_rng(seed).random((B, 1, 1, keys)) < 0.7
    mask[0, 0, 0, [0, 1, -1]] = False
    return mask


def close(actual, wanted, tolerance):
    """Every error is below tolerance × the largest value wanted."""
    assert actual.shape == wanted.shape
    wanted = np.asarray(wanted, np.float64)
    limit = tolerance * np.abs(wanted).max()
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, 0, limit)


def same(actual, wanted):
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))


def gradient(form, *arrays, **options):
    """Of the output against a fixed random one, for query, key and value."""

    def loss(*arrays):
        output = form(*arrays, **options)
        weigh = np.random.default_rng(1).normal(size=output.shape)
        return (output * weigh.astype(output.dtype)).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)


def stepwise(mechanism, query, key, value, state):
    outputs = []
    for t in range(query.shape[1]):
        now = slice(t, t + 1)
        output, state = mechanism.step(state, query[:, now], key[:, now], value[:, now])
        outputs.append(output)
    return jnp.concatenate(outputs, axis=1), state


def it_equals_its_definition(mechanism):
    mask = hiding(S)
    arrays = inputs(keys=S)
    close(mechanism.whole(*_single(arrays)), mechanism.oracle(*arrays), 3e-6)
    wanted = mechanism.oracle(*arrays, mask=mask)
    with jax.enable_x64(True):
        close(mechanism.whole(*arrays, mask), wanted, 1e-12)


def the_causal_form_equals_its_definition(mechanism):
    arrays, mask = inputs(), hiding(T)
    wanted = mechanism.oracle(*arrays, causal=True)
    close(mechanism.causal(*_single(arrays), chunk_size=CHUNK), wanted, 3e-6)
    wanted = mechanism.oracle(*arrays, causal=True, mask=mask)
    with jax.enable_x64(True):
        close(mechanism.causal(*arrays, mask, chunk_size=CHUNK), wanted, 1e-12)


def segments_do_not_see_each_other(mechanism):
    arrays, mask = inputs(), hiding(T)
    options = dict(mask=mask, segment_ids=SEGMENTS)
    with jax.enable_x64(True):
        wanted = mechanism.oracle(*arrays, **options)
        close(mechanism.whole(*arrays, **options), wanted, 1e-12)
        wanted = mechanism.oracle(*arrays, causal=True, **options)
        close(mechanism.causal(*arrays, chunk_size=CHUNK, **options), wanted, 1e-12)


def gradients_equal_those_of_the_definition(mechanism):
    arrays, mask = inputs(), hiding(T)
    for form, causal in zip(mechanism.both, (False, True), strict=True):
        oracle = partial(mechanism.oracle, module=jnp, causal=causal)
        single = gradient(form, *_single(arrays), mask=mask)
        with jax.enable_x64(True):
            wanted = gradient(oracle, *arrays, mask=mask)
            double = gradient(form, *arrays, mask=mask)
        for a, b, c in zip(single, double, wanted, strict=True):
            close(b, c, 1e-11)
            close(a, c, 1e-5)


def all_executions_agree(mechanism):
    """Chunks of any size, steps, and a prefill that goes on in steps or chunks."""
    query, key, value = arrays = inputs()
    with jax.enable_x64(True):
        wanted, last = mechanism.causal(*arrays, chunk_size=64, return_state=True)
        for chunk_size in (1, 5):
            close(mechanism.causal(*arrays, chunk_size=chunk_size), wanted, 1e-12)
        empty = mechanism.state(B, K, H, V, dtype=jnp.float64)
        steps, state = stepwise(mechanism, *arrays, empty)
        close(steps, wanted, 1e-12)
        close(state.total, last.total, 1e-12)
        past = [x[:, :10] for x in arrays]
        rest = [x[:, 10:] for x in arrays]
        first, state = mechanism.causal(*past, chunk_size=5, return_state=True)
        close(first, wanted[:, :10], 1e-12)
        close(stepwise(mechanism, *rest, state)[0], wanted[:, 10:], 1e-12)
        close(mechanism.causal(*rest, chunk_size=5, state=state), wanted[:, 10:], 1e-12)


def the_last_row_sees_what_the_whole_form_sees(mechanism):
    with jax.enable_x64(True):
        arrays = inputs()
        causal, whole = mechanism.causal(*arrays), mechanism.whole(*arrays)
        close(causal[:, -1], whole[:, -1], 1e-12)


def the_future_changes_nothing(mechanism):
    """Bitwise in the chunks before; by rounding alone inside a chunk."""
    arrays = _single(inputs())
    other = [x.copy() for x in arrays]
    for x in other:
        x[:, 10:] *= -3
    one = mechanism.causal(*arrays, chunk_size=CHUNK)
    two = mechanism.causal(*other, chunk_size=CHUNK)
    same(one[:, :CHUNK], two[:, :CHUNK])
    close(one[:, :10], two[:, :10], 2e-6)
    assert np.abs(one[:, 10:] - two[:, 10:]).max() > 0.1


def the_future_gets_no_gradient(mechanism):
    arrays = _single(inputs())

    def early(*arrays):
        return mechanism.causal(*arrays, chunk_size=CHUNK)[:, :10]

    for part in gradient(early, *arrays):
        assert part[:, :10].any() and not part[:, 10:].any()


def hidden_keys_change_nothing(mechanism):
    """Not even NaN; they are as good as absent, and take no gradient."""
    query, key, value = _single(inputs())
    mask = hiding(T)
    hidden = ~mask[:, 0, 0]
    bad_key, bad_value = key.copy(), value.copy()
    bad_key[hidden], bad_value[hidden] = np.nan, np.inf
    for form in mechanism.both:
        output = form(query, key, value, mask)
        same(form(query, bad_key, bad_value, mask), output)
        assert np.isfinite(output).all()
        gradients = gradient(form, query, bad_key, bad_value, mask=mask)
        assert all(np.isfinite(part).all() for part in gradients)
        assert not gradients[1][hidden].any() and not gradients[2][hidden].any()
    fewer = np.flatnonzero(mask[0])
    whole = mechanism.whole(query, key, value, mask)
    absent = mechanism.whole(query[:1], key[:1, fewer], value[:1, fewer])
    close(whole[:1], absent, 3e-6)


def a_row_without_keys_is_zero(mechanism):
    query, key, value = _single(inputs())
    mask = np.ones((B, 1, 1, T), bool)
    mask[0], mask[1, ..., :9] = False, False
    zeros = np.zeros((T, N, V))
    output = mechanism.causal(query, key, value, mask, chunk_size=CHUNK)
    same(output[0], zeros)
    same(output[1, :9], zeros[:9])
    assert np.abs(output[1, 9:]).min() > 0
    same(mechanism.whole(query, key, value, mask)[0], zeros)
    for form in mechanism.both:
        gradients = gradient(form, query, key, value, mask=mask)
        assert all(np.isfinite(part).all() for part in gradients)


def the_rest_of_the_batch_changes_nothing(mechanism):
    arrays = _single(inputs())
    other = [np.stack([x[0], x[1] * 30]) for x in arrays]
    for form in mechanism.both:
        same(form(*arrays)[0], form(*other)[0])


def bfloat16_is_as_good_as_its_rounding(mechanism):
    """Sums are float32, so the error is that of rounding the output: 2⁻⁸."""
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    wide = [x.astype(jnp.float32) for x in rounded]
    for form in mechanism.both:
        output = form(*rounded)
        assert output.dtype == jnp.bfloat16
        wanted = np.asarray(form(*wide))
        error = np.abs(np.asarray(output, np.float32) - wanted)
        assert (error <= 2**-8 * np.abs(wanted) + 1e-6).all()
    now = [x[:, :1] for x in rounded]
    state = mechanism.state(B, K, H, V, dtype=jnp.bfloat16)
    output, state = mechanism.step(state, *now)
    assert output.dtype == jnp.bfloat16 and state.sums.dtype == jnp.float32


def grouped_heads_share_their_key_head(mechanism):
    query, key, value = _single(inputs())
    repeated = key.repeat(N // K, axis=2), value.repeat(N // K, axis=2)
    for form in mechanism.both:
        close(form(query, key, value), form(query, *repeated), 1e-6)


def jit_and_vmap_change_nothing(mechanism):
    arrays = _single(inputs())
    causal = mechanism.both[1]
    wanted = causal(*arrays)
    close(jax.jit(causal)(*arrays), wanted, 1e-6)
    one_by_one = jax.vmap(lambda *x: causal(*(y[None] for y in x))[0])
    close(one_by_one(*arrays), wanted, 1e-6)


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
    _refused((value[:, :1], state.sums), mechanism.step, state, *now)
    later = partial(mechanism.causal, state=state)
    _refused((value, state.sums), later, query, key, value)
    state = mechanism.state(B, K, H, V)
    _refused((query,), mechanism.step, state, query, key, value)
    with pytest.raises(ValueError, match="chunk_size"):
        mechanism.causal(query, key, value, chunk_size=0)


def nothing_of_size_T_T_or_T_M_V_is_kept(mechanism):
    """The largest array of the gradient is one of the inputs' own size, or a few."""
    length = 1024
    arrays = [np.zeros((1, length, 1, size), np.float32) for size in (H, H, V)]

    def loss(*arrays):
        return mechanism.causal(*arrays, chunk_size=32).sum()

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
    the_causal_form_equals_its_definition,
    segments_do_not_see_each_other,
    gradients_equal_those_of_the_definition,
    all_executions_agree,
    the_last_row_sees_what_the_whole_form_sees,
    the_future_changes_nothing,
    the_future_gets_no_gradient,
    hidden_keys_change_nothing,
    a_row_without_keys_is_zero,
    the_rest_of_the_batch_changes_nothing,
    bfloat16_is_as_good_as_its_rounding,
    grouped_heads_share_their_key_head,
    jit_and_vmap_change_nothing,
    wrong_shapes_are_named,
    nothing_of_size_T_T_or_T_M_V_is_kept,
)
every_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
