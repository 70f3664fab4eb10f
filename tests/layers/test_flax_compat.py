"""Mechanisms of symjax in Flax's attention layers, against Flax's own softmax."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from symjax import attention
from symjax.layers import attention_fn

BATCH, TIME, WIDTH, HEADS, SIZE = (2, 3), 7, 10, 4, 5  # two axes of examples
X = jax.random.normal(jax.random.key(1), (*BATCH, TIME, WIDTH))
KEYS = np.ones((*BATCH, 1, 1, TIME), bool)  # the keys that are not padding
KEYS[1, :, ..., 5:] = KEYS[0, 2, ..., 2] = False
PAIRS = nnx.combine_masks(nnx.make_causal_mask(X[..., 0]), jnp.asarray(KEYS))


def of_nnx(function=None, **options) -> nnx.MultiHeadAttention:
    """Return layers; equal seeds give equal weights."""
    if function is not None:
        options["attention_fn"] = function
    return nnx.MultiHeadAttention(
        HEADS, WIDTH, HEADS * SIZE, decode=False, rngs=nnx.Rngs(0), **options
    )


def of_linen(function=linen.dot_product_attention, **options):
    return linen.MultiHeadDotProductAttention(
        HEADS, qkv_features=HEADS * SIZE, attention_fn=function, **options
    )


def projected(layer: nnx.MultiHeadAttention) -> list[jax.Array]:
    """Return queries, keys and values of X, with its batch axes joined."""
    parts = (layer.query(X), layer.key(X), layer.value(X))
    return [part.reshape(-1, *part.shape[-3:]) for part in parts]


def output(layer: nnx.MultiHeadAttention, mixed: jax.Array) -> jax.Array:
    return layer.out(mixed.reshape(*BATCH, *mixed.shape[1:]))


def decoded(layer: nnx.MultiHeadAttention) -> jax.Array:
    """Return the outputs of one token after the other, with Flax's cache."""
    layer.init_cache(X.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    steps = [step(layer, X[..., t : t + 1, :]) for t in range(TIME)]
    return jnp.concatenate(steps, axis=-2)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_softmax_in_nnx_with_grouped_heads_is_that_of_flax():
    ours, theirs = (
        of_nnx(function, num_kv_heads=2) for function in (attention_fn("softmax"), None)
    )

    @nnx.jit
    def outputs(layer):
        return {
            "all keys": layer(X),
            "is_causal": layer(X, is_causal=True),
            "causal mask": layer(X, mask=nnx.make_causal_mask(X[..., 0])),
            "padding": layer(X, mask=KEYS.astype(np.float32)),
            "both": layer(X, mask=PAIRS),
            "one mask for all": layer(X, mask=PAIRS[0, 0, None, None]),
            "fewer keys": layer(X, X[..., :3, :], mask=KEYS[..., :3]),
        }

    ours_, theirs_ = outputs(ours), outputs(theirs)
    for name, wanted in theirs_.items():
        np.testing.assert_allclose(ours_[name], wanted, atol=2e-6, err_msg=name)
    close(ours_["both"][0, 0], ours_["one mask for all"][0, 0])
    close(decoded(ours), theirs_["is_causal"])


def test_softmax_in_linen_is_that_of_flax():
    ours, theirs = of_linen(attention_fn("softmax", is_causal=True)), of_linen()
    weights = theirs.init(jax.random.key(0), X)

    @jax.jit
    def both(x):
        return (
            (ours.apply(weights, x), theirs.apply(weights, x, mask=CAUSAL)),
            (ours.apply(weights, x, mask=KEYS), theirs.apply(weights, x, mask=PAIRS)),
        )

    CAUSAL = linen.make_causal_mask(X[..., 0])
    for one, other in both(X):
        close(one, other)
    close(linen_decoded(ours, weights), both(X)[0][1])


def linen_decoded(layer, weights) -> jax.Array:
    layer = layer.clone(decode=True)
    cache = layer.init(jax.random.key(0), X)["cache"]

    @jax.jit
    def step(cache, x):
        variables = {**weights, "cache": cache}
        y, changed = layer.apply(variables, x, mutable=["cache"])
        return changed["cache"], y

    steps = []
    for t in range(TIME):
        cache, y = step(cache, X[..., t : t + 1, :])
        steps.append(y)
    return jnp.concatenate(steps, axis=-2)


PROJECTION = attention.orthogonal_projection(jax.random.key(2), 6, SIZE)


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [("cosine", {}), ("performer", {"projection": PROJECTION, "chunk_size": 3})],
)
def test_feature_mechanisms_in_nnx_are_ours(mechanism, options):
    form = attention.MECHANISMS[mechanism]
    whole = {name: x for name, x in options.items() if name != "chunk_size"}
    layer = of_nnx(attention_fn(mechanism, **options), num_kv_heads=2)
    causal = of_nnx(attention_fn(mechanism, is_causal=True, **options), num_kv_heads=2)
    mask = KEYS.reshape(-1, 1, 1, TIME)

    @nnx.jit
    def both(layer, causal):
        arrays = projected(layer)
        past = output(layer, form.causal(*arrays, mask=mask, **options))
        return [
            (layer(X), output(layer, form.attend(*arrays, **whole))),
            (layer(X, mask=KEYS, is_causal=True), past),
            (causal(X, mask=KEYS.astype(np.float32)), past),
            (causal(X), output(layer, form.causal(*arrays, **options))),
        ]

    pairs = both(layer, causal)
    for one, other in pairs:
        close(one, other)
    close(decoded(causal), pairs[-1][1])


