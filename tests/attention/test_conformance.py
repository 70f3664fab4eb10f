"""Outputs and gradients of published attention layers, from their weights, in float64.

The files with their outputs are not part of this project. Where ../shared/conformance
is absent these tests are skipped.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_laws import jitted

from symjax import attention
from symjax.attention.scores.mechanism import row_map
from symjax.attention.softmax import softmax_weights

FOLDER = Path(__file__).parents[2].parent / "shared" / "conformance"
TOLERANCE = 1e-9


def linear(x, weights, name):
    """Return x Wᵀ + b with weights stored as (outputs, inputs)."""
    bias = weights.get(f"{name}.bias")
    product = x @ weights[f"{name}.weight"].T
    return product if bias is None else product + bias[None, None]


def heads(x, count):
    return x.reshape(*x.shape[:2], count, -1)


def normed(x, eps, weight=None):
    x = x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x if weight is None else x * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def rotated(x, case, *, interleaved):
    if not case["rope"]:
        return x
    positions = jnp.arange(x.shape[1])[None]
    return attention.rotate(x, positions, interleaved=interleaved)


def restrictions(case):
    """Return the additive or boolean mask of a case as options of symjax."""
    options = {"is_causal": bool(case["causal"])}
    if "attn_mask" in case:
        mask = case["attn_mask"] == 0
        options["mask"] = mask if mask.ndim == 4 else mask[None, None]
        options["is_causal"] = False
    if "key_mask" in case:
        options["mask"] = case["key_mask"].astype(bool)[:, None, None]
    return options


def difference(weights, case, query, key, value, options, norm_weight=None):
    """Return (heads joined after the norm of each head, λ, map) of two branches."""
    depth = case.get("depth", case.get("layer_idx")).item()
    initial = attention.lambda_initial(depth)
    if "lambda_a" in weights:
        lam = jnp.exp(weights["lambda_a"]) - jnp.exp(weights["lambda_b"]) + initial
        lam = lam.reshape(())
    else:
        vectors = (weights[f"lambda_{name}"] for name in ("q1", "k1", "q2", "k2"))
        lam = attention.differential_lambda(*vectors, initial)
    np.testing.assert_allclose(initial, case["lambda_init"], rtol=1e-15)
    mixed = attention.differential(query, key, value, lam, **options)
    eps = case.get("eps_sub", case.get("eps")).item()
    mixed = normed(mixed, eps, norm_weight) * (1 - initial)
    lams = jnp.full((1, 1, query.shape[2] // 2), lam)
    pairs = row_map(softmax_weights, query, key, lam=lams, **options)
    return mixed.reshape(*mixed.shape[:2], -1), {"lambda_full": lam, "attn_map": pairs}


def official(weights, x, case):
    """Run the layer of microsoft/unilm; keys may have the projection of queries."""
    query = heads(linear(x, weights, "q_proj"), 2 * case["num_heads"])
    query = rotated(query, case, interleaved=True)
    value = heads(linear(x, weights, "v_proj"), case["num_kv_heads"])
    if "k_proj.weight" in weights:
        key = heads(linear(x, weights, "k_proj"), 2 * case["num_kv_heads"])
        key = rotated(key, case, interleaved=True)
    else:
        key = attention.symmetric_key(query)
    mixed, facts = difference(
        weights, case, query, key, value, restrictions(case), weights["subln.weight"]
    )
    return linear(mixed, weights, "out_proj"), facts


def official_v2(weights, x, case):
    """Run the second version of microsoft/unilm: λ of every token, no norm."""
    query = heads(linear(x, weights, "q_proj"), 2 * case["num_heads"])
    key, value = (
        heads(linear(x, weights, name), case["num_kv_heads"])
        for name in ("k_proj", "v_proj")
    )
    query, key = (rotated(part, case, interleaved=True) for part in (query, key))
    logits = linear(x, weights, "lambda_proj")
    lam = jax.nn.sigmoid(logits)
    mixed = attention.differential_v2(query, key, value, lam, **restrictions(case))
    facts = {"lambda_logit": logits, "lambda_full": lam}
    return linear(mixed.reshape(*x.shape[:2], -1), weights, "o_proj"), facts


def llama(weights, x, case):
    """Run the layer of Hugging Face: sub-heads in (branch, head) order, values
    halved."""

    def projected(name, count):
        branched = linear(x, weights, name).reshape(*x.shape[:2], 2, count // 2, -1)
        return jnp.swapaxes(branched, 2, 3)

    def sub_heads(name, count):
        rows = heads(projected(name, count), count)
        return rotated(rows, case, interleaved=False)

    queries, keys = case["num_attention_heads"], case["num_key_value_heads"]
    query, key = sub_heads("q_proj", queries), sub_heads("k_proj", keys)
    value = heads(projected("v_proj", keys), keys // 2)
    mixed, facts = difference(weights, case, query, key, value, restrictions(case))
    return linear(mixed, weights, "o_proj"), facts


def timm(weights, x, case):
    """Run DiffAttention of timm: one matrix for query, key and value, no positions."""
    query, key, value = jnp.split(linear(x, weights, "qkv"), 3, axis=-1)
    query, key = (heads(part, 2 * case["num_heads"]) for part in (query, key))
    if "q_norm.weight" in weights:
        query = normed(query, case["eps_q_norm"], weights["q_norm.weight"])
        key = normed(key, case["eps_k_norm"], weights["k_norm.weight"])
    value = heads(value, case["num_heads"])
    mixed, facts = difference(
        weights, case, query, key, value, restrictions(case), weights["sub_norm.weight"]
    )
    if "norm.weight" in weights:
        mixed = normed(mixed, case["eps_norm"], weights["norm.weight"])
    return linear(mixed, weights, "proj"), facts


def shared(weights, x, case, query, value, output=None, **options):
    """Return (output, map) of symmetric attention of projected queries and values."""
    options |= restrictions(case)
    made = {name: options.pop(name, None) for name in ("metric", "normalise")}
    query, value = (
        heads(linear(x, weights, y), case["num_heads"]) for y in (query, value)
    )
    mixed = attention.symmetric(query, value, **made, **options)
    pairs = row_map(
        softmax_weights, query, attention.symmetric_key(query, **made), **options
    )
    if "key_mask" in case:  # theirs: the mean of all values for hidden queries
        hidden = ~case["key_mask"].astype(bool)[..., None, None]
        mixed = jnp.where(hidden, value.mean(axis=1, keepdims=True), mixed)
        pairs = jnp.where(hidden.swapaxes(1, 2), 1 / x.shape[1], pairs)
    mixed = mixed.reshape(*x.shape[:2], -1)
    mixed = mixed if output is None else linear(mixed, weights, output)
    return mixed, {"attn": pairs}


def tied(weights, x, case):
    weights = {f"{name}.weight": weight for name, weight in weights.items()}
    return shared(weights, x, case, "qk", "v", "out")


def plpi(weights, x, case):
    metric = weights.get("pairwise_factors")
    return shared(weights, x, case, "query", "value", metric=metric)


def reformer(weights, x, case):
    options = {"normalise": "unit", "mask_self": True}
    return shared(weights, x, case, "toqk", "tov", "to_out", **options)


def hf_reformer(weights, x, case):
    options = {"normalise": "rms", "mask_self": True}
    return shared(weights, x, case, "query_key", "value", **options)


FAMILIES = {
    "diff_": official,
    "diffsym_": official,
    "diffv2_": official_v2,
    "diffllama_": llama,
    "difftimm_": timm,
    "symqk_tiedmha_": tied,
    "symqk_plpi_": plpi,
    "symqk_reformer_": reformer,
    "symqk_hfreformer_": hf_reformer,
}
CASES = [
    pytest.param(layer, path, id=path.stem)
    for family, layer in FAMILIES.items()
    for path in sorted(FOLDER.glob(f"{family}*.npz"))
]


def weights_of(case, prefix):
    return {
        name.removeprefix(prefix): array
        for name, array in case.items()
        if name.startswith(prefix)
    }


@pytest.mark.skipif(not CASES, reason="no files in ../shared/conformance")
@pytest.mark.parametrize("layer, path", CASES or [(None, None)])
def test_outputs_and_gradients_are_those_of_the_published_layer(layer, path, x64):
    with np.load(path) as file:
        case = dict(file)
    # Their naive module mixes the branches of grouped heads; their flash one does not.
    grouped = "out_flash1" in case and case["num_kv_heads"] < case["num_heads"]
    output_name, gradient_name = (
        ("out_flash1", "gflash1:") if grouped else ("out", "g:")
    )
    weights = weights_of(case, "w:")

    def loss(weights, x):
        output, facts = layer(weights, x, case)
        return (output * case["proj"]).sum(), (output, facts)

    graded = jitted(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (gradients, by_input), (output, facts) = graded(weights, jnp.asarray(case["x"]))
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    np.testing.assert_allclose(output, case[output_name], **close)
    wanted = weights_of(case, gradient_name)
    assert wanted.keys() == {*gradients, "x"}
    for name, gradient in {**gradients, "x": by_input}.items():
        np.testing.assert_allclose(gradient, wanted[name], err_msg=name, **close)
    for name in facts.keys() & case.keys() - ({"attn_map"} if grouped else set()):
        np.testing.assert_allclose(facts[name], case[name], err_msg=name, **close)
