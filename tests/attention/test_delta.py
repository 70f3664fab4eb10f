"""The delta rule: equal to the recurrence, in any chunks, over devices, step by
step."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import CHUNK, SEGMENTS, B, H, K, N, T, V, close, hiding, inputs, same
from split_time import check_split_time

from symjax.attention.delta_rule import (
    DeltaState,
    delta_causal,
    delta_state,
    delta_step,
)
from symjax.attention.differential import differential
from symjax.attention.gated_linear import decay_causal

SHAPES = {
    **{"none": None, "head": (B, T, K), "channel": (B, T, K, H)},
    **{"erase": None, "gated": (B, T, K, H)},
}
GATED = ("erase", "gated")  # kinds with erase gates, without and with a decay
each_kind = pytest.mark.parametrize("kind", SHAPES)


def rule(query, key, value, beta, log_decay, erase, **options):
    return delta_causal(query, key, value, beta, log_decay, erase=erase, **options)


def of_key(key, kind, module=np):
    """Return keys of length 1, and β, decays and erase gates, functions of the key."""
    if not jnp.issubdtype(key.dtype, jnp.floating):
        return key, key[..., 1], None, None  # refused by the mechanism
    key = key.astype(jnp.promote_types(key.dtype, jnp.float32))
    size = module.sqrt((key**2).sum(axis=-1, keepdims=True))
    beta = 2 / (1 + module.exp(-key[..., 1]))
    erase = 1 / (1 + module.exp(key[..., ::-1])) if kind in GATED else None
    if SHAPES[kind] is None:
        return key / size, beta, None, erase
    logits = key[..., 0] if kind == "head" else key
    return key / size, beta, -0.3 * module.logaddexp(0, -logits), erase


class Ruled(laws.Mechanism):
    """A mechanism whose β and decays are made from its keys, so that laws cover
    them."""

    @classmethod
    def of_kind(cls, kind):
        def causal(query, key, value, mask=None, *, chunk_size=CHUNK, **options):
            options |= {"mask": mask, "chunk_size": chunk_size}
            key, *operands = of_key(key, kind, jnp)
            return rule(query, key, value, *operands, **options)

        def step(state, query, key, value):
            key, *operands, erase = of_key(key, kind, jnp)
            return delta_step(state, query, key, value, *operands, erase=erase)

        return cls(causal, causal, step, delta_state, kind)

    def oracle(self, query, key, value, *, causal=True, segment_ids=None, mask=None):
        key, *operands = of_key(key, self.products)
        options = {"mask": mask, "segment_ids": segment_ids}
        return oracles.delta(query, key, value, *operands, **options)[0]


KINDS = {kind: Ruled.of_kind(kind) for kind in SHAPES}
# Tests below replace the laws on hidden tokens and on gradients.
OTHER = (
    laws.grouped_heads_share_their_key_head,
    laws.hidden_keys_change_nothing,
    laws.gradients_equal_those_of_the_definition,
)


@pytest.mark.parametrize(
    "law", [x for x in laws.CAUSAL_LAWS if x not in OTHER], ids=lambda law: law.__name__
)
def test_the_delta_rule_with_decays_of_channels_obeys(law):
    law(KINDS["channel"])


@pytest.mark.parametrize("kind", ["none", "head", "erase", "gated"])
@pytest.mark.parametrize(
    "law",
    [
        laws.segments_do_not_see_each_other,
        laws.chunks_of_any_size_agree,
        laws.a_prefill_goes_on_in_chunks_and_steps,
        laws.the_future_changes_nothing,
    ],
    ids=lambda law: law.__name__,
)
def test_the_delta_rule_obeys(law, kind):
    law(KINDS[kind])


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize(
    "law",
    [laws.parallel_chunks_agree, laws.vmap_changes_nothing],
    ids=lambda x: x.__name__,
)
def test_the_delta_rule_with_erase_gates_obeys(law, kind):
    law(KINDS[kind])


def random(kind, length=T, seed=0, strongest=20.0):
    """Draw query, keys of length 1, value, β up to 2, log-decays from −20 to 0, and
    erase gates up to 1."""
    rng = np.random.default_rng(seed)
    shapes = (B, length, N, H), (B, length, K, H), (B, length, K, V)
    query, key, value = (rng.normal(size=shape) for shape in shapes)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    beta = 2 * rng.random((B, length, K))
    erase, rates = None, None
    if SHAPES[kind] is not None:
        shape = (B, length, K, H)[: len(SHAPES[kind])]
        rates = -strongest * rng.random(shape)
        rates = np.where(rng.random(shape) < 0.8, rates / 1000, rates)
    if kind in GATED:
        erase = rng.random(key.shape)
    return query, key, value, beta, rates, erase


@partial(jax.jit, static_argnames="chunk_size")
def results(weigh, weigh_end, arrays, sums, *, chunk_size, **options):
    """Return the output, the last state, and the gradients of a weighted sum of
    both."""

    def loss(arrays, sums):
        more = dict(options, chunk_size=chunk_size, state=DeltaState(sums))
        output, state = rule(*arrays, **more, return_state=True)
        total = (output * weigh).sum() + (state.sums * weigh_end).sum()
        return total, (output, state.sums)

    gradients, both = jax.grad(loss, (0, 1), has_aux=True)(arrays, sums)
    return *both, *gradients[0], gradients[1]


@jax.jit
def wanted_results(weigh, weigh_end, arrays, sums):
    """Return the same by the loop over tokens, with the derivative by jax."""

    def loss(arrays, sums):
        query, key, value, beta, rates, erase = arrays
        rates = jnp.zeros_like(beta) if rates is None else rates
        rates = rates if rates.ndim == 4 else rates[..., None]
        eraser = key if erase is None else erase * key

        def token(sums, now):
            query, key, value, beta, rates, eraser = now
            sums = jnp.exp(rates)[..., None] * sums
            held = jnp.einsum("bkh,bkhv->bkv", eraser, sums)
            change = beta[..., None] * (value - held)
            sums = sums + key[..., None] * change[:, :, None]
            repeated = jnp.repeat(sums, query.shape[1] // sums.shape[1], axis=1)
            return sums, jnp.einsum("bnh,bnhv->bnv", query, repeated)

        tokens = query, key, value, beta, rates, eraser
        moved = [jnp.moveaxis(x, 1, 0) for x in tokens]
        sums, outputs = jax.lax.scan(token, sums, tuple(moved))
        output = jnp.moveaxis(outputs, 0, 1)
        total = (output * weigh).sum() + (sums * weigh_end).sum()
        return total, (output, sums)

    gradients, both = jax.grad(loss, (0, 1), has_aux=True)(arrays, sums)
    return *both, *gradients[0], gradients[1]


def weights(length, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(B, length, N, V)), rng.normal(size=(B, K, H, V))


@each_kind
def test_4096_tokens_are_the_loop_over_tokens_in_float64(kind, x64):
    """Output, state and all gradients, with β up to 2 and log-decays from −20 to 0."""
    length = 4096
    arrays, weigh = random(kind, length), weights(length)
    sums = np.random.default_rng(4).normal(size=(B, K, H, V))
    actual = results(*weigh, arrays, sums, chunk_size=64)
    wanted = wanted_results(*weigh, arrays, sums)
    for one, two in zip(actual, wanted, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            close(one, np.asarray(two), 1e-9)


@each_kind
def test_the_loop_over_tokens_is_the_definition(kind, x64):
    arrays, weigh = random(kind), weights(T)
    output, sums = oracles.delta(*arrays)
    found = wanted_results(*weigh, arrays, np.zeros((B, K, H, V)))
    close(found[0], output, 1e-12)
    close(found[1], sums, 1e-12)


@each_kind
def test_float32_is_close_in_chunks_that_do_not_divide(kind):
    arrays = random(kind, strongest=3.0)
    single = jax.tree.map(np.float32, arrays)
    mask = hiding(T)
    options = {"mask": mask, "segment_ids": SEGMENTS}
    output, state = rule(*single, chunk_size=12, return_state=True, **options)
    wanted, sums = oracles.delta(*arrays, mask=mask, segment_ids=SEGMENTS)
    close(output, wanted, 3e-6)
    close(state.sums, sums, 3e-6)


@each_kind
def test_hidden_tokens_are_as_good_as_absent(kind):
    """They do not write or decay, whatever they hold, and have no gradient."""
    arrays = jax.tree.map(np.float32, random(kind))
    mask, sums = hiding(T), np.zeros((B, K, H, V), np.float32)
    seen = mask[:, 0, 0]
    weigh = [x.astype(np.float32) for x in weights(T)]
    options = {"mask": mask, "segment_ids": SEGMENTS}
    masked = partial(results, *weigh, chunk_size=12, **options)
    bad = [None if x is None else x.copy() for x in arrays]
    for x in bad[1:]:
        if x is not None:
            x[~seen] = np.nan
    actual, clean = masked(tuple(bad), sums), masked(arrays, sums)
    for one, two in zip(jax.tree.leaves(actual), jax.tree.leaves(clean), strict=True):
        same(one, two)
    for gradient in actual[3:8]:
        if gradient is not None:
            assert not np.asarray(gradient)[~seen].any()


@pytest.mark.always
@each_kind
@pytest.mark.parametrize("devices", [2, 5])
def test_time_split_over_devices_changes_nothing(kind, devices):
    """Output and gradients, with hidden tokens and segments that cross devices."""
    length = 20
    arrays = jax.tree.map(np.float32, random(kind, length, strongest=3.0))
    options = {
        "mask": hiding(length),
        "segment_ids": np.repeat([[0, 1, 1, 2], [3, 3, 3, 3]], 5, axis=1),
    }
    weigh = weights(length)[0].astype(np.float32)
    check_split_time(rule, arrays, weigh, devices, options)


def test_ones_replace_what_a_key_holds():
    """With β = 1 and orthonormal keys the state answers with the last value written."""
    key = np.eye(H, dtype=np.float32)[[0, 1, 0, 2, 1]][None, :, None]
    value = np.random.default_rng(0).normal(size=(1, 5, 1, V)).astype(np.float32)
    beta = np.ones((1, 5, 1), np.float32)
    _, state = delta_causal(key, key, value, beta, return_state=True)
    close(state.sums[0, 0, :3], value[0, [2, 4, 3], 0], 1e-6)


def test_erase_gates_of_one_value_are_the_share_that_is_erased():
    """Gated DeltaNet-2 with one gate b for erasing and writing is KDA with β = b."""
    query, key, value, beta, rates, _ = jax.tree.map(np.float32, random("channel"))
    gate = np.repeat(beta[..., None], H, axis=-1)
    gated = beta[..., None] * value, np.ones_like(beta), rates
    output = delta_causal(query, key, *gated, erase=gate)
    close(output, delta_causal(query, key, value, beta, rates), 2e-6)


def test_orthogonal_keys_and_ones_are_linear_attention():
    """Nothing is erased if no key was written before: the result is that of decay."""
    rng = np.random.default_rng(0)
    query, value = rng.normal(size=(2, 1, H, 1, H)).astype(np.float32)
    key = np.eye(H, dtype=np.float32)[None, :, None]
    rates = -rng.random((1, H, 1)).astype(np.float32)
    output = delta_causal(query, key, value, np.ones((1, H, 1)), rates)
    close(output, decay_causal(query, key, value, rates), 1e-6)


def test_differential_subtracts_two_states():
    query, key, value, beta, rates, _ = random("head")
    key, value, lam = key[:, :, :2], value[:, :, :1], 0.4
    beta, rates = beta[..., :2], rates[..., :2]
    one, two = (
        oracles.delta(
            query[:, :, b::2], key[:, :, [b]], value, beta[..., [b]], rates[..., [b]]
        )[0]
        for b in (0, 1)
    )
    options = {"beta": np.float32(beta), "log_decay": np.float32(rates)}
    arrays = jax.tree.map(np.float32, (query, key, value))
    output = differential(*arrays, lam, attend=delta_causal, **options)
    close(output, one - lam * two, 3e-6)


def test_wrong_operands_are_named():
    query, key, value = inputs(dtype=np.float32)
    good = np.ones((B, T, K), np.float32)
    for shape in ((B, T), (B, T, N), (B, T - 1, K), (B, T, K, H)):
        with pytest.raises(ValueError) as refusal:
            delta_causal(query, key, value, np.ones(shape, np.float32))
        assert str(shape) in str(refusal.value)
        assert str(key.shape) in str(refusal.value)
    with pytest.raises(ValueError, match=r"delta_causal: log_decay.*\(2, 19, 6\)"):
        delta_causal(query, key, value, good, np.zeros((B, T, N), np.float32))
    with pytest.raises(ValueError, match=r"erase .*\(2, 19, 3, 5\), got .* 3\)"):
        delta_causal(query, key, value, good, erase=good)
    with pytest.raises(ValueError, match="delta_step: a step takes one token"):
        delta_step(delta_state(B, K, H, V), query, key, value, good)
    with pytest.raises(ValueError, match="need a DeltaState.*got a DeltaState"):
        delta_causal(query, key, value, good, state=delta_state(B, K, H, V + 1))
