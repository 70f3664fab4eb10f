"""Kernels of the Performer and of linear attention for NVIDIA GPUs.

Interpreted on the CPU they equal the scan, which other tests compare with the
definition, and they compile for an H200. The interpreter rounds operands as tensor
cores do.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import compiled_for_an_h200, on, served
from interpreted import (
    B,
    K,
    N,
    bfloat16_agrees,
    differentiated,
    padding,
    seen_by,
    segments,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from laws import close, same

from symjax.attention import linear_causal, performer_causal
from symjax.attention.core.devices import lowered_for
from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.core.operands import Tokens
from symjax.attention.features import PLAIN
from symjax.attention.kernels.gpu.feature_operands import (
    FeatureForm,
    rounded,
)
from symjax.attention.kernels.gpu.recurrent import GpuFeatures, _rows_and_underflow
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.attention.recurrent import engine
from symjax.attention.recurrent.normalised import Normalised


class Form(NamedTuple):
    """Features by name; those of the Performer have rows of a projection."""

    features: str
    rows: int = 0
    size: int = 32
    width: int = 64
    length: int = 200  # no multiple of a chunk

    @property
    def kernel(self):
        table = RANDOM_FEATURES if self.rows else PLAIN
        return GpuFeatures(Normalised(table[self.features]), interpret=True)

    @property
    def projection(self):
        drawn = np.random.default_rng(4).normal(size=(self.rows, self.size))
        return drawn.astype(np.float32)

    def arrays(self, scale=1.0, mean=0.0):
        rng = np.random.default_rng(0)
        shape = B, self.length
        query = rng.normal(size=(*shape, N, self.size)) * scale
        key = rng.normal(size=(*shape, K, self.size)) * scale
        value = rng.normal(size=(*shape, K, self.width)) + mean
        return [x.astype(jnp.bfloat16) for x in (query, key, value)]

    def random(self, rows=None):
        rows = jnp.asarray(self.projection if rows is None else rows)
        return FeatureParameters(rows, jnp.float32(self.size**-0.5))

    def attend(self, query, key, value, rows=None, *, mask=None, segment_ids=None):
        tokens = Tokens(query, key, value, (), mask, segment_ids)
        random = self.random(rows) if self.rows else None
        fallback = engine.InXla(self.kernel.recurrence, 64)
        return self.kernel.attend(tokens, random, fallback)

    def scan(self, *given, rows=None, **seen):
        if not self.rows:
            return linear_causal(*given, features=self.features, **seen)
        rows = self.projection if rows is None else rows
        return performer_causal(*given, rows, features=self.features, **seen)

    def agrees(self, given, worst=2.5e-3, **seen):
        attend, exact = partial(self.attend, **seen), partial(self.scan, **seen)
        bfloat16_agrees(attend, exact, given, worst)


ODD = Form("positive", 70)  # features padded to two blocks
FORMS = {
    "positive": ODD,
    "hyperbolic": Form("hyperbolic", 11, 16, 32),
    "relu of projections": Form("relu", 40, 64, 16),
    "elu": Form("elu"),
    "relu": Form("relu", size=24),
    "relu2": Form("relu2", size=128, width=128, length=130),
}
ALL = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SEEN = {"all": (), "mask": ("mask",), "both": ("mask", "segment_ids")}


@pytest.mark.always
@ALL
@pytest.mark.parametrize("names", SEEN.values(), ids=SEEN)
def test_it_equals_the_scan(names, form):
    """Rounding outputs and gradients to bfloat16 is 1.7e-3 of the limit of 2.5e-3."""
    form.agrees(form.arrays(), **seen_by(form.length, *names))


def test_values_with_a_mean_cost_digits_of_gradients():
    """States with all values are rounded, and gradients are differences of them."""
    for form in (ODD, FORMS["elu"]):
        form.agrees(form.arrays(mean=4.0), worst=8e-3)


@pytest.mark.always
def test_rows_that_lost_their_keys_are_exact_all_the_same():
    """Rows see only keys that are tiny beside later keys of the same chunk."""
    query, key, value = ODD.arrays(4.0)
    key[:, :50] *= 4
    key[:, 50:] /= 8
    given = query, key, value
    maps, inputs = ODD.kernel.recurrence.features, (*given, ODD.random())
    _, underflows = _rows_and_underflow(maps, True, (None, None), inputs)
    assert underflows[:, :50].all()
    seen = seen_by(ODD.length, "segment_ids")
    rows = np.asarray(ODD.attend(*given, **seen), np.float32)
    wanted = np.asarray(ODD.scan(*(np.float32(x) for x in given), **seen))
    close(rows[:, :50], wanted[:, :50], 2**-8)
    ODD.agrees(given, **seen)


def test_what_fills_the_last_chunk_belongs_to_no_earlier_segment():
    """The first segment ends with a chunk; its exponents are far above the second's."""
    query, key, value = ODD.arrays()
    key[:, 192:] *= 8
    ids = np.broadcast_to(np.arange(ODD.length) >= 192, (B, ODD.length))
    ODD.agrees((query, key, value), segment_ids=ids.astype(np.int32))


