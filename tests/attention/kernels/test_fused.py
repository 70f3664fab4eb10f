"""Score mechanisms on the TPU kernel: interpreted on the CPU, and chosen for a TPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import score_laws
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from laws import SEGMENTS, B, H, K, N, S, T, V
from score_laws import DEFINITIONS, every_close, graded, jitted, single

from symjax import attention
from symjax.attention.core.devices import lowered_for
from symjax.attention.kernels import dispatch

FUSED = {"implementation": "tpu"}
NAMES = "softmax", "pairwise", "differential", "grouped_keys", "differential_v2"
MECHANISMS = {
    name: DEFINITIONS[name]._replace(attend=partial(DEFINITIONS[name].attend, **FUSED))
    for name in NAMES
}
LAWS = (
    score_laws.the_future_changes_nothing,
    score_laws.hidden_keys_change_nothing,
    score_laws.bfloat16_is_as_good_as_its_rounding,
)


@pytest.mark.parametrize("name", ["softmax", "differential"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws(law, name):
    law(MECHANISMS[name])


def test_a_lonely_token_sees_itself():
    score_laws.a_lonely_token_sees_itself(MECHANISMS["differential_v2"])


@pytest.mark.always
@pytest.mark.parametrize("name", NAMES)
def test_fused_rows_and_whole_agree(name):
    """Outputs and gradients, with all options, and with more keys than queries."""
    scored = DEFINITIONS[name]
    arrays = single(scored.arrays(T, S if scored.crosses else T))
    options = {"is_causal": True, "window": (9, None), "mask_self": True, "scale": 0.6}
    if scored.crosses:
        options |= {"length_base": 5.0, "mask": keys_that_exist(S)}
    else:
        options |= {"length_base": 5.0, "segment_ids": SEGMENTS}
    fused, rows, whole = (
        graded(partial(scored.attend, implementation=name), *arrays, **options)
        for name in ("tpu", "rows", "whole")
    )
    every_close(jax.tree.leaves(fused), jax.tree.leaves(rows), 1e-5)
    every_close(jax.tree.leaves(whole), jax.tree.leaves(rows), 1e-5)


def test_the_length_scale_of_a_program_with_float64_is_that_of_its_inputs(x64):
    arrays = single(DEFINITIONS["softmax"].arrays(T, T))
    options = {"is_causal": True, "length_base": 512.0}
    attend = DEFINITIONS["softmax"].attend
    fused, rows = (
        graded(partial(attend, implementation=name), *arrays, **options)
        for name in ("tpu", "rows")
    )
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(fused))
    every_close(jax.tree.leaves(fused), jax.tree.leaves(rows), 1e-5)


def keys_that_exist(keys):
    """Return a mask with holes, and one example without any key."""
    mask = np.random.default_rng(4).random((B, 1, 1, keys)) < 0.7
    mask[1] = False
    return mask


def test_not_even_nan_comes_through_a_hidden_key():
    scored = MECHANISMS["differential"]
    query, key, value, lam = single(scored.arrays())
    mask = keys_that_exist(T)
    seen = mask[:, 0, 0, :, None, None]
    form = jitted(scored.attend, mask=mask)
    clean = form(query, key, value, lam)
    assert not clean[1].any() and clean[0].any()
    key, value = (np.where(seen, x, np.nan) for x in (key, value))
    output, gradients = graded(scored.attend, query, key, value, lam, mask=mask)
    np.testing.assert_array_equal(output, clean)
    assert all(np.isfinite(part).all() for part in gradients)


def test_a_stretch_of_time_on_each_device_runs_the_kernel_on_gathered_keys():
    scored = MECHANISMS["differential"]
    arrays = single(scored.arrays(18))
    options = {"is_causal": True, "window": (7, None), "length_base": 5.0}
    segments = SEGMENTS[:, :18]
    stretch = P(None, "x")

    @partial(
        jax.shard_map,
        mesh=jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=(stretch, stretch, stretch, P(), stretch),
        out_specs=stretch,
        check_vma=False,
    )
    def split(query, key, value, lam, segments):
        options_here = {**options, "segment_ids": segments, "axis_name": "x"}
        return scored.attend(query, key, value, lam, **options_here)

    found = graded(lambda *arrays: split(*arrays, segments), *arrays)
    wanted = graded(scored.attend, *arrays, segment_ids=segments, **options)
    every_close(jax.tree.leaves(found), jax.tree.leaves(wanted), 1e-5)


def shapes(length=T, size=H, dtype=jnp.float32, heads=N):
    given = (B, length, heads, size), (B, length, K, size), (B, length, K, V)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in given]


REFUSED = {
    "bias": ({}, {"bias": jnp.ones((1, N, T, T))}, "no bias"),
    "alibi": ({}, {"alibi": jnp.ones(N)}, "no alibi"),
    "sink": ({}, {"sink": jnp.ones(N)}, "no log_decay and no sink"),
    "mask": ({}, {"mask": jnp.ones((1, 1, T, T), bool)}, r"got \(1, 1, 19, 19\)"),
    "positions": ({}, {"positions": jnp.arange(T)[None]}, "without positions"),
    "scale": ({}, {"scale": jnp.ones(())}, "not an array"),
    "float16": ({"dtype": jnp.float16}, {}, "got float16"),
    "head": ({"size": 1024}, {}, "at most 512 dimensions, got 1024"),
    "group": ({"size": 512, "heads": 34 * K}, {}, "at most 16384 lanes, got 17408"),
    "small": ({"size": 40, "heads": 129 * K}, {}, "at most 16384 lanes, got 16512"),
}


@pytest.mark.parametrize("given, options, words", REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_does_not_serve_is_said_and_runs_by_rows(given, options, words):
    def call(*arrays, **chosen):
        return attention.softmax(*arrays, **options, **chosen)

    with pytest.raises(ValueError, match=f"'tpu' does not support this call.*{words}"):
        jax.eval_shape(partial(call, **FUSED), *shapes(**given))
    heads = given.get("heads", N)
    assert jax.eval_shape(call, *shapes(**given)).shape == (B, T, heads, V)


def test_an_interpreted_kernel_asks_for_what_its_interpreter_needs():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("x",))
    call = partial(attention.softmax, **FUSED)
    split = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match="does not support .* check_vma=False"):
        jax.eval_shape(split, *shapes())


def test_scores_beyond_their_rounding_have_finite_gradients():
    """Recomputed scores differ by more than the range of float32 exponents."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=x.shape).astype(np.float32) for x in shapes(length=60)
    )
    call = partial(attention.softmax, **FUSED)
    _, pull = jax.vjp(call, 1e10 * query, key, value)
    gradients = pull(np.ones((B, 60, N, V), np.float32))
    assert all(np.isfinite(x).all() for x in gradients)