def test_masks_of_padding_as_flax_makes_them_serve_feature_mechanisms():
    """Rows of padding are zero before the output layer; other rows see no padding."""
    layer, there = of_nnx(attention_fn("linear")), KEYS[..., 0, 0, :]
    run = nnx.jit(lambda layer, mask: layer(X, mask=mask))
    for mask in (
        nnx.make_attention_mask(there, there),
        nnx.make_attention_mask(np.ones_like(there), there),
    ):
        found, given = run(layer, mask), layer(X, mask=mask)
        wanted = run(layer, KEYS)
        np.testing.assert_allclose(found[there], wanted[there], atol=2e-6)
        np.testing.assert_array_equal(np.isfinite(found), True)
        np.testing.assert_allclose(given, found, atol=2e-6)
    zeros = run(layer, nnx.make_attention_mask(there, there))[~there]
    np.testing.assert_allclose(zeros, jnp.broadcast_to(layer.out.bias, zeros.shape))


def test_a_traced_mask_that_a_feature_mechanism_cannot_honour_gives_nan():
    run = nnx.jit(lambda layer, mask: layer(X, mask=mask))
    found = run(of_nnx(attention_fn("linear")), PAIRS)
    assert np.isnan(found).all()


def test_a_feature_mechanism_in_linen_decodes_what_it_reads_in_parallel():
    layer = of_linen(attention_fn("cosine", is_causal=True))
    same = of_nnx(attention_fn("cosine"))
    weights = {"params": nnx.to_pure_dict(nnx.state(same, nnx.Param))}

    @nnx.jit
    def both(same):
        mixed = attention.cosine_causal(*projected(same))
        return layer.apply(weights, X), output(same, mixed)

    parallel, wanted = both(same)
    close(parallel, wanted)
    close(linen_decoded(layer, weights), wanted)


def test_sparsemax_in_nnx_is_ours():
    layer = of_nnx(attention_fn("sparsemax", length_base=3))

    @nnx.jit
    def both(layer):
        mask = PAIRS.reshape(-1, 1, TIME, TIME).astype(bool)
        mixed = attention.sparsemax(*projected(layer), mask=mask, length_base=3)
        return layer(X, mask=PAIRS), output(layer, mixed)

    close(*both(layer))


def test_entropy_invariant_scaling_counts_the_cached_keys_that_exist():
    options = {"length_base": 3, "is_causal": True}
    layer = of_nnx(attention_fn("softmax", **options))
    close(decoded(layer), nnx.jit(lambda layer: layer(X))(layer))