@pytest.mark.parametrize("name", ["positive", "elu"])
def test_a_hidden_nan_reaches_nothing(name):
    form = FORMS[name]
    given, mask = form.arrays(), padding(form.length)
    hidden = ~mask[:, 0, 0]
    bad = [np.array(x) for x in given]
    for x in bad[1:]:
        x[hidden] = np.nan
    attend = partial(form.attend, mask=mask, segment_ids=segments(form.length))
    one, two = (differentiated(attend, x, jnp.bfloat16) for x in (given, bad))
    for clean, found in zip(one, two, strict=True):
        same(np.asarray(found, np.float32), np.asarray(clean, np.float32))
    assert not any(np.asarray(x)[hidden].any() for x in one[2:])
    assert not np.asarray(one[0])[0, :140].any()  # rows that see nothing


@pytest.mark.parametrize("name", ["positive", "elu"])
def test_a_nan_stays_in_its_segment(name):
    """It ends with a chunk, because inside a chunk zeros are multiplied by the NaN."""
    form = FORMS[name]
    given = form.arrays()
    segment_ids = np.broadcast_to(np.arange(form.length) >= 128, (B, form.length))
    bad = [np.array(x) for x in given]
    for x in bad:
        x[0, 20] = np.nan
    attend = partial(form.attend, segment_ids=segment_ids.astype(np.int32))
    one, two = (differentiated(attend, x, jnp.bfloat16) for x in (given, bad))
    for clean, found in zip(one, two, strict=True):
        clean, found = (np.asarray(x, np.float32) for x in (clean, found))
        same(found[:, 128:], clean[:, 128:])
        same(found[1], clean[1])
        assert np.isnan(found[0, 20]).all()


def test_rounding_keeps_what_is_no_number():
    bits = np.array([0x7FFFFFFF, 0x7FC00000, 0x7F800000, 0x3F800FFF], np.uint32)
    found = np.asarray(rounded(jnp.asarray(bits.view(np.float32))))
    assert np.isnan(found[:2]).all() and np.isposinf(found[2]) and found[3] == 1


EXTREMES = {
    "queries and keys of 30": (ODD, 30.0, 0.0, 1.0),
    "elu far below 0": (FORMS["elu"], 1.0, -50.0, 1.0),
    "tiny relu": (FORMS["relu"], 1e-20, 0.0, 1.0),
    "tiny relu, tiny changes": (FORMS["relu"], 1e-20, 0.0, 1e-18),
    "tiny relu of projections": (FORMS["relu of projections"], 1e-20, 0.0, 1.0),
}


@pytest.mark.parametrize("form, scale, shift, size", EXTREMES.values(), ids=EXTREMES)
def test_extremes_are_as_in_the_scan(form, scale, shift, size):
    query, key, value = form.arrays(scale)
    query, key = (np.asarray(x + shift, jnp.bfloat16) for x in (query, key))
    given = query, key, value
    found, wanted = (
        differentiated(lambda *x, f=f: f(*x) * size, given, jnp.bfloat16)
        for f in (form.attend, form.scan)
    )
    for one, two in zip(found, wanted, strict=True):
        one, two = (np.asarray(x, np.float64) for x in (one, two))
        assert np.linalg.norm(one - two) <= 5e-3 * np.linalg.norm(two)


def test_a_row_that_lost_its_keys_is_not_divided():
    given = jnp.array([0, 1e-39, 1e-21, np.nan, 2])
    found = np.asarray(FeatureForm(has_exponents=True).inverse(given))
    same(found, [0, 0, 0, np.nan, 0.5])