def test_a_mechanism_of_other_weights_has_no_such_implementation():
    with pytest.raises(ValueError, match="'tpu' is unknown: choose from rows, whole"):
        jax.eval_shape(partial(attention.sparsemax, **FUSED), *shapes())


@pytest.mark.parametrize("former, present", dispatch.ALIASES.items())
def test_former_names_of_implementations_mean_the_present_ones(former, present):
    call = partial(attention.softmax, implementation=former)
    given = shapes(length=60)
    if present == "tpu":
        assert jax.eval_shape(call, *given).shape == (B, 60, N, V)
    else:
        with pytest.raises(ValueError, match=f"'{present}' does not support"):
            jax.eval_shape(call, *given)


# A TPU that is not here: programs are lowered for it, not compiled.
TPU = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")


def runs_the_kernel(platform, *, length=256, kind=AxisType.Auto, device=TPU, count=1):
    """Return whether the gradient that is lowered for a platform has the kernel."""
    attend = partial(attention.softmax, is_causal=True)
    if kind == AxisType.Manual:
        attend = jax.shard_map(attend, in_specs=P("x"), out_specs=P("x"))
        kind = AxisType.Auto

    def loss(*arrays):
        return attend(*arrays).astype(jnp.float32).sum()

    mesh = AbstractMesh((count,), ("x",), axis_types=(kind,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), lowered_for("tpu", "cpu"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes(length, 64))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    parts = [f"attention_{x}" in text for x in ("forward", "row_sums", "backward")]
    assert all(parts) or not any(parts)
    return all(parts)


def test_the_kernel_is_chosen_where_the_program_is_lowered():
    assert runs_the_kernel("tpu")
    assert not runs_the_kernel("cpu")


def test_the_kernel_is_for_a_device_of_its_own():
    """XLA cannot split a kernel, so arrays that it may split run by row blocks."""
    assert not runs_the_kernel("tpu", count=2)
    assert runs_the_kernel("tpu", count=2, kind=AxisType.Manual)
    assert runs_the_kernel("tpu", kind=AxisType.Explicit)


@pytest.mark.parametrize(
    "x64, words", [(False, "in a jax.shard_map"), (True, "jax_enable_x64 off")]
)
def test_a_forced_kernel_says_what_it_lacks_on_a_tpu(x64, words):
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=TPU)
    forced = partial(attention.softmax, implementation="tpu")
    with jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(x64):
        with pytest.raises(ValueError, match=f"does not support this call: .*{words}"):
            jax.eval_shape(forced, *shapes(256, 64))


def test_few_rows_and_programs_for_no_tpu_do_without_the_kernel():
    assert not runs_the_kernel("tpu", length=100)
    assert not runs_the_kernel("tpu", device=None)
