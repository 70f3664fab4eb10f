"""Feature maps, the linear engine and the Performer against published implementations.

The files with their outputs and gradients are not part of this project. Where they are
absent these tests are skipped.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import close

from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.linear import linear, linear_causal
from symjax.attention.performer import performer, performer_causal
from symjax.attention.random_features import RANDOM_FEATURES

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "conformance"
NAMES = {"positive": "positive", "sincos": "trigonometric", "relu": "relu"}
KINDS = ["pos_basic_m_gt_d", "sincos_scale0p3", "relu_proj"]
CASES = [*KINDS, "pos_m_lt_d", "pos_scaling1", "pos_tiny_scale"]


def load(name):
    path = FOLDER / f"performer_{name}.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in ../shared/conformance")
    with np.load(path) as file:
        return dict(file)


def gradients(form, case):
    """Return the gradients of Σ output · ct for query, key and value."""

    def loss(*arrays):
        return (form(*arrays) * case["ct"]).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(case["q"], case["k"], case["v"])


def has_the_gradients(form, case, name, tolerance):
    for part, letter in zip(gradients(form, case), "qkv", strict=True):
        close(part, case[name.format(letter)], tolerance)


@pytest.mark.parametrize("name", CASES)
def test_google_has_the_same_features_but_for_its_epsilon(name):
    """Google divides queries by the maximum of a row, keys by the maximum of all time,
    and both by √M."""
    case = load(name)
    rows, kind = case["projection"], str(case["kind"])
    scale = rows.shape[1] ** -0.5 if case["normalize_data"] else 1.0
    draw = FeatureParameters(jnp.asarray(rows), jnp.asarray(scale))
    maps = RANDOM_FEATURES[NAMES[kind]]
    for letter, axes in (("q", 3), ("k", (1, 3))):
        wanted = case[f"google_phi_{letter}"]
        features = maps.key(case[letter], draw)
        if kind == "relu":
            close(features.weights(), wanted - case["feature_eps"], 2e-6)
            continue
        query = maps.query(case[letter], draw)
        reference = query if kind == "positive" else features
        axes = axes if kind == "positive" else 1
        highest = reference.exponent.max(axes, keepdims=True)
        ours = features.times_exp(-highest).weights()
        epsilon = case["feature_eps"] if kind == "positive" else 0
        close(ours, wanted * len(rows) ** 0.5 - epsilon, 2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_google_has_the_same_outputs_for_its_features(name):
    case = load(name)
    features = case["google_phi_q"], case["google_phi_k"]
    for form, kind in ((linear, "bidir"), (linear_causal, "causal")):
        output = form(*features, case["v"], features="identity")
        close(output, case[f"google_out_{kind}"], 1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_google_estimates_what_performer_estimates(name):
    """Its ε in every feature moves outputs by up to 2e-3 (with relu 2e-2).

    symjax computes the exact ratio of the estimator.
    """
    case = load(name)
    features = NAMES[str(case["kind"])]
    epsilon = {"positive": 2e-3, "trigonometric": 1e-5, "relu": 2e-2}[features]
    arrays = [case[letter] for letter in "qkv"]
    exact = [x.astype(np.float64) for x in arrays]
    rows = case["projection"]
    logarithms, signs = oracles.performer_products(
        *exact[:2], rows.astype(np.float64), features=features
    )
    batch, length = exact[0].shape[:2]
    for form, kind in ((performer, "bidir"), (performer_causal, "causal")):
        pairs = oracles.seen(batch, length, length, causal=kind == "causal")
        wanted = oracles.weighted_mean(logarithms, signs, exact[2], pairs)
        output = form(*arrays, rows, features=features)
        close(output, wanted, 1e-5)
        close(output, case[f"google_out_{kind}"], epsilon)


def test_google_has_the_same_gradients_of_waves():
    """Its trigonometric features are the only ones without an ε."""
    case = load("sincos_scale0p3")
    for form, kind in ((performer, "bidir"), (performer_causal, "causal")):
        form = partial(form, projection=case["projection"], features="trigonometric")
        has_the_gradients(form, case, f"google_d{{}}_{kind}", 1e-4)


def test_google_tests_itself_with_three_equal_tokens():
    case = load("google_unittest_unidirectional")
    output = performer_causal(
        case["q"], case["k"], case["v"], case["projection"], features="trigonometric"
    )
    close(output, case["groundtruth"], 1e-5)


def test_it_stands_where_google_collapses():
    """At inputs of scale 8 the output of Google is 1e-5, unlike the definition."""
    case = load("pos_large_x8_scale")
    exact = [case[name].astype(np.float64) for name in "qkv"]
    rows = case["projection"]
    products = oracles.performer_products(*exact[:2], rows.astype(np.float64))
    pairs = oracles.seen(1, 64, 64, causal=True)
    wanted = oracles.weighted_mean(*products, exact[2], pairs)
    output = performer_causal(case["q"], case["k"], case["v"], rows)
    close(output, wanted, 1e-4)
    assert np.abs(case["google_out_causal"]).max() < 1e-3 < np.abs(wanted).max()


def test_google_relu_features_give_the_same_outputs_and_gradients():
    case = load("relu_noproj")

    def features(x):
        return jax.nn.relu(x) + case["feature_eps"]

    close(features(case["q"]), case["google_phi_q"], 1e-6)
    for form, name in ((linear, "bidir"), (linear_causal, "causal")):
        form = partial(form, features=features)
        output = form(*(case[letter] for letter in "qkv"))
        close(output, case[f"google_out_{name}"], 1e-5)
        has_the_gradients(form, case, f"google_d{{}}_{name}", 1e-4)


@pytest.mark.parametrize("name", ["pos_basic_m_gt_d", "relu_noproj"])
def test_torch_libraries_have_the_same_outputs_for_their_features(name):
    """performer-pytorch, fast-transformers and the recurrence of fla.

    The first two add 1e-6 to the sum of keys in the causal denominator.
    """
    value, case = load(name)["v"], load(f"torch_{name}")
    query, key = case["pp_phi_q"], case["pp_phi_k"]
    options = {"features": "identity"}
    close(linear(query, key, value, **options), case["pp_bidir_out"], 1e-5)
    output = linear_causal(query, key, value, **options)
    close(output, case["fla_recurrent_causal_out"], 1e-5)
    exact = query.astype(np.float64)
    sums = np.cumsum(key.astype(np.float64), axis=1)
    bottom = (exact * sums).sum(axis=-1, keepdims=True)
    moved = output * (bottom / (bottom + 1e-6 * exact.sum(axis=-1, keepdims=True)))
    for library in ("pp", "ft"):
        close(moved, case[f"{library}_causal_out"], 1e-5)


def test_flash_linear_attention_gives_the_same_outputs_and_state():
    case = load("fla_references")
    query, key = np.abs(case["q"]), np.abs(case["k"])
    options = dict(features="identity", return_state=True)
    output, state = linear_causal(query, key, case["v"], **options)
    close(output, case["linear_recurrent_abs_norm1_out"], 1e-5)
    close(state.sums, case["linear_recurrent_abs_norm1_state"], 1e-5)
    close(state.total, case["linear_recurrent_abs_norm1_z"][:, 0], 1e-5)


@pytest.mark.parametrize(
    "features, name", [("taylor", "based"), ("squared", "rebased")]
)
def test_flash_linear_attention_has_the_same_polynomials(features, name):
    """Its denominators are greater by 1e-6."""
    case = load("fla_references")

    def form(query, key, value):
        scores = jnp.einsum("btnh,bsnh->btns", query, key) * query.shape[-1] ** -0.5
        weights = scores**2 if features == "squared" else 1 + scores + scores**2 / 2
        past = np.tri(query.shape[1], dtype=np.float32)[None, :, None]
        bottom = (weights * past).sum(axis=-1, keepdims=True)
        output = linear_causal(query, key, value, features=features)
        return output * (bottom / (bottom + 1e-6))

    output = jax.jit(form)(case["q"], case["k"], case["v"])
    close(output, case[f"{name}_parallel_out"], 1e-5)
    has_the_gradients(form, case, f"{name}_parallel_d{{}}", 1e-4)