def test_no_weight_of_a_query_is_above_1():
    """Exponents are so large that their sum with the maximum is rounded."""
    x, highest = np.random.default_rng(0).normal(size=(2, 300, 40)).astype(np.float32)
    x, highest = x * 1e9, highest[:1] * 1e9
    shift = (x + highest).max(axis=1, keepdims=True)
    weights = np.asarray(
        FeatureForm(has_exponents=True).query_weights(x, highest, shift)
    )
    same(weights.max(axis=1), np.ones(300))


def test_a_later_token_changes_no_earlier_chunk():
    query, key, value = ODD.arrays()
    rows = jax.jit(ODD.attend)
    before = np.asarray(rows(query, key, value), np.float32)
    for x in (query, key, value):
        x[:, 130:] = 3
    after = np.asarray(rows(query, key, value), np.float32)
    same(after[:, :128], before[:, :128])
    assert np.abs(after[:, 130:] - before[:, 130:]).max() > 0.1


def test_a_projection_gets_the_gradient_of_the_scan():
    given = [jnp.asarray(x) for x in ODD.arrays()]

    def of(form, rows):
        return form(rows).astype(jnp.float32).sum()

    rows = jnp.asarray(ODD.projection)
    one = jax.grad(partial(of, lambda rows: ODD.attend(*given, rows)))(rows)
    two = jax.grad(partial(of, lambda rows: ODD.scan(*given, rows=rows)))(rows)
    assert np.linalg.norm(one - two) <= 5e-3 * np.linalg.norm(two)


def test_many_calls_at_once_are_each_by_itself():
    given = [jnp.asarray(x)[:, None] for x in ODD.arrays()]

    def graded(*given):
        def loss(*given):
            return ODD.attend(*given).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(*given)

    found = jax.jit(jax.vmap(graded))(*given)
    for i in range(B):
        alone = jax.jit(graded)(*(x[i] for x in given))
        for one, two in zip(found, alone, strict=True):
            close(np.asarray(one[i], np.float32), np.asarray(two, np.float32), 2**-8)


def test_many_calls_in_a_shard_map_vary_alike(monkeypatch):
    """Token numbers vary over the axes, too, without a mask or segments."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    on("9.0", monkeypatch)
    call = partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    like = jax.ShapeDtypeStruct((B, 1, 128, N, 16), jnp.bfloat16)
    with lowered_for("cuda"):
        traced = jax.jit(call(jax.vmap(performer_causal))).trace(like, like, like)
    assert "pallas_call" in str(traced.jaxpr)
    assert traced.out_info.shape == like.shape


LARGE = Form("positive", 1100)
SERVED = {
    "bfloat16": (ODD, {}, True),
    "float32": (ODD, {"dtype": np.float32}, False),
    "short": (ODD, {"length": 100}, False),
    "values of 256": (ODD, {"width": 256}, False),
    "waves": (Form("trigonometric", 20), {}, False),
    "squares": (Form("squared"), {}, False),
    "many features": (LARGE, {}, False),
    "keys of 48": (Form("elu"), {"size": 48}, True),
}


@pytest.mark.parametrize("form, sizes, takes", SERVED.values(), ids=SERVED)
def test_what_it_supports(form, sizes, takes):
    sizes = {"size": form.size} | sizes
    rows = jax.ShapeDtypeStruct((form.rows, sizes["size"]), np.float32)
    random = FeatureParameters(rows, jax.ShapeDtypeStruct((), np.float32))
    kernel = GpuFeatures(form.kernel.recurrence)
    assert served(kernel, random if form.rows else None, **sizes) == takes


def relu_of_192(query, key, value):
    rows = jnp.ones((192, query.shape[3]))
    return performer_causal(query, key, value, rows, features="relu")


CALLS = {
    "performer": performer_causal,
    "relu of 192 projections": relu_of_192,
    "elu": linear_causal,
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64, 192])
@pytest.mark.parametrize("name", CALLS)
def test_it_compiles_for_an_h200_and_is_chosen(name, size):
    program = compiled_for_an_h200(CALLS[name], (4, size), (2, size), (2, 128))
    assert "__gpu$xla.gpu.triton" in program.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_projections_of_three_heads_compile_for_an_h200(dtype):
    """XLA merged the products of queries and keys into one that it had no code for."""
    heads = [(3, 16)] * 3
    compiled_for_an_h200(performer_causal, *heads, dtypes=[dtype] * 3)
