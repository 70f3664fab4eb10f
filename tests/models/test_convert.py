"""Conversion of trained weights to another mechanism."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.layers import Constant
from symjax.models import Decoder, build, convert, transformer
from symjax.models.convert import carried, changes

MODEL = config.Model(vocabulary=23, width=24, heads=3, depth=2, length=40)
ADJUSTED = {"forget": "fox", "sink": True, "length_scale": "learned"}
ADJUSTED["length_base"] = 5
TOKENS = jax.random.randint(jax.random.key(1), (2, 19), 0, 23)


def model(**attention) -> config.Model:
    return replace(MODEL, attention=config.Attention(**attention))


def learned(features, **attention) -> config.Model:
    chosen = {"feature_count": 5} if features == "t2r" else {}
    return model(mechanism="linear", features=features, **chosen, **attention)


def weights(options):
    """Return weights far from initial values: biases are not zero."""
    params = nnx.to_pure_dict(nnx.state(build(options, rngs=nnx.Rngs(3)), nnx.Param))
    key = jax.random.key(4)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), params)


@nnx.jit
def run(model, tokens):
    return model(tokens)


def scores(options, params):
    built = build(options, rngs=nnx.Rngs(5))
    nnx.update(built, params)
    return np.asarray(run(built, TOKENS))


def converted(source, target):
    before = weights(source)
    after = convert(before, source, target)
    return scores(source, before), scores(target, after), before, after


@pytest.mark.always
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (model(), model(differential="v2")),
        (model(symmetric="plain"), model()),
        (model(symmetric="plain"), model(symmetric="pairwise")),
        (model(symmetric="plain", query_key_norm=True), model(query_key_norm=True)),
        (
            model(symmetric="plain", short_convolution=3),
            model(short_convolution=3),
        ),
        (
            model(symmetric="kv", short_convolution=3, query_key_norm=True),
            model(short_convolution=3, query_key_norm=True),
        ),
        (
            model(symmetric="qkv", differential="v1", key_norm="unit"),
            model(symmetric="plain", differential="v1", key_norm="unit"),
        ),
        (
            model(symmetric="qkv", query_key_norm=True),
            model(symmetric="kv", query_key_norm=True),
        ),
        (model(), model(position_term=4)),
        (model(), model(implementation="whole")),
        (
            replace(model(), kind="universal"),
            replace(model(differential="v2"), kind="universal"),
        ),
        (model(mechanism="decay"), model(mechanism="decay", differential="v2")),
        (
            model(mechanism="decay", decay="mamba2"),
            model(mechanism="decay", decay="mamba2", differential="v2"),
        ),
        (
            model(mechanism="linear", features="hedgehog"),
            model(mechanism="linear", features="hedgehog", differential="v2"),
        ),
        (
            replace(model(mechanism="gau"), positions="rope"),
            replace(model(mechanism="gau"), positions="rope", length=64),
        ),
        (
            replace(model(mechanism="gau"), positions="rope", kind="encoder"),
            replace(
                model(mechanism="gau"), positions="rope", kind="encoder", length=64
            ),
        ),
        (model(mechanism="linear"), model(mechanism="linear", differential="v2")),
        (model(mechanism="mesa"), model(mechanism="mesa", differential="v2")),
        (model(**ADJUSTED), model(**ADJUSTED, differential="v2")),
    ],
    ids=[
        *("v2", "own", "metric", "norms", "convolutions"),
        *("values of keys", "values of queries", "keys of queries", "term", "same"),
        *("universal", "decay", "mamba2", "hedgehog", "gau", "gau encoder", "linear"),
        "mesa",
        "adjusted",
    ],
)
def test_the_function_is_kept_where_it_can_be(source, target):
    before, after, _, _ = converted(source, target)
    np.testing.assert_allclose(after, before, atol=2e-5 * abs(before).max())


@pytest.mark.parametrize(
    ("decay", "differential"),
    [("retention", "none"), ("transnormer", "v1"), ("lightning", "v2")],
)
def test_more_heads_repeat_constant_decays(decay, differential, x64, monkeypatch):
    """In float64. Without the key that repeats them, the conversion is refused."""
    monkeypatch.setattr(transformer, "check", lambda options: None)

    def grouped(kv_heads, **more):
        chosen = {"decay": decay, "differential": differential, **more}
        sizes = {"heads": 4, "kv_heads": kv_heads, "head_size": 6, "dtype": "float64"}
        return replace(model(mechanism="decay", **chosen), **sizes)

    source = grouped(2)
    params = jax.tree.map(lambda x: x.astype("float64"), weights(source))
    with pytest.raises(ValueError, match="of 2 heads differ from those of 4: give the"):
        convert(params, source, grouped(4))
    target = grouped(4, decay_heads=2)
    wanted = scores(source, params)
    found = scores(target, convert(params, source, target))
    np.testing.assert_allclose(found, wanted, atol=1e-12 * abs(wanted).max())
    rates = build(target, rngs=nnx.Rngs(0)).blocks[1].attention.decay
    own = build(source, rngs=nnx.Rngs(0)).blocks[1].attention.decay
    x = np.zeros((1, 1, 24))
    np.testing.assert_array_equal(rates(x), np.repeat(own(x), 2, axis=-1))


@pytest.mark.parametrize(
    ("source", "differential"),
    [
        (model(forget="fox"), "v1"),
        (model(forget="mamba2"), "none"),
        (model(mechanism="decay", decay="gated"), "v1"),
        (model(mechanism="delta", decay="kda"), "none"),
        (model(mechanism="delta", decay="kda", delta_gates="channel"), "v1"),
        (learned("t2r"), "v1"),
    ],
    ids=["fox", "mamba2", "gated", "delta", "gdn2", "t2r"],
)
def test_more_heads_repeat_gates_and_feature_maps(source, differential):
    """Each key head of the target has the gate of the head that it repeats."""
    chosen = replace(source.attention, differential=differential)
    source = replace(source, attention=chosen, heads=4, kv_heads=2, head_size=6)
    source = replace(source, depth=1)
    before, after, *_ = converted(source, replace(source, kv_heads=4))
    np.testing.assert_allclose(after, before, atol=2e-5 * abs(before).max())


def test_fewer_heads_are_refused_by_the_name_of_their_key():
    source = replace(model(forget="fox"), heads=4, kv_heads=4, head_size=6)
    line = r"4 key/value heads do not fit one with 2 \(model.kv_heads\)"
    with pytest.raises(ValueError, match=line):
        convert(weights(source), source, replace(source, kv_heads=2))


def test_constant_forget_gates_keep_their_heads():
    def grouped(kv_heads):
        chosen = model(forget="retention")
        return replace(chosen, heads=4, kv_heads=kv_heads, head_size=6)

    with pytest.raises(ValueError, match="'retention' has a rate for each of 2 key"):
        convert(weights(grouped(2)), grouped(2), grouped(4))


def test_decay_heads_are_of_constant_decays():
    for options, line in (
        ({"decay": "gated", "decay_heads": 3}, "decay_heads 3 needs constant decays"),
        ({"decay": "none", "decay_heads": 1}, "model.attention.decay is 'none'"),
        ({"decay_heads": 2}, "decay_heads 2 must divide the 3 key/value heads"),
    ):
        with pytest.raises(ValueError, match=line):
            build(model(mechanism="decay", **options), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="decay_heads 1: softmax has no such option"):
        build(model(decay_heads=1), rngs=nnx.Rngs(0))
    # other mechanisms do not use the rates
    source = replace(model(mechanism="decay"), heads=4, kv_heads=2, head_size=6)
    convert(weights(source), source, replace(source, attention=config.Attention()))


def test_keys_that_change_the_function_are_named():
    source = replace(model(differential="v1"), positions="rope")
    target = replace(
        model(differential="v1", symmetric="plain", depth_offset=2),
        positions="rope",
        rope_base=50.0,
        scan_layers=True,
    )
    assert changes(source, source) == []
    assert changes(source, target) == [
        "model.rope_base 10000.0 → 50.0",
        "model.attention.depth_offset 0 → 2",
        "model.attention.symmetric 'none' → 'plain'",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (model(), model(query_key_norm=True)),
        (model(), model(output_gate="silu")),
        (model(), model(forget="fox")),
        (model(), model(sink=True)),
        (model(), model(length_scale="adaptive")),
        (model(), model(short_convolution=3)),
        (model(), model(symmetric="plain")),
        (model(), model(differential="v1")),
        (model(), model(differential="v2")),
        (model(symmetric="plain"), model()),
        (model(symmetric="plain"), model(symmetric="pairwise")),
        (model(symmetric="kv"), model()),
        (model(symmetric="kv"), model(symmetric="plain")),
        (model(output_gate="silu"), model(output_gate="sigmoid")),
        (model(differential="v1"), model(differential="v1", head_norm=False)),
        (model(differential="v1"), model(differential="v1", lambda_initial=0.5)),
    ],
    ids=str,
)
def test_a_start_names_a_key_exactly_if_the_function_is_another(before, after):
    one, other, _, _ = converted(before, after)
    same = np.allclose(one, other, rtol=1e-4, atol=1e-4)
    assert len(changes(before, after)) == (0 if same else 1)


@pytest.mark.parametrize(
    ("mechanism", "named"),
    [("flash", ["model.attention.chunk_size 4 → 8"]), ("linear", [])],
)
def test_the_chunk_size_is_named_where_it_changes_the_function(mechanism, named):
    one, other = (model(mechanism=mechanism, chunk_size=x) for x in (4, 8))
    differ = abs(scores(one, weights(one)) - scores(other, weights(one))).max()
    assert bool(differ > 1e-3) == bool(named)
    assert changes(one, other) == named


def test_the_length_is_named_where_it_divides_the_scores():
    source = replace(model(mechanism="matrix_function"), positions="rope")
    target = replace(source, length=50)
    one, other, _, _ = converted(source, target)
    assert not np.allclose(one, other, rtol=1e-4, atol=1e-4)
    assert changes(source, target) == ["model.length 40 → 50"]


def test_symmetric_projections_are_the_mean_of_query_and_key():
    _, _, before, after = converted(model(), model(symmetric="plain"))
    one, two = (x["blocks"][1]["attention"] for x in (before, after))
    mean = (one["query"]["kernel"] + one["key"]["kernel"]) / 2
    np.testing.assert_array_equal(two["query"]["kernel"], mean)
    assert "key" not in two


@pytest.mark.parametrize(
    "target",
    [
        model(mechanism="performer", feature_count=32),
        model(mechanism="cosine"),
        model(differential="v1"),
        model(mechanism="decay", decay="gated", output_gate="silu"),
        model(mechanism="linear", features="hedgehog", query_key_norm=True),
    ],
    ids=["performer", "cosine", "v1", "decay", "hedgehog"],
)
def test_shared_weights_go_over_unchanged_and_the_model_runs(target):
    before, after, source, params = converted(model(), target)
    assert np.isfinite(after).all() and abs(after - before).max() > 1e-3
    for layer in (0, 1):
        for name in ("query", "key", "value", "out"):
            np.testing.assert_array_equal(
                params["blocks"][layer]["attention"][name]["kernel"],
                source["blocks"][layer]["attention"][name]["kernel"],
            )


def test_what_belongs_to_the_mechanism_of_the_source_stays_behind():
    source = model(mechanism="decay", decay="gated")
    after = convert(weights(source), source, model())
    wanted = nnx.state(Decoder(model(), rngs=nnx.Rngs(0)), nnx.Param)
    assert jax.tree.structure(after) == jax.tree.structure(nnx.to_pure_dict(wanted))


@pytest.mark.parametrize(
    ("mechanism", "decay"), [("decay", "mamba2"), ("decay", "kda"), ("delta", "mamba2")]
)
def test_branches_forget_as_their_head_did(mechanism, decay):
    source = model(mechanism=mechanism, decay=decay)
    before = weights(source)
    target = model(mechanism=mechanism, decay=decay, differential="v1")
    after = convert(before, source, target)
    one, two = (x["blocks"][0]["attention"] for x in (before, after))
    if mechanism == "delta":
        beta = np.repeat(one["beta"]["kernel"], 2, axis=1)
        np.testing.assert_array_equal(two["beta"]["kernel"], beta)
    one, two = one["decay"], two["decay"]
    np.testing.assert_array_equal(two["rate"], np.repeat(one["rate"], 2))
    twice = 2 if decay == "mamba2" else 1  # a branch has half of the channels
    np.testing.assert_array_equal(two["bias"], np.repeat(one["bias"], twice))
    other = model(mechanism=mechanism, decay="gated")
    fresh = convert(before, source, other)["blocks"][0]["attention"]["decay"]
    assert set(fresh) == {"down", "up"} and "bias" in fresh["up"]


def test_gates_per_channel_follow_their_channels_to_branches():
    """A branch has half of the channels of its head. Gates of another kind are new."""
    chosen = {"mechanism": "delta", "decay": "kda", "delta_gates": "channel"}
    source = model(**chosen)
    before = weights(source)
    after = convert(before, source, model(**chosen, differential="v1"))
    one, two = (x["blocks"][0]["attention"] for x in (before, after))
    for gate in ("erase", "write"):
        np.testing.assert_array_equal(two[gate]["kernel"], one[gate]["kernel"])
    plain = model(**chosen | {"delta_gates": "head"})
    assert changes(source, plain) == ["model.attention.delta_gates 'channel' → 'head'"]
    fresh = convert(before, source, plain)["blocks"][0]["attention"]
    assert fresh["beta"]["kernel"].shape == (24, 3)
    assert "erase" not in fresh


def test_branches_have_the_forget_gates_of_their_head():
    source, target = model(forget="fox"), model(forget="fox", differential="v1")
    before = weights(source)
    after = convert(before, source, target)
    one, two = (x["blocks"][0]["attention"]["forget"]["up"] for x in (before, after))
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(two[name], np.repeat(one[name], 2, axis=-1))
    fresh = convert(before, source, model(forget="mamba2"))
    assert "rate" in fresh["blocks"][0]["attention"]["forget"]


def test_many_features_come_close_to_the_softmax_they_replace():
    """With small queries and keys, for which the estimate is good."""
    source = model()
    target = model(mechanism="performer", feature_count=4096)
    before = weights(source)
    for block in before["blocks"].values():
        for name in ("query", "key"):
            block["attention"][name] = jax.tree.map(
                lambda x: x / 3, block["attention"][name]
            )
    wanted = scores(source, before)
    error = scores(target, convert(before, source, target)) - wanted
    assert abs(error).mean() < 0.05 * wanted.std()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (model(), model(symmetric="plain", differential="v1")),
        (model(symmetric="pairwise"), model(symmetric="pairwise", differential="v1")),
        (learned("hedgehog"), learned("hedgehog", differential="v1")),
        (learned("t2r"), learned("t2r", differential="v1")),
        (learned("hedgehog"), learned("t2r")),
        (learned("t2r"), learned("hedgehog")),
        (
            replace(model(), head_size=4),
            replace(model(differential="v1"), head_size=2),
        ),
        (replace(model(), kv_heads=3, feedforward=96), model(differential="v2")),
    ],
    ids=str,
)
def test_a_warm_start_loses_no_weight(source, target):
    """The model runs, and weights of equal shape are copied."""
    before = weights(source)
    after = convert(before, source, target)
    assert np.isfinite(scores(target, after)).all()
    value = after["blocks"][0]["attention"]["value"]["bias"]
    factor = 2 if target.attention.differential == "v2" else 1
    given = before["blocks"][0]["attention"]["value"]["bias"]
    np.testing.assert_array_equal(value, factor * given)


def test_branches_take_the_halves_of_their_head():
    """The metric of branch b of head n is the block (b, b) of the metric of the
    head."""
    source = model(symmetric="pairwise")
    target = model(symmetric="pairwise", differential="v1")
    before = weights(source)
    metric = before["blocks"][0]["attention"]["metric"]
    halves = convert(before, source, target)["blocks"][0]["attention"]["metric"]
    for n, b in np.ndindex(3, 2):
        part = slice(4 * b, 4 * b + 4)
        np.testing.assert_array_equal(halves[2 * n + b], metric[n, part, part])


def test_constants_are_carried_where_they_mean_the_same():
    def constants(options, seed):
        found = nnx.state(Decoder(options, rngs=nnx.Rngs(seed)), Constant)
        return nnx.to_pure_dict(found)

    def random(**changes):
        chosen = {"mechanism": "performer", "feature_count": 16, **changes}
        return model(**chosen)

    source = random(features="favor++")
    known = constants(source, 1)
    layer = known["blocks"][0]["attention"]
    for target, projection, statistics in (
        (random(features="favor++"), True, True),
        (random(features="favor#"), True, False),
        (random(features="positive"), True, None),
        (random(features="favor++", feature_norms="constant"), False, True),
        (random(features="favor#", feature_count=24), False, False),
    ):
        fresh = constants(target, 2)
        found = carried(fresh, known, source, target)
        assert jax.tree.structure(found) == jax.tree.structure(fresh)
        own = found["blocks"][0]["attention"]
        assert (own["projection"] is layer["projection"]) == projection
        if statistics is not None:
            assert (own["statistics_a"] is layer["statistics_a"]) == statistics


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (model(), replace(MODEL, width=48), "width 24 do not fit one with 48"),
        (model(differential="v1"), model(), "'v1' does not turn into 'none'"),
        (
            model(differential="v1"),
            model(differential="v1", signals=3),
            "signals 1 with 3 key/value heads does not turn into 3 with 3",
        ),
        (model(symmetric="pairwise"), model(), "'pairwise' does not turn into 'none'"),
        (model(), model(symmetric="kv"), "'none' does not turn into 'kv'"),
        (model(symmetric="kv"), model(symmetric="qkv"), "'kv' does not turn into"),
        (
            model(symmetric="kv"),
            model(symmetric="kv", differential="v2"),
            "values times 2, which symmetric 'kv' shares",
        ),
        (model(), replace(MODEL, length=50), r"'positions' is \(40, 24\)"),
        (model(), replace(MODEL, positions="rope"), "positions 'learned'"),
        (
            model(symmetric="plain", key_norm="unit"),
            model(),
            "key_norm 'unit' do not turn into projected",
        ),
        (model(output_gate="silu"), model(), "'blocks/0/attention/output_gate'"),
        (model(query_key_norm=True), model(), "no place for the weight 'blocks/0/att"),
        (
            learned("t2r"),
            model(mechanism="linear", features="t2r", feature_count=7),
            r"'blocks/0/attention/key_map/bias' is \(3, 5\) in the source and \(3, 7\)",
        ),
        (
            replace(model(), head_size=4),
            replace(model(differential="v1"), head_size=4),
            "4 value features a head do not fit one with 8",
        ),
        (
            model(short_convolution=3),
            model(short_convolution=3, differential="v2"),
            "differential 'v2' does not follow short convolutions",
        ),
        (model(), replace(MODEL, feedforward=32), "96 hidden features do not fit"),
    ],
)
def test_models_whose_weights_cannot_follow_are_refused(source, target, words):
    with pytest.raises(ValueError, match=words):
        convert(weights(source), source, target)
