"""Attention with decays: equal to the recurrence, in any chunks, and to other
libraries."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import CHUNK, SEGMENTS, B, H, K, N, T, V, close, hiding, inputs, same

from symjax.attention.differential import differential
from symjax.attention.gated_linear import (
    DecayState,
    decay_causal,
    decay_state,
    decay_step,
    gated_log_decay,
    lightning_log_decay,
    retention_log_decay,
)

CONFORMANCE = Path(__file__).resolve().parents[3] / "shared/conformance"
SHAPES = {"head": (B, T, K), "channel": (B, T, K, H)}
each_kind = pytest.mark.parametrize("kind", SHAPES)


class Gated(laws.Mechanism):
    """A mechanism whose decays are made from its keys, so that laws cover decays.

    It has only a causal form, which stands for `whole` too. The law of chunks selects
    the parallel form by the size.
    """

    @classmethod
    def of_kind(cls, kind):
        def logits(key):
            return key[..., 0] if kind == "head" else key

        def causal(query, key, value, mask=None, *, chunk_size=CHUNK, **options):
            decays = gated_log_decay(logits(key), 0.3)
            options |= {"mask": mask, "chunk_size": chunk_size}
            return decay_causal(query, key, value, decays, **options)

        def step(state, query, key, value):
            decays = gated_log_decay(logits(key), 0.3)
            return decay_step(state, query, key, value, decays)

        def log_decay(key):
            return -0.3 * np.log1p(np.exp(-logits(key)))

        return cls(causal, causal, step, decay_state, log_decay)

    def oracle(self, query, key, value, *, causal=True, **seen):
        return oracles.decay(query, key, value, self.products(key), **seen)[0]


KINDS = {kind: Gated.of_kind(kind) for kind in SHAPES}
# Left out: the oracle's heads are grouped already, and tests below say the same of
# hidden tokens and gradients, with those of the decays.
OTHER = (
    laws.grouped_heads_share_their_key_head,
    laws.hidden_keys_change_nothing,
    laws.gradients_equal_those_of_the_definition,
)


@pytest.mark.parametrize(
    "law", [x for x in laws.CAUSAL_LAWS if x not in OTHER], ids=lambda law: law.__name__
)
def test_decay_of_channels_obeys(law):
    law(KINDS["channel"])


@pytest.mark.parametrize(
    "law",
    [
        laws.segments_do_not_see_each_other,
        laws.chunks_of_any_size_agree,
        laws.a_prefill_goes_on_in_chunks_and_steps,
        laws.the_future_changes_nothing,
        laws.nothing_gives_nothing,
        laws.nothing_of_size_T_T_or_T_M_V_is_kept,
    ],
    ids=lambda law: law.__name__,
)
def test_decay_of_heads_obeys(law):
    law(KINDS["head"])


def decays(shape, strength=0.3, seed=2):
    return -strength * np.random.default_rng(seed).exponential(size=shape)


def single(*arrays):
    return [np.asarray(x, np.float32) for x in arrays]


@partial(jax.jit, static_argnames="chunk_size")
def results(weigh, weigh_end, arrays, *, chunk_size, **options):
    """Return the output, the last state, and the gradients of a weighted sum of both.

    The arrays are query, key, value, log_decay and the state before the first token.
    """

    def loss(*arrays):
        *operands, sums = arrays
        state = DecayState(sums)
        more = dict(options, chunk_size=chunk_size, state=state, return_state=True)
        output, state = decay_causal(*operands, **more)
        both = output, state.sums
        return (output * weigh).sum() + (state.sums * weigh_end).sum(), both

    gradients, both = jax.grad(loss, tuple(range(5)), has_aux=True)(*arrays)
    return *both, *gradients


def wanted_results(weigh, weigh_end, arrays, **options):
    """Return the same by definition. A step of i·10⁻³⁰ gives exact derivatives.

    All examples take the step at once, since they do not depend on each other.
    """
    gradients = []
    for place, x in enumerate(arrays):
        gradient = np.zeros(x.shape)
        for index in np.ndindex(x.shape[1:]):
            moved = x.astype(complex)
            moved[:, *index] += 1e-30j
            operands = [*arrays[:place], moved, *arrays[place + 1 :]]
            output, sums = oracles.decay(*operands, **options)
            totals = (output.imag * weigh).sum((1, 2, 3))
            totals += (sums.imag * weigh_end).sum((1, 2, 3))
            gradient[:, *index] = totals * 1e30
        gradients.append(gradient)
    return *oracles.decay(*arrays, **options), *gradients


def weights(arrays, seed=1):
    rng = np.random.default_rng(seed)
    shape = *arrays[0].shape[:3], arrays[2].shape[-1]
    return rng.normal(size=shape), rng.normal(size=arrays[4].shape)


@each_kind
def test_every_gradient_is_that_of_the_definition(kind):
    """In chunks of 12 tokens, which is no power of two and does not divide T."""
    sums = np.random.default_rng(4).normal(size=(B, K, H, V))
    arrays = *inputs(), decays(SHAPES[kind]), sums
    options = {"mask": hiding(T), "segment_ids": SEGMENTS}
    weigh = weights(arrays)
    actual = results(*single(*weigh), single(*arrays), chunk_size=12, **options)
    for one, two in zip(actual, wanted_results(*weigh, arrays, **options), strict=True):
        close(one, two, 3e-6)


@each_kind
def test_strong_decays_are_exact_beside_weak_ones(kind):
    """A difference of sums up to −600 would have an error of 3e-5 in the exponent."""
    length, size = 30, 3
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, length, 1, size)) for _ in range(3))
    rates = decays((1, length, 1, size)[: 3 + (kind == "channel")], 0.02)
    rates[:, :20] -= 30
    rates[:, 25] = -np.inf
    arrays = query, key, value, rates, rng.normal(size=(1, 1, size, size))
    weigh = weights(arrays)
    actual = results(*single(*weigh), single(*arrays), chunk_size=length)
    for one, two in zip(actual, wanted_results(*weigh, arrays), strict=True):
        close(one, two, 1e-6)


@each_kind
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_long_chunks_whose_smallest_blocks_are_not_split_are_as_exact(kind, dtype):
    """300 tokens in chunks of 128 and 300, log-decays from −e³ to −e⁻⁸ and some −∞."""
    query, key, value = inputs(300)
    rates = -np.exp(
        np.random.default_rng(0).uniform(-8, 3, (B, 300, *SHAPES[kind][2:]))
    )
    rates[:, 50] = rates[0, 130:140] = -np.inf

    @partial(jax.jit, static_argnums=0)
    def run(chunk_size, *arrays):
        form = partial(decay_causal, chunk_size=chunk_size)
        output, back = jax.vjp(form, *arrays)
        return output, *back(jnp.cos(output))

    with jax.enable_x64(True):
        wanted = run(32, query, key, value, rates)
        arrays = [x.astype(dtype) for x in (query, key, value, rates)]
        for chunk_size in (128, 300):
            for one, two in zip(run(chunk_size, *arrays), wanted, strict=True):
                size = np.abs(two).max()
                close(one / size, two / size, 3e-6 if dtype == np.float32 else 1e-13)


def test_precision_does_not_fall_with_length():
    """The exponent of the last of 4096 tokens is summed in its own chunk."""
    rng = np.random.default_rng(0)
    arrays = *(rng.normal(size=(1, 4096, 4, 3)) for _ in range(3)), decays((1, 4096, 4))
    arrays = [x.astype(np.float32).astype(float) for x in arrays]
    wanted, sums = oracles.decay(*arrays)
    output, state = decay_causal(*single(*arrays), return_state=True)
    close(output[:, -64:], wanted[:, -64:], 1e-6)
    close(state.sums, sums, 1e-6)


@each_kind
def test_hidden_tokens_are_as_good_as_absent(kind):
    """They do not write or decay, whatever they hold, and have no gradient."""
    arrays = single(*inputs(), decays(SHAPES[kind]), np.zeros((B, K, H, V)))
    mask = hiding(T)
    seen = mask[:, 0, 0]
    weigh = [x.astype(np.float32) for x in weights(arrays)]
    options = {"mask": mask, "segment_ids": SEGMENTS}
    masked = partial(results, *weigh, chunk_size=12, **options)
    bad = [x.copy() for x in arrays]
    for x, nonsense in zip(bad[1:4], (np.nan, np.inf, np.nan), strict=True):
        x[~seen] = nonsense
    actual = masked(bad)
    for one, two in zip(actual, masked(arrays), strict=True):
        same(one, two)
    for gradient in actual[3:6]:
        assert not np.asarray(gradient)[~seen].any()
    for b in range(B):
        fewer = [x[b : b + 1, seen[b]].astype(float) for x in arrays[:4]]
        output, sums = oracles.decay(*fewer, segment_ids=SEGMENTS[b : b + 1, seen[b]])
        close(actual[0][b : b + 1, seen[b]], output, 1e-6)
        close(actual[1][b : b + 1], sums, 1e-6)


def test_no_decay_is_linear_attention_without_a_denominator():
    query, key, value = inputs()
    output = decay_causal(*single(query, key, value, np.zeros((1, 1, K))))
    key, value = (x.repeat(N // K, axis=2) for x in (key, value))
    pairs = np.tril(np.einsum("btnh,bsnh->bnts", query, key))
    close(output, np.einsum("bnts,bsnv->btnv", pairs, value), 1e-6)


def test_differential_subtracts_two_decaying_states():
    query, key, value = inputs()
    rates, lam = decays((B, T, 2)), 0.4
    key, value = key[:, :, :2], value[:, :, :1]
    one, two = (
        oracles.decay(query[:, :, b::2], key[:, :, [b]], value, rates[..., [b]])[0]
        for b in (0, 1)
    )
    options = {"attend": decay_causal, "log_decay": np.float32(rates)}
    output = differential(*single(query, key, value), lam, **options)
    close(output, one - lam * two, 1e-6)


def test_wrong_log_decays_are_named():
    query, key, value = single(*inputs())
    for shape in ((T, K), (B, T, N), (B, T - 1, K), (3, T, K), (B, T, K, H, 1)):
        with pytest.raises(ValueError) as refusal:
            decay_causal(query, key, value, np.zeros(shape))
        assert str(shape) in str(refusal.value)
        assert str(key.shape) in str(refusal.value)


def test_the_decays_of_heads_fit_as_they_are():
    query, key, value = single(*inputs())
    rates = retention_log_decay(K)
    output, state = decay_causal(query, key, value, rates, return_state=True)
    same(output, decay_causal(query, key, value, rates[None, None]))
    now = [x[:, :1] for x in (query, key, value)]
    next_output, _ = decay_step(state, *now, rates)
    same(next_output, decay_step(state, *now, rates[None, None])[0])


def test_retention_forgets_by_powers_of_two(x64):
    rates = 1 - np.exp(retention_log_decay(3))
    np.testing.assert_allclose(rates, [1 / 32, 1 / 64, 1 / 128], rtol=1e-14)


def test_lightning_has_two_conventions(x64):
    slopes = partial(lightning_log_decay, 4)
    first = -np.array([2**-2, 2**-4, 2**-6, 2**-8])
    for layer, share in ((0, 1 + 1e-5), (1, 0.5 + 1e-5), (2, 1e-5)):
        actual = slopes(layer, 3, convention="transnormer")
        np.testing.assert_allclose(actual, first * share, rtol=1e-12)
        actual = slopes(layer, 3, convention="fla")
        wanted = -np.arange(4) * 2 * (1 - layer / 3)
        np.testing.assert_allclose(actual, wanted, rtol=1e-12)
    only = slopes(0, 1, convention="transnormer")
    np.testing.assert_allclose(only, first * (1 + 1e-5), rtol=1e-12)


def test_six_heads_take_the_slopes_of_four_and_two_of_eight(x64):
    actual = lightning_log_decay(6, 0, 1, convention="transnormer") / (1 + 1e-5)
    exponents = -np.log2(-np.asarray(actual))
    np.testing.assert_allclose(exponents, [2, 4, 6, 8, 1, 3], rtol=1e-12)


def test_gates_are_powers_of_a_sigmoid():
    logits = np.array([-1e4, -3, 0, 8], np.float32)
    wide = logits.astype(float)
    wanted = -np.logaddexp(0, -wide)
    np.testing.assert_allclose(gated_log_decay(logits), wanted / 16, rtol=1e-6)
    narrow = gated_log_decay(logits.astype(jnp.bfloat16), power=2.0)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, 2 * wanted, rtol=1e-2)


def test_wrong_makers_are_named():
    with pytest.raises(ValueError, match="'alibi'.*fla, transnormer"):
        lightning_log_decay(4, 0, 1, convention="alibi")
    with pytest.raises(ValueError, match="layer 3 and layers 3"):
        lightning_log_decay(4, 3, 3, convention="fla")
    with pytest.raises(ValueError, match="retention.*heads must be at least 1, got 0"):
        retention_log_decay(0)
    with pytest.raises(ValueError, match="lightning.*heads must be at least 1, got 0"):
        lightning_log_decay(0, 0, 1, convention="fla")
    with pytest.raises(ValueError, match="-0.5"):
        gated_log_decay(np.zeros(3), power=-0.5)


@pytest.fixture(scope="module")
def published():
    """Return stored arrays, and the output, state and gradients for their inputs."""
    path = CONFORMANCE / "performer_fla_references.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout")
    case = dict(np.load(path))

    @jax.jit
    def ours(rates, scale=0.25):
        def form(query, key, value):
            options = {"chunk_size": 32, "return_state": True}
            return decay_causal(query * scale, key, value, rates, **options)

        arrays = case["q"], case["k"], case["v"]
        output, pull_back, state = jax.vjp(form, *arrays, has_aux=True)
        return output, state.sums, *pull_back(case["ct"])

    return case, ours


def agrees(actual, case, name):
    """Compare all stored arrays of a case within the error of float32."""
    kinds = ("out", "state", "dq", "dk", "dv")
    held = [kind for kind in kinds if f"{name}_{kind}" in case]
    assert "out" in held
    for kind, array in zip(kinds, actual, strict=True):
        if kind in held:
            close(array, case[f"{name}_{kind}"], 2e-6)


def test_flash_linear_attention_agrees_by_head(published):
    case, ours = published
    actual = ours(case["g_simple"])
    for name in ("parallel", "recurrent", "chunk"):
        agrees(actual, case, f"simple_gla_{name}")


def test_flash_linear_attention_agrees_by_channel(published):
    case, ours = published
    agrees(ours(case["gk_gla"]), case, "gla_recurrent")


def test_constant_decays_agree(published):
    """Retention, Lightning attention, and linear attention, which does not decay."""
    case, ours = published
    agrees(ours(retention_log_decay(4)[None, None]), case, "retention")
    slopes = lightning_log_decay(4, 0, 1, convention="transnormer") / (1 + 1e-5)
    close(-slopes, case["lightning_slopes"][:, 0, 0], 1e-6)
    agrees(ours(slopes[None, None], scale=1.0), case, "lightning_ref")
    nothing = np.zeros((1, 1, 4), np.float32)
    agrees(ours(nothing, scale=1.0), case, "lightning_ref_nodecay")
    agrees(ours(nothing), case, "linear_chunk_unnormalized")
