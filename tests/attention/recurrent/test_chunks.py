"""The two executions of recurrences: chunks in turn, and in parallel."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import SEGMENTS, B, H, K, T, close, hiding, inputs

from symjax.attention.core.devices import lowered_for
from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import einsum
from symjax.attention.cosine import RECURRENCE, cosine_causal
from symjax.attention.delta_rule import DeltaRule, delta_causal
from symjax.attention.features import PLAIN
from symjax.attention.gated_linear import Decayed, decay_causal
from symjax.attention.linear import linear_causal
from symjax.attention.performer import performer_causal
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.attention.recurrent import engine, schedule
from symjax.attention.recurrent.chunks import layout, scan
from symjax.attention.recurrent.normalised import Normalised
from symjax.attention.recurrent.schedule import run_as_one_chunk, run_parallel_chunks

LOGITS = np.random.default_rng(3).normal(size=(B, T, K, H))
BETA = 2 / (1 + np.exp(-LOGITS[..., 0]))
HEAD, CHANNEL = -np.exp(3 * LOGITS[..., :1]), -np.exp(3 * LOGITS)
SHARED = -np.array([[0.0], [0.3], [np.inf]])
PROJECTION = FeatureParameters(
    np.random.default_rng(4).normal(size=(7, H)), np.asarray(H**-0.5)
)
CASES = {  # recurrence, parameters, operands
    "decay of all": (Decayed(), SHARED, ()),
    "decay of heads": (Decayed(), None, (HEAD,)),
    "decay of channels": (Decayed(), None, (CHANNEL,)),
    "delta rule": (DeltaRule(), SHARED, (BETA,)),
    "delta rule with gates": (DeltaRule(), None, (BETA, CHANNEL)),
    "linear": (Normalised(PLAIN["elu"]), None, ()),
    "cosine": (RECURRENCE, None, ()),
    "performer": (Normalised(RANDOM_FEATURES["positive"]), PROJECTION, ()),
}
SEEN = {
    "all": {},
    "some in segments": {"segment_ids": SEGMENTS, "mask": hiding(T)},
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("case", CASES)
def test_parallel_chunks_equal_chunks_in_turn(case, seen, x64):
    """Chunks of 3 tokens in spans of 9 tokens; neither divides the length."""
    recurrence, parameters, operands = CASES[case]
    if parameters is SHARED and seen != "all":
        pytest.skip("decays are shared where all tokens are seen")
    query, key, value = inputs()
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    sizes = B, K, key.shape[-1], value.shape[-1]
    state = recurrence.empty(parameters, sizes, jnp.float64)
    earlier = [x[:, ::4] for x in (query, key, value, *operands)]
    before = layout(Tokens(*earlier[:3], tuple(earlier[3:])))
    state, _ = run_as_one_chunk(recurrence, parameters, state, before)

    def run(form, parameters, state, *arrays):
        tokens = Tokens(*arrays[:3], arrays[3:], **SEEN[seen])
        state, rows = form(parameters, state, layout(tokens))
        sums = state.sums
        if (highest := getattr(state, "running_max", None)) is not None:
            sums = sums * jnp.exp(highest)[..., None]
        return jnp.sin(rows).sum() + jnp.sin(sums).sum(), (rows, sums)

    def graded(form):
        arrays = parameters, state, query, key, value, *operands
        wanted = tuple(i for i, x in enumerate(arrays) if jax.tree.leaves(x))
        graded = jax.grad(partial(run, form), wanted, has_aux=True)
        return jax.tree.leaves(jax.jit(graded)(*arrays))

    in_turn = partial(scan, partial(run_as_one_chunk, recurrence), 5)
    wanted = graded(in_turn)
    for as_examples in (False, True):
        many = partial(run_parallel_chunks, recurrence, 3, as_examples)
        for one, two in zip(wanted, graded(partial(scan, many, 9)), strict=True):
            close(two, one, 1e-11)


def test_no_loop_on_a_cpu_writes_parts_of_arrays_of_16_bits():
    """Its compiler in jaxlib 0.10 converts all of such an array in each turn."""

    def loss(*given):
        return linear_causal(*given).astype(jnp.float32).sum()

    like = jax.ShapeDtypeStruct((1, 40_000, 2, 16), jnp.bfloat16)
    graded = jax.jit(jax.grad(loss, (0, 1, 2))).lower(like, like, like)
    loops = re.findall(r"stablehlo\.while.*", graded.as_text())
    assert loops and not any("bf16" in loop for loop in loops)


@pytest.mark.parametrize("features", ["relu", "relu2"])
@pytest.mark.parametrize(
    "keys, values, cotangents",
    [(1e-20, 1e-10, 1e-10), (1e-30, 1, 1e-9), (1e10, 1e10, 1e18), (1e25, 1e10, 1e5)],
)
def test_gradients_stay_in_range_where_they_are(features, keys, values, cotangents):
    """Products of cotangent and numerator of a row overflow; their ratios do not."""
    if features == "relu2":
        keys = keys**0.5
    query, key, value = (np.abs(x[:1]) for x in inputs())

    def graded(key, value, cotangent, dtype):
        given = [jnp.asarray(x, dtype) for x in (query, key, value)]
        attend = partial(linear_causal, features=features)
        output, pull = jax.vjp(attend, *given)
        return pull(jnp.full_like(output, cotangent).at[:, ::3].multiply(-2))

    found = graded(key * keys, value * values, cotangents, jnp.float32)
    with jax.enable_x64(True):
        wanted = graded(key * keys, value * values, cotangents, jnp.float64)
    for one, two in zip(found, wanted, strict=True):
        close(one, two, 2e-5)


@pytest.mark.parametrize(
    "form",
    [cosine_causal, performer_causal, partial(decay_causal, log_decay=SHARED[:, 0])],
)
def test_accelerators_take_chunks_of_their_tiles(form):
    query = jax.ShapeDtypeStruct((1, 512, 3, 8), jnp.float32)
    platforms = "cpu", "tpu", "cuda"
    with lowered_for(*platforms):
        traced = jax.jit(partial(form, chunk_size=64)).trace(query, query, query)
        texts = {
            platform: traced.lower(lowering_platforms=(platform,)).as_text()
            for platform in platforms
        }
    pairs = {platform: "128x128x" in text for platform, text in texts.items()}
    assert pairs == {"cpu": False, "tpu": True, "cuda": True}


def elu(query, key, value):
    return linear_causal(query, key, value, features="elu")


def decays(query, key, value):
    return decay_causal(query, key, value, -jnp.abs(key[..., 0]))


def gates(query, key, value):
    return decay_causal(query, key, value, -jnp.abs(key))


def erasing(query, key, value):
    return delta_causal(query, key, value, jnp.abs(key[..., 0]))


def cancelling(query, key, value):
    return linear_causal(query, key, value, features="squared")


@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4), (1, 1, 3, 4)], ids=str)
@pytest.mark.parametrize(
    "form", [performer_causal, cosine_causal, elu, decays, gates, erasing]
)
def test_there_may_be_no_example_and_no_token(form, shape, on_devices):
    query = jnp.ones(shape)
    assert form(query, query, query).shape == shape
    assert jax.grad(lambda x: form(x, x, x).sum())(query).shape == shape


@pytest.mark.parametrize("mapped", [(0, 1, 2), (None, None, 1), (0, None, None)])
@pytest.mark.parametrize(
    "form", [performer_causal, cosine_causal, elu, decays, gates, erasing]
)
def test_a_gradient_of_many_is_that_of_each(form, mapped, on_devices):
    """Two chunks through `jax.vmap`, along any axes and over one argument alone."""
    rng = np.random.default_rng(7)
    arrays = [rng.normal(size=(1, 70, 2, 4)).astype(np.float32) / 4 for _ in range(3)]
    for i, axis in enumerate(mapped):
        if axis is not None:
            arrays[i] = np.stack([arrays[i], arrays[i][:, ::-1]], axis)

    def many(*arrays):
        return jnp.sin(jax.vmap(form, mapped)(*arrays)).sum()

    def each(*arrays):
        chosen = [
            [x if axis is None else jnp.take(x, n, axis) for n in range(2)]
            for x, axis in zip(arrays, mapped, strict=True)
        ]
        return sum(jnp.sin(form(*one)).sum() for one in zip(*chosen, strict=True))

    found, wanted = (jax.jit(jax.grad(f, (0, 1, 2)))(*arrays) for f in (many, each))
    for one, two in zip(found, wanted, strict=True):
        close(one, two, 1e-5)


@pytest.mark.parametrize("form", [linear_causal, performer_causal])
def test_a_gradient_of_many_states_is_that_of_each(form, on_devices):
    rng = np.random.default_rng(8)
    query, key = (rng.normal(size=(1, 70, 2, 4)).astype(np.float32) for _ in range(2))
    values = rng.normal(size=(3, 1, 70, 2, 5)).astype(np.float32)

    def loss(values, apply):
        output, state = apply(lambda x: form(query, key, x, return_state=True), values)
        return jnp.sin(output).sum() + jnp.sin(state.sums).sum()

    many = jax.jit(jax.grad(partial(loss, apply=lambda f, x: jax.vmap(f)(x))))(values)
    each = jax.jit(jax.grad(partial(loss, apply=jax.lax.map)))(values)
    close(many, each, 1e-5)


PASSES = "6 of bf16"
NARROW = {
    performer_causal: {"HIGH", "HIGHEST", PASSES},  # exponents are exact
    erasing: {"HIGH", PASSES},  # an inverse
    elu: {"HIGH"},
    gates: {"HIGH", PASSES},  # a sum over time
    cosine_causal: {PASSES},
    cancelling: {PASSES},
}


@pytest.mark.parametrize("form", NARROW, ids=lambda form: form.__name__)
def test_products_are_as_exact_as_the_inputs(form):
    """GPU tensor cores have no full float32 precision, and 16-bit inputs need them."""

    def loss(*arrays):
        return form(*arrays).astype(jnp.float32).sum()

    def precisions(dtype):
        arrays = [jax.ShapeDtypeStruct((1, 256, 2, 8), dtype)] * 3
        with lowered_for("cuda"):
            graded = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays)
            text = graded.lower(lowering_platforms=("cuda",)).as_text()
        products = [x for x in text.splitlines() if "stablehlo.dot_general" in x]
        return {x for product in filter(of_matrices, products) for x in how(product)}

    def of_matrices(product):
        """Return whether a product has two matrices: no vector and no scalar."""
        counts = []
        for of in ("batching", "contracting"):
            found = re.search(rf"{of}_dims = \[(.*?)\] x", product)
            counts.append(len(found[1].split(",")) if found and found[1] else 0)
        shapes = re.search(r": \(tensor<(\S+)>, tensor<(\S+)>\)", product).groups()
        return all(x.count("x") > sum(counts) for x in shapes)

    def how(product):
        if "algorithm" in product:
            read = r"lhs_precision_type = (\w+),.* num_primitive_operations = (\d)"
            kind, passes = re.search(read, product).groups()
            return [f"{passes} of {kind}"]
        return re.search(r"precision = \[(\w+), (\w+)\]", product).groups()

    exponents = {PASSES} if form is performer_causal else set()
    assert precisions(jnp.float32) == {"HIGHEST"} | exponents
    assert precisions(jnp.bfloat16) == NARROW[form]


@pytest.mark.parametrize("form", [performer_causal, cosine_causal, decays, erasing])
def test_on_a_gpu_the_chunks_of_a_span_are_one_product(form, monkeypatch, x64):
    """At most `PARALLEL_TOKENS_ON_GPU` tokens, if jax sees a GPU."""
    query, key, value = inputs(300)
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    taken = []

    def loss(*arrays):
        return jnp.sin(form(*arrays)).sum()

    def accelerator(*operands, default, **_):
        return default(*operands)

    def parallel(recurrence, size, as_examples, *rest):
        taken.append((size, as_examples, rest[-1].visible.shape[1]))
        return run_parallel_chunks(recurrence, size, as_examples, *rest)

    wanted = jax.grad(loss, (0, 1, 2))(query, key, value)
    monkeypatch.setattr(engine, "by_platform", accelerator)
    monkeypatch.setattr(schedule, "backend", lambda: "gpu")
    monkeypatch.setattr(schedule, "xla_keeps_arrays_whole", lambda: True)
    monkeypatch.setattr(schedule, "run_parallel_chunks", parallel)
    monkeypatch.setattr(
        schedule, "PARALLEL_TOKENS_ON_GPU", 256 * query.shape[0] * query.shape[2]
    )
    jax.clear_caches()
    found = jax.grad(loss, (0, 1, 2))(query, key, value)
    jax.clear_caches()
    assert {*taken} == {(128, True, 256)}
    for one, two in zip(found, wanted, strict=True):
        close(one, two, 1e-11)


@pytest.mark.parametrize("form", [cosine_causal, erasing])
def test_one_export_serves_a_cpu_and_accelerators(form):
    """A CPU must accept the precision that GPUs multiply in, although it does not use
    it."""

    def loss(*arrays):
        return form(*arrays).astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((1, 70, 2, 8), jnp.bfloat16)] * 3
    platforms = "cpu", "cuda", "rocm", "tpu"
    graded = jax.jit(jax.grad(loss, (0, 1, 2)))
    with lowered_for(*platforms):
        found = jax.export.export(graded, platforms=platforms)(*arrays)
    assert found.platforms == platforms


@pytest.mark.parametrize("size", [2.5, jnp.int32(4), "4"], ids=str)
@pytest.mark.parametrize("function", [linear_causal, cosine_causal, delta_causal])
def test_a_chunk_size_that_is_no_int_is_refused(function, size):
    more = (BETA,) if function is delta_causal else ()
    message = f"{function.__name__}: chunk_size must be an int, got {size!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*inputs(), *more, chunk_size=size)


@pytest.mark.parametrize(
    "spec",
    [
        "bkgtm,bksm->bkgts",
        "bksm,bksv->bkmv",
        "bkgtm,bkm->bkgt",
        "bkgtm,bkmv->btkgv",  # K leaves B, and T leaves G
        "bkgnth,bknsh->bkgnts",
        "btnh,btng->bnhg",
    ],
)
def test_products_with_merged_axes_are_those_of_numpy(spec, x64):
    sizes = dict(zip("bkgtsmvhn", (2, 3, 4, 5, 7, 6, 9, 8, 10), strict=True))
    rng, names = np.random.default_rng(0), spec.split("->")[0].split(",")
    arrays = [rng.normal(size=[sizes[c] for c in name]) for name in names]
    found = jax.jit(partial(einsum, spec))(*arrays)
    np.testing.assert_allclose(found, np.einsum(spec, *arrays), rtol=1e-12, atol=1e-12)


def test_an_operand_of_a_product_may_be_broadcast():
    query, key = jnp.ones((2, 3, 4, 5, 6)), jnp.ones((1, 3, 7, 6))
    found = einsum("bkgth,bksh->bkgts", query, key)
    np.testing.assert_array_equal(found, np.full((2, 3, 4, 5, 7), 6))
