"""The row-block engine: memory, maps, refusals, and log-n scaling."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import B, H, K, N, T, V, close
from score_laws import DIFFERENTIAL, SOFTMAX, blocks, every_option, jitted

from symjax import attention
from symjax.attention.core.lengths import floor_scale, log_scale
from symjax.attention.core.visibility import Visibility
from symjax.attention.scores.mechanism import row_map
from symjax.attention.softmax import softmax_weights


def gradient_memory(attend, *shapes):
    """Return the temporary bytes of the compiled gradient."""
    graded = jax.grad(lambda *x: attend(*x, is_causal=True).sum(), (0, 1, 2))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    analysis = jax.jit(graded).lower(*arrays).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def test_memory_of_the_gradient_is_linear_in_time():
    differential = partial(attention.differential, lam=0.5)
    for attend, branches in ((attention.softmax, 1), (differential, 2)):
        with blocks(64, 3):
            short, long = (
                gradient_memory(
                    attend,
                    *[(1, length, branches, 16)] * 2,
                    (1, length, 1, 16 * branches),
                )
                for length in (1024, 2048)
            )
        assert long < 2.2 * short
        assert (
            long < 0.6 * branches * 2048**2 * 4
        )  # one map; the whole form keeps several


def test_a_map_for_reading_gives_the_outputs_and_its_definition():
    options = every_option()
    with jax.enable_x64(True):
        query, key, value = SOFTMAX.arrays()
        read = jitted(partial(row_map, softmax_weights), **options)(query, key)
        pairs = oracles.visible(
            B, N, T, T, is_causal=True, mask_self=True, mask=options["mask"]
        )
        known = {name: options[name] for name in ("bias", "length_base")}
        scores = oracles.scores(query, key, pairs, **known)
        close(read, oracles.softmax_weights(scores, pairs), 1e-13)
        output = np.einsum("bnts,bsnv->btnv", read, value.repeat(N // K, axis=2))
        close(output, SOFTMAX.oracle(query, key, value, **options), 1e-13)


def test_differential_rows_sum_to_one_less_lambda():
    with jax.enable_x64(True):
        query, key, _, lam = DIFFERENTIAL.arrays()
        lams = lam[None, None]
        pairs = row_map(softmax_weights, query, key, lam=lams, is_causal=True)
    pairs = np.asarray(pairs)
    close(pairs.sum(-1), np.broadcast_to(1 - lam[None, :, None], (B, N, T)), 1e-13)
    assert pairs.min() < -0.1


def test_both_queries_of_a_pair_may_look_at_one_key():
    """The map of differential V2 gives its output, for even numbers of keys, too."""
    rng = np.random.default_rng(0)
    shapes = (B, T, 8, H), (B, T, 2, H), (B, T, 2, V), (B, T, 4)
    with jax.enable_x64(True):
        query, key, value, lam = (rng.normal(size=shape) for shape in shapes)
        read = row_map(softmax_weights, query, key, lam=lam, shared_keys=True)
        output = np.einsum("bnts,bsnv->btnv", read, value.repeat(2, axis=2))
        close(output, attention.differential_v2(query, key, value, lam), 1e-13)


def test_scores_times_log_n_are_probabilities_to_a_power():
    """softmax(c z) ∝ pᶜ with c = log 19 / log 5, because every row sees 19 keys."""
    with jax.enable_x64(True):
        query, key, _ = SOFTMAX.arrays()
        plain = row_map(softmax_weights, query, key)
        scaled = row_map(softmax_weights, query, key, length_base=5.0)
        power = plain ** (np.log(T) / np.log(5))
        close(scaled, power / power.sum(-1, keepdims=True), 1e-12)


def test_fewer_than_16_keys_count_as_16(x64):
    counts = jnp.array([0, 1, 15, 16, 17, 512])
    wanted = np.log([16, 16, 16, 16, 17, 512]) / np.log(512)
    close(log_scale(counts, 512), wanted, 1e-15)
    assert log_scale(counts, 512)[-1] == 1


def test_a_floor_is_a_factor_from_8192_keys_on(x64):
    counts = jnp.array([0, 1, 8191, 8192, 16383, 16384])
    wanted = 1 + 0.1 * np.log([1, 1, 1, 2, 2, 3])
    close(floor_scale(counts), wanted, 1e-15)
    query, key, value = (
        np.random.default_rng(n).normal(size=(1, n, 1, 2)) for n in (1, 16384, 16384)
    )
    found = attention.softmax(query, key, value, length_scale="floor")
    close(found, attention.softmax(wanted[-1] * query, key, value), 1e-13)


def test_no_restriction_is_no_mask_and_a_broadcast_mask_has_every_key():
    seen = Visibility(jnp.arange(4)[None], jnp.arange(6)[None], length=6)
    assert seen.pairs() is None
    assert replace(seen, mask=jnp.ones((B, 1, 4, 1), bool)).pairs().shape[-1] == 6


WRONG = {
    "query_rank": ({"query": (T, N, H)}, [(T, N, H)]),
    "head_size": ({"query": (B, T, N, H + 1)}, [(B, T, N, H + 1), (B, T, K, H)]),
    "batch": ({"query": (B + 1, T, N, H)}, [(B + 1, T, N, H), (B, T, K, H)]),
    "keys": ({"key": (B, T - 1, K, H)}, [(B, T - 1, K, H), (B, T, K, V)]),
    "value_heads": ({"value": (B, T, 2, V)}, [(B, T, K, H), (B, T, 2, V)]),
    "query_heads": ({"query": (B, T, 5, H)}, [(B, T, 5, H), (B, T, K, H)]),
    "causal": (
        {"key": (B, 9, K, H), "value": (B, 9, K, V), "is_causal": True},
        [(B, T, N, H), (B, 9, K, H)],
    ),
    "bias": ({"bias": (B, K, T, T)}, [(B, N, T, T), (B, K, T, T)]),
    "segments": ({"segment_ids": (B, 9)}, [(B, 9), (B, T, N, H)]),
}


@pytest.mark.parametrize("changed, named", WRONG.values(), ids=WRONG)
def test_wrong_shapes_are_named(changed, named):
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, V)}
    arguments = {
        name: np.ones(x, int if name == "segment_ids" else np.float32)
        if isinstance(x, tuple)
        else x
        for name, x in (shapes | changed).items()
    }
    with pytest.raises(ValueError) as refusal:
        attention.softmax(**arguments)
    for shape in named:
        assert str(shape) in str(refusal.value)


def test_masks_are_boolean_and_implementations_known():
    arrays = [np.float32(x) for x in SOFTMAX.arrays()]
    with pytest.raises(ValueError, match="float32"):
        attention.softmax(*arrays, mask=np.ones((1, 1, T, T), np.float32))
    with pytest.raises(ValueError, match="'flash'.*rows, whole"):
        attention.softmax(*arrays, implementation="flash")


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 3, 5, 5)], ids=["keys", "pairs"])
def test_not_even_nan_comes_through_a_hidden_key(shape):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 5, 3, 4)).astype("f4") for _ in range(3))
    mask = np.broadcast_to(np.arange(5) != 3, shape)
    clean = attention.softmax(query, key, value, mask=mask)
    key[:, 3] = value[:, 3] = np.nan

    def total(query, key, value):
        return attention.softmax(query, key, value, mask=mask).sum()

    np.testing.assert_array_equal(
        attention.softmax(query, key, value, mask=mask), clean
    )
    for part in jax.grad(total, argnums=(0, 1, 2))(query, key, value):
        assert np.isfinite(part).all()


@pytest.mark.parametrize(
    "attend",
    [
        attention.softmax,
        attention.sparsemax,
        attention.entmax15,
        partial(attention.gau, divisor="count"),
        partial(attention.softmax, implementation="whole", length_base=4.0),
    ],
    ids=["softmax", "sparsemax", "entmax15", "gau", "whole"],
)
def test_no_keys_give_zeros_and_no_rows_give_no_rows(attend):
    arrays = [np.float32(x) for x in SOFTMAX.arrays(3)]
    query, key, value = arrays
    no_example = tuple(x[:0] for x in arrays)
    cases = (query, key[:, :0], value[:, :0]), (query[:, :0], key, value), no_example
    for case in cases:
        output, back = jax.vjp(attend, *case)
        assert output.shape == (*case[0].shape[:3], V) and not output.any()
        for part, array in zip(back(output), case, strict=True):
            assert part.shape == array.shape and not part.any()


def test_maps_of_nothing_have_the_shape_of_maps():
    query, key, _, lam = (np.float32(x) for x in DIFFERENTIAL.arrays(3))
    for rows, keys in ((0, 3), (3, 0)):
        read = row_map(
            softmax_weights, query[:, :rows], key[:, :keys], lam=lam[None, None]
        )
        assert read.shape == (B, N, rows, keys)


def test_only_floating_arrays_are_attended_to():
    arrays = [np.float32(x) for x in SOFTMAX.arrays(3)]
    for which, name in enumerate(("query", "key", "value")):
        wrong = [x.astype(int) if i == which else x for i, x in enumerate(arrays)]
        with pytest.raises(ValueError, match=f"{name} must be .*floating.*int"):
            attention.sparsemax(*wrong)


def test_the_backward_pass_forms_no_output_again():
    """Products of a block: scores and output; backward scores and four gradients."""
    arrays = [jax.ShapeDtypeStruct((3, 130, 2, 4), jnp.float32)] * 3

    def loss(*arrays):
        return jnp.square(attention.softmax(*arrays, is_causal=True)).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
    assert program.as_text().count(" dot(") == 7