def test_dtype_and_precision_of_the_layer_hold():
    query = jnp.ones((TIME, HEADS, SIZE))  # no axis of examples at all
    attend = attention_fn("softmax")
    assert attend(query, query, query, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attend(query, query, query).shape == query.shape
    for precision in ("high", jax.lax.Precision.HIGH, ("high", "high")):
        program = jax.make_jaxpr(lambda x, p=precision: attend(x, x, x, precision=p))
        asked = set(re.findall(r"precision=\((.*?)\)", str(program(query))))
        assert asked == {"Precision.HIGH, Precision.HIGH"}


SQUARE = np.ones((2, 5, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("mechanism", "options", "call", "message"),
    [
        ("performr", {}, {}, "'performr' is unknown: choose from .*softmax"),
        ("cosine", {"scale": 2.0}, {}, "cosine has no option 'scale': choose from"),
        ("decay", {}, {}, "decay needs log_decay, .* use symjax.layers.Attention"),
        ("softmax", {"mask": SQUARE}, {}, "softmax has no option 'mask'"),
        ("softmax", {}, {"dropout_rate": 0.1}, "dropout_rate 0.1 .* softmax"),
        ("softmax", {}, {"module": object()}, "sow_weights acts on the map"),
        ("softmax", {}, {"qk_attn_weights_einsum": max}, "qk_attn_weights_einsum acts"),
        ("cosine", {}, {"bias": SQUARE[:, :1]}, "bias .* cosine does not form"),
        (
            "performer",
            {},
            {"mask": np.tri(5)[None, None] * np.ones((2, 1, 1, 1))},
            r"\(batch, 1, 1, 5\), .*got \(2, 1, 5, 5\) .*'performer', is_causal=True",
        ),
        ("softmax", {}, {"mask": np.ones((3, 1, 5, 5))}, r"batch \(2,\), got \(3, 1"),
        ("softmax", {}, {"mask": np.ones((1, 2, 1, 5, 5))}, r"got \(1, 2, 1, 5, 5\)"),
        ("softmax", {}, {"key": SQUARE[:, :4], "is_causal": True}, "give a mask"),
        ("cosine", {"is_causal": True}, {"key": SQUARE[:, :4]}, "one query, got 5 and"),
        ("softmax", {"mask_self": True}, {"key": SQUARE[:, :4]}, "5 queries and 4"),
        ("softmax", {}, {"key": SQUARE[0]}, r"one batch, got .*\(5, 3, 4\)"),
        ("softmax", {}, {"precision": ("high", "highest")}, "equal for both operands"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(mechanism, options, call, message):
    array = np.ones((2, 5, 3, 4), np.float32)
    key = call.pop("key", array)
    with pytest.raises(ValueError, match=message):
        attention_fn(mechanism, **options)(array, key, key, **call)


def test_a_mechanism_without_a_causal_form_is_refused_where_one_is_wanted(monkeypatch):
    def mean(query, key, value, mask=None):
        return jnp.broadcast_to(value.mean(axis=1, keepdims=True), query.shape)

    monkeypatch.setitem(attention.MECHANISMS, "mean", attention.Mechanism(mean))
    arrays = SQUARE, SQUARE, 2 * SQUARE
    np.testing.assert_allclose(attention_fn("mean")(*arrays), 2 * SQUARE)
    with pytest.raises(ValueError, match="mean has no causal form"):
        attention_fn("mean", is_causal=True)(*arrays)


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        ("performer", {"features": "nope"}, "'nope' is unknown: choose from .*favor"),
        ("linear", {"features": "nope"}, "'nope' is unknown: choose from elu"),
        ("linear", {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ("performer", {"scale": -1.0}, "scale must be positive and finite, got -1.0"),
        ("softmax", {"length_base": 1}, "length_base must be above 1 and .*got 1"),
        ("sparsemax", {"implementation": "flash"}, "'flash' is unknown: choose from"),
    ],
)
def test_options_are_refused_when_the_function_is_made(mechanism, options, message):
    with pytest.raises(ValueError, match=message):
        attention_fn(mechanism, **options)


def test_functions_and_arrays_for_heads_of_one_size_are_taken():
    turn = np.eye(4, dtype=np.float32)
    arrays = [
        np.float32(np.random.default_rng(i).normal(size=(2, 5, 3, 4))) for i in range(3)
    ]
    rotated = {"features": lambda x: jnp.exp(x @ turn)}
    given = attention_fn("linear", is_causal=True, **rotated)(*arrays)
    np.testing.assert_array_equal(given, attention.linear_causal(*arrays, **rotated))
    given = attention_fn("performer", projection=turn, features="relu")(*arrays)
    wanted = attention.performer(*arrays, turn, features="relu")
    np.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize("cut", [np.s_[:0], np.s_[:, :0]], ids=["batch", "time"])
def test_nothing_gives_nothing(cut):
    layer = of_nnx(attention_fn("softmax"))
    assert layer(X[cut]).shape == X[cut].shape


def test_dropout_that_is_off_is_no_dropout():
    array = np.ones((2, 5, 3, 4), np.float32)
    attend = attention_fn("softmax")
    quiet = attend(array, array, array, dropout_rate=0.5, deterministic=True)
    np.testing.assert_array_equal(quiet, attend(array, array, array))
