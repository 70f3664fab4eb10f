"""The decoder: reference sizes, causality, decoding, precision, invalid choices."""

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import attention, config
from symjax.layers import Constant, Lambda, mixer
from symjax.models import Decoder, generate

SMALL = config.Model(vocabulary=23, width=24, heads=3, depth=2, length=40)
TOKENS = jax.random.randint(jax.random.key(1), (2, 19), 0, 23)


def small(mechanism="softmax", *, seed=0, **changes) -> Decoder:
    attention = {
        name: changes.pop(name)
        for name in list(changes)
        if name in config.Attention.__dataclass_fields__
    }
    chosen = config.Attention(mechanism=mechanism, **attention)
    options = replace(SMALL, attention=chosen, **changes)
    return Decoder(options, rngs=nnx.Rngs(seed))


@nnx.jit
def scores(model: Decoder, tokens, dropout_key=None):
    return model(tokens, dropout_key=dropout_key)


def count(model: nnx.Module, kind=nnx.Param) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, kind)))


@pytest.mark.parametrize(
    ("symmetric", "differential", "mechanism", "parameters"),
    [
        ("none", "none", "softmax", 2_479_937),
        ("none", "v1", "softmax", 2_480_225),
        ("plain", "none", "softmax", 2_282_561),
        ("plain", "v1", "softmax", 2_282_849),
        ("plain", "none", "cosine", 2_282_561),
    ],
)
def test_the_models_of_the_study_have_their_published_sizes(
    symmetric, differential, mechanism, parameters
):
    chosen = config.Attention(
        mechanism=mechanism, symmetric=symmetric, differential=differential
    )
    options = config.Model(vocabulary=65, attention=chosen)
    model = nnx.eval_shape(lambda: Decoder(options, rngs=nnx.Rngs(0)))
    assert count(model) == parameters


def test_a_noise_head_for_four_heads_saves_projections():
    """Of 8 heads with branches of 16 features, 6 noise queries and keys are saved."""
    chosen = (config.Attention(differential="v1", signals=x) for x in (1, 4))
    options = [config.Model(vocabulary=65, attention=x) for x in chosen]
    one, four = (
        count(nnx.eval_shape(lambda x=x: Decoder(x, rngs=nnx.Rngs(0)))) for x in options
    )
    width, depth = options[0].width, options[0].depth
    assert one - four == depth * 2 * 6 * 16 * (width + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 4, "signals": 3}, "signals 3 must divide model.heads 4"),
        (
            {"heads": 12, "kv_heads": 4, "signals": 2, "head_size": 2},
            "signals 2 leaves 6 noise heads of model.heads 12: model.kv_heads 4",
        ),
        (
            {"heads": 4, "signals": 2, "differential": "v2"},
            "signals 2 needs differential 'v1', but .* is 'v2'",
        ),
        (
            {"heads": 4, "signals": 2, "symmetric": "qkv"},
            "'qkv' makes a value .*signals 2 leaves 2 noise keys for 4 values",
        ),
        (
            {"heads": 4, "signals": 2, "mechanism": "decay"},
            "decay 'retention' has a rate for each key/value head: .* model.kv_heads=2",
        ),
        (
            {"heads": 4, "signals": 2, "forget": "retention"},
            "forget 'retention' has a rate for each key/value head: .*signals 2 give",
        ),
    ],
)
def test_heads_that_cannot_share_noise_heads_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        small(**{"differential": "v1"} | changes)


def test_lambda_vectors_and_projections_have_classes_of_their_own():
    model = small("performer", differential="v1", feature_count=16)
    # four vectors a layer; head size 24 / (3 heads · 2 branches)
    assert count(model, Lambda) == 2 * 4 * 4
    assert count(model, Constant) == 2 * 16 * 4
    kinds = nnx.state(model, Constant)
    assert not set(map(id, jax.tree.leaves(kinds))) & set(
        map(id, jax.tree.leaves(nnx.state(model, nnx.Param)))
    )


CAUSAL = [
    name for name, form in attention.MECHANISMS.items() if form.keys and not form.gated
]
COMBINATIONS = [
    {"mechanism": mechanism, "differential": differential, "depth": 1}
    | ({} if differential == "v2" else {"symmetric": "pairwise"})
    for mechanism, differential in itertools.product(CAUSAL, ("v1", "v2"))
]
OPTIONS = [
    {"positions": "rope"},
    {"positions": "rope", "head_size": 6, "differential": "v1"},
    {"positions": "none", "mask_self": True, "symmetric": "plain"},
    {"length_base": 4, "differential": "v1"},
    {"key_norm": "unit", "symmetric": "plain", "mask_self": True},
    {"key_norm": "rms", "symmetric": "pairwise"},
    {"query_key_norm": True, "mechanism": "performer", "feature_count": 32},
    {"query_key_norm": True, "symmetric": "plain", "differential": "v1"},
    {"heads": 4, "kv_heads": 2, "mechanism": "softmax", "differential": "v1"},
    {"heads": 4, "kv_heads": 2, "mechanism": "linear", "features": "relu"},
    {"heads": 4, "kv_heads": 1, "mechanism": "performer", "features": "hyperbolic"},
    {"heads": 4, "kv_heads": 2, "mechanism": "cosine", "chunk_size": 4},
    {"activation": "swiglu", "norm": "rmsnorm", "bias": False, "tie_embeddings": True},
    {"activation": "gelu", "implementation": "whole"},
    {"positions": "alibi", "differential": "v1", "mechanism": "sparsemax"},
    {"positions": "sinusoidal"},
    {"positions": "rope_interleaved", "rope_share": 0.5, "head_size": 8},
    {"mechanism": "decay", "decay": "gated", "output_gate": True},
    {"mechanism": "decay", "decay": "lightning", "differential": "v1"},
    {"mechanism": "linear", "features": "hedgehog", "heads": 4, "kv_heads": 2},
    {"mechanism": "linear", "features": "t2r", "feature_count": 12},
    {"mechanism": "linear", "features": "taylor"},
    {"mechanism": "performer", "features": "favor#", "feature_count": 32},
    {"mechanism": "performer", "feature_norms": "constant", "feature_count": 32},
    {"mechanism": "gau", "positions": "rope"},
    {"mechanism": "flash", "chunk_size": 4},
    {"pattern": ("performer", "softmax", "flash"), "depth": 3, "chunk_size": 4},
    {"kind": "universal", "depth": 3},
    {"mechanism": "decay", "decay": "mamba2", "short_convolution": 3},
    {"mechanism": "decay", "decay": "kda", "differential": "v1", "positions": "rope"},
    {"symmetric": "kv", "positions": "rope", "query_key_norm": True, "mask_self": True},
    {"symmetric": "qkv", "positions": "rope", "differential": "v1", "key_norm": "rms"},
    {"symmetric": "kv", "mechanism": "delta", "decay": "none", "short_convolution": 3},
    {"key_size": 6, "positions": "rope", "differential": "v1", "head_norm": False},
    {"forget": "fox", "sink": True, "differential": "v1", "symmetric": "plain"},
    {"mechanism": "entmax15", "heads": 4, "kv_heads": 2, "forget": "mamba2"},
    {"heads": 4, "differential": "v1", "signals": 2, "positions": "alibi"},
    {"heads": 4, "mechanism": "delta", "decay": "gated", "differential": "v1"}
    | {"signals": 4, "kv_heads": 1},
    {"heads": 4, "kv_heads": 2, "symmetric": "kv", "differential": "v1", "signals": 2},
    {"symmetric": "qkv", "position_term": 4, "differential": "v1", "positions": "rope"},
    {"heads": 4, "differential": "v1", "signals": 2, "position_term": 4},
    {"mechanism": "matrix_function", "function": "resolvent", "differential": "v1"},
    {"mechanism": "matrix_function", "function": "expm1", "chunk_size": 4},
    {"mechanism": "mesa", "heads": 4, "kv_heads": 2, "chunk_size": 4},
    {"mechanism": "mesa", "heads": 4, "differential": "v1", "signals": 2},
    {"length_scale": "adaptive", "heads": 4, "differential": "v1", "signals": 2},
    {"length_scale": "learned", "length_base": 4, "differential": "v2"},
    {"length_scale": "distance", "positions": "none"},
]


# Every mechanism, and every option with its own code in decoding.
QUICK = [COMBINATIONS[2 * i + i % 2] for i in range(len(CAUSAL))]
QUICK += [
    OPTIONS[i]
    for i in (
        *(1, 4, 9, 14, 16, 17, 19, 22, 24, 25, 26, 27, 28, 30, 31),
        *(34, 36, 39, 41, 43, 45),
    )
]
SLOW = [choice for choice in COMBINATIONS + OPTIONS if choice not in QUICK]


@pytest.mark.always
@pytest.mark.parametrize(
    "choice",
    [*QUICK, *(pytest.param(choice, marks=pytest.mark.slow) for choice in SLOW)],
    ids=str,
)
def test_prefill_and_steps_give_what_the_whole_sequence_gives(choice, monkeypatch):
    """With all sizes of the part of a cache that is read: 6, 11 and 21 places."""
    monkeypatch.setattr(mixer, "SMALLEST_READ", 4)
    model = small(**choice)

    @nnx.jit
    def read(model, tokens, cache):
        return model.decode(tokens, cache)

    cache = model.init_cache(2, 21)
    outputs = []
    for part in jnp.split(TOKENS, [3, 4, 7], axis=1):
        found, cache = read(model, part, cache)
        outputs.append(found)
    whole = scores(model, TOKENS)
    np.testing.assert_allclose(
        jnp.concatenate(outputs, axis=1), whole, atol=1e-5 * abs(whole).max()
    )
    assert (cache.position == TOKENS.shape[1]).all()


def test_of_a_cache_at_most_twice_what_is_filled_is_read():
    for places in (1, 255, 300, 511, 512, 1023, 1024, 2047, 5000):
        parts = mixer._prefixes(places)
        assert parts == sorted(parts) and parts[-1] == places
        for filled in range(1, places + 1):
            read = next(part for part in parts if part >= filled)
            assert read <= max(2 * filled, 2 * mixer.SMALLEST_READ - 1)


@pytest.mark.parametrize(
    ("mechanism", "implementation"),
    [
        *(("softmax", x) for x in ("rows", "whole", "tpu", "cudnn", "ring")),
        *(("decay", "jla"), ("delta", "jla")),
    ],
)
def test_what_implements_whole_rows_does_not_decode(mechanism, implementation):
    """Evaluation decodes, too, whatever implementation a run trains with."""

    def decoded(**choice):
        model = small(mechanism, **choice)
        prefilled, cache = model.decode(TOKENS[:, :5], model.init_cache(2, 9))
        return prefilled, model.decode(TOKENS[:, 5:6], cache)[0]

    found = decoded(implementation=implementation)
    for one, two in zip(found, decoded(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("differential", ["none", "v1", "v2"])
def test_a_step_reads_the_part_of_a_cache_that_is_filled(differential):
    """Entries that no row sees are NaN; reading them would make the output NaN."""
    model = small("softmax", differential=differential)
    _, cache = model.decode(TOKENS[:, :10], model.init_cache(2, 1024))
    layers = jax.tree.map(lambda x: x.at[:, 256:].set(jnp.nan), cache.layers)
    step = nnx.jit(lambda model, cache: model.decode(TOKENS[:, 10:11], cache)[0])
    wanted = step(model, cache)
    np.testing.assert_array_equal(step(model, cache._replace(layers=layers)), wanted)
    later = cache._replace(layers=layers, position=cache.position.at[1].set(256))
    assert not jnp.isfinite(step(model, later)).any()


RAGGED = [
    {"differential": "v1", "length_base": 4, "forget": "fox"},
    {"pattern": ("flash", "gau", "decay"), "depth": 3, "chunk_size": 4},
]
RAGGED += [
    pytest.param(choice, marks=pytest.mark.slow)
    for choice in (
        {"mechanism": "performer", "feature_count": 32, "positions": "rope"},
        {"mechanism": "softmax", "positions": "alibi", "mask_self": True},
        {"mechanism": "cosine", "differential": "v2"},
        {"kind": "universal", "positions": "sinusoidal"},
    )
]


@pytest.mark.parametrize("choice", RAGGED, ids=str)
def test_prompts_of_different_lengths_are_continued_as_if_alone(choice):
    model = small(**choice)
    lengths, key = (9, 1, 6), jax.random.key(0)
    rows = [TOKENS[0, :9], TOKENS[1, :1], TOKENS[1, 3:9]]
    filled = jnp.stack([jnp.pad(row, (9 - row.size, 0)) for row in rows])
    shared = {"temperature": 0.0}
    found = generate(model, filled, 8, key, lengths=jnp.array(lengths), **shared)
    for row, tokens in zip(rows, found, strict=True):
        alone = generate(model, row[None], 8, key, **shared)[0]
        np.testing.assert_array_equal(tokens, alone)


def test_lengths_that_do_not_fit_the_prompts_are_refused():
    for lengths in ([3], [0, 4], [5, 6]):
        with pytest.raises(ValueError, match="1 to 5 for each prompt"):
            generate(
                small(), TOKENS[:, :5], 2, jax.random.key(0), lengths=jnp.array(lengths)
            )


@pytest.mark.parametrize("mechanism", ["softmax", "cosine", "linear", "performer"])
def test_the_future_changes_nothing(mechanism):
    model = small(mechanism, differential="v1")
    changed = TOKENS.at[:, 11:].add(1) % 23
    before, after = scores(model, TOKENS), scores(model, changed)
    np.testing.assert_allclose(after[:, :11], before[:, :11], atol=2e-6)
    assert abs(after[:, 11:] - before[:, 11:]).max() > 0.1


@pytest.mark.parametrize("mechanism", ["softmax", "cosine", "linear", "performer"])
def test_the_rest_of_the_batch_changes_nothing(mechanism):
    model = small(mechanism, differential="v1", symmetric="plain")
    alone = scores(model, TOKENS[:1])
    np.testing.assert_allclose(scores(model, TOKENS)[:1], alone, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("mechanism", ["softmax", "performer"])
def test_generation_equals_reading_everything_again_for_each_token(
    mechanism, temperature
):
    model = small(mechanism, differential="v1", symmetric="plain")
    key = jax.random.key(3)
    found = generate(model, TOKENS[:, :5], 6, key, temperature=temperature)
    tokens = TOKENS[:, :5]
    for here in jax.random.split(key, 6):
        # causal: what stands after the last token read changes nothing
        padded = jnp.pad(tokens, ((0, 0), (0, 11 - tokens.shape[1])))
        last = scores(model, padded)[:, tokens.shape[1] - 1]
        if temperature:
            token = jax.random.categorical(here, last / temperature, axis=-1)
        else:
            token = last.argmax(axis=-1)
        tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
    np.testing.assert_array_equal(found, tokens[:, 5:])


@pytest.mark.parametrize("mechanism", ["softmax", "performer"])
def test_a_linear_state_does_not_grow_with_the_context(mechanism):
    model = small(mechanism, positions="rope")
    sizes = [
        sum(x.nbytes for x in jax.tree.leaves(model.init_cache(1, length)))
        for length in (10, 1000)
    ]
    assert (sizes[0] == sizes[1]) == (mechanism == "performer")


def test_dropout_needs_a_key_and_depends_on_it():
    model = small(dropout=0.3)
    certain = scores(model, TOKENS)
    np.testing.assert_array_equal(certain, scores(model, TOKENS))
    first, second, again = (scores(model, TOKENS, jax.random.key(i)) for i in (0, 1, 0))
    np.testing.assert_array_equal(first, again)
    assert abs(first - second).max() > 0.1
    assert abs(first - certain).max() > 0.1


@pytest.mark.slow
def test_rematerialisation_changes_no_gradient():
    def gradient(remat):
        graph, params = nnx.split(small(differential="v1", remat=remat, dropout=0.2))

        def loss(params):
            key = jax.random.key(5)
            return nnx.merge(graph, params)(TOKENS, dropout_key=key).var()

        return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

    for choice in ("dots", "feedforward", "full"):
        for one, other in zip(gradient("none"), gradient(choice), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    "choice",
    [
        {"differential": "v1", "pattern": ("softmax", "cosine")},
        {"differential": "v1", "pattern": ("linear", "performer")},
        {"differential": "v2", "pattern": ("entmax15", "decay")},
        {"pattern": ("flash", "gau")},
    ],
    ids=str,
)
def test_bfloat16_computes_close_to_float32_and_keeps_float32_weights(choice):
    # bfloat16 has 8 bits of mantissa: 2⁻⁸ a rounding, some ten roundings deep
    wide, narrow = small(**choice), small(**choice, dtype="bfloat16")
    for weight in jax.tree.leaves(nnx.state(narrow, nnx.Param)):
        assert weight.dtype == jnp.float32
    exact, rough = scores(wide, TOKENS), scores(narrow, TOKENS)
    assert rough.dtype == jnp.float32
    assert jnp.sqrt(jnp.mean((rough - exact) ** 2)) < 0.03 * exact.std()


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_embeddings_and_positions_start_as_large_as_they_are_told(scale):
    model = small(embedding_scale=scale)
    for table in (model.embedding.embedding, model.positions):
        assert float(table[...].std()) == pytest.approx(scale, rel=0.1)


def test_the_former_default_of_an_execution_is_read_from_older_checkpoints():
    former = small(mechanism="linear", implementation="rows")
    today = small(mechanism="linear")
    np.testing.assert_array_equal(former(TOKENS), today(TOKENS))


def test_tied_embeddings_share_one_table():
    tied, untied = small(tie_embeddings=True, bias=False), small(bias=False)
    assert count(untied) - count(tied) == 23 * 24


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"heads": 5}, "model.width 24 must be a multiple of model.heads 5"),
        ({"kv_heads": 2}, "model.kv_heads 2 must divide model.heads 3"),
        ({"symmetric": "plain", "kv_heads": 1}, "must equal model.heads 3"),
        ({"mechanism": "performr"}, f"choose from {', '.join(attention.MECHANISMS)}"),
        ({"mechanism": "cosine", "mask_self": True}, "cosine has no such option"),
        ({"mechanism": "performer", "length_base": 8}, "performer has no such option"),
        ({"features": "relu"}, "softmax has no such option"),
        ({"mechanism": "gau", "implementation": "tpu"}, "gau takes rows or whole"),
        ({"mechanism": "linear", "sink": True}, "linear has no such option"),
        (
            {"mechanism": "softpick", "sink": True},
            "model.attention.sink True is not possible with model.attention.mechanism "
            "'softpick'",
        ),
        (
            {"pattern": ("softmax", "softpick"), "sink": True},
            "model.attention.sink True is not possible",
        ),
        ({"forget": "gated"}, "model.attention.forget 'gated' is a decay per channel"),
        ({"length_scale": "learned"}, "'learned' needs model.attention.length_base"),
        ({"length_scale": "floor", "length_base": 4}, "'floor' replaces model.attenti"),
        ({"length_base": 1}, "model.attention.length_base must be 0"),
        (
            {"mechanism": "linear", "features": "sine"},
            "model.attention.features 'sine' is unknown: choose from elu",
        ),
        (
            {"mechanism": "linear", "features": "positive"},
            "model.attention.features 'positive' is not one of linear: choose from",
        ),
        ({"feature_count": 8}, "feature_count 8: softmax has no such option"),
        ({"key_norm": "unit"}, "model.attention.symmetric is 'none'"),
        ({"depth_offset": 1}, "model.attention.differential is 'none'"),
        ({"depth_offset": 1, "differential": "v2"}, "differential is 'v2'"),
        ({"differential": "v2", "symmetric": "plain"}, "two query heads one key"),
        ({"decay": "gated"}, "softmax has no such option"),
        ({"positions": "alibi", "mechanism": "linear"}, "linear takes none"),
        ({"pattern": ("softmax", "lineal")}, "model.pattern 'lineal' is unknown"),
        ({"positions": "rope", "rope_share": 0.1}, "model.positions 'rope'"),
        ({"positions": "rope", "head_size": 5}, "give an even model.head_size"),
        ({"rope_base": 5.0, "positions": "alibi"}, "model.positions is 'alibi'"),
        ({"rope_share": 0.5}, "model.positions is 'learned'"),
        ({"ponder": 0.5}, "model.kind is 'decoder'"),
        ({"rope_base": 0.0}, "model.rope_base must be at least 1"),
        ({"dropout": 1.0}, "model.dropout must be below 1"),
        ({"vocabulary": 0}, "model.vocabulary must be at least 1"),
        ({"norm": "batchnorm"}, "'batchnorm' is unknown: choose from layernorm, rms"),
        ({"activation": "tanh"}, "'tanh' is unknown: choose from relu, gelu, swiglu"),
        ({"width": -24}, "model.width must be at least 1"),
        ({"mechanism": "performer", "features": "sine"}, "positive"),
    ],
    ids=str,
)
def test_choices_that_exclude_each_other_are_refused_by_name(choice, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        small(**choice)(TOKENS)


def drawn(model, **sampling):
    """Return the next tokens of 400 examples of the same prompt."""
    prompt = jnp.broadcast_to(TOKENS[:1, :5], (400, 5))
    return np.asarray(generate(model, prompt, 1, jax.random.key(7), **sampling))[:, 0]


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 6, "top_p": 0.3}, {"temperature": 3.0}],
    ids=str,
)
def test_tokens_are_drawn_from_the_likeliest(sampling):
    model = small(depth=1)
    last = np.asarray(scores(model, TOKENS[:1, :5]), np.float64)[0, -1] * 9
    head = model.head
    head.kernel[...], head.bias[...] = 9 * head.kernel[...], 9 * head.bias[...]
    chances = np.exp(last / sampling.get("temperature", 1.0))
    order = np.argsort(-chances)
    chances[order[sampling.get("top_k", 23) :]] = 0
    chances /= chances.sum()
    likelier = np.cumsum(chances[order]) - chances[order]
    chances[order[likelier >= sampling.get("top_p", 1.0)]] = 0
    chances /= chances.sum()
    found = np.bincount(drawn(model, **sampling), minlength=23) / 400
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(chances))
    np.testing.assert_allclose(found, chances, atol=0.1)


def test_a_row_repeats_the_token_that_stops_it_and_the_others_go_on():
    model, key = small(), jax.random.key(2)
    whole = np.asarray(generate(model, TOKENS[:, :5], 12, key))
    stop = (int(whole[0, 4]), int(whole[1, 7]))
    found = np.asarray(generate(model, TOKENS[:, :5], 12, key, stop=stop))
    for row, wanted in zip(found, whole, strict=True):
        end = np.isin(wanted, stop).argmax()
        np.testing.assert_array_equal(row[: end + 1], wanted[: end + 1])
        assert set(row[end:]) == {wanted[end]}


@pytest.mark.parametrize(
    "sampling", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}], ids=str
)
def test_a_sampling_that_draws_nothing_is_refused(sampling):
    with pytest.raises(ValueError, match=f"{next(iter(sampling))} must be"):
        generate(small(depth=1), TOKENS[:, :5], 2, jax.random.key(0), **sampling)


def test_tokens_that_the_model_does_not_have_are_refused():
    model, key = small(), jax.random.key(2)
    with pytest.raises(ValueError, match="from 0 to 22, .* got 5 to 23"):
        generate(model, jnp.array([[5, 23]]), 3, key)
    for stop in (5, jnp.int32(5)):
        with pytest.raises(ValueError, match="stop must be a sequence of tokens"):
            generate(model, jnp.array([[5, 22]]), 3, key, stop=stop)
    with pytest.raises(ValueError, match="must be ints, got float32"):
        generate(model, jnp.ones((1, 2)), 3, key)
    with pytest.raises(ValueError, match=r"at least 1 token, got \(0, 2\)"):
        generate(model, jnp.zeros((0, 2), jnp.int32), 3, key)
    padded = jnp.array([[-1, 5], [4, 22]])  # padding may hold any number
    generate(model, padded, 3, key, lengths=jnp.array([1, 2]))


def test_more_tokens_than_learned_positions_are_refused():
    model = small(length=12)
    with pytest.raises(ValueError, match="19 tokens do not fit model.length 12"):
        model(TOKENS)
    with pytest.raises(ValueError, match="prompt of 5 and 8 new tokens"):
        generate(model, TOKENS[:, :5], 8, jax.random.key(0))


def test_prompts_have_an_axis_of_examples():
    with pytest.raises(ValueError, match=r"\[examples, tokens\], got \(19,\)"):
        generate(small(), TOKENS[0], 2, jax.random.key(0))


@pytest.mark.parametrize("temperature", [-1.0, float("nan")])
def test_a_temperature_is_no_negative_number(temperature):
    with pytest.raises(ValueError, match=f"temperature must be 0 .*got {temperature}"):
        key = jax.random.key(0)
        generate(small(depth=1), TOKENS[:, :5], 2, key, temperature=temperature)


@pytest.mark.parametrize("mechanism", ["softmax", "gau"])
def test_more_tokens_than_the_cache_holds_are_refused(mechanism):
    """Tokens of one call also under jit; earlier tokens if their number is concrete."""
    model = small(mechanism, depth=1, positions="none")
    cache = model.init_cache(2, 3)
    with pytest.raises(ValueError, match="5 tokens do not fit a cache of 3"):
        jax.eval_shape(model.decode, TOKENS[:, :5], cache)
    jax.eval_shape(model.decode, TOKENS[:, :5], cache, jnp.array([0, 2]))
    later = cache._replace(position=jnp.array([2, 0]))
    for tokens, lengths in ((2, None), (5, jnp.array([2, 3]))):
        with pytest.raises(ValueError, match="4 tokens do not fit a cache of 3"):
            model.decode(TOKENS[:, :tokens], later, lengths)


def test_filling_needs_no_learned_position():
    """Padding after the tokens of a row may exceed the table, and is not read."""
    model = small(depth=1, length=12)
    cache = model.init_cache(2, 16)._replace(position=jnp.array([10, 10]))

    @nnx.jit
    def both(model, tokens, lengths):
        padded = jnp.pad(tokens, ((0, 0), (0, 12)))
        wanted, _ = model.decode(tokens, cache)
        return wanted, model.decode(padded, cache, lengths)[0][:, :2]

    wanted, found = both(model, TOKENS[:, :2], jnp.array([2, 2]))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    for count in (3, 13):
        named = f"{10 + count} tokens do not fit model.length 12 learned positions"
        with pytest.raises(ValueError, match=named):
            model.decode(TOKENS[:, :count], cache)


def test_nothing_is_scored_where_nothing_is_read():
    for choice in ({}, {"mechanism": "performer", "differential": "v1"}):
        model = small(**choice, depth=1)
        for tokens in (TOKENS[:0], TOKENS[:, :0]):
            assert jax.eval_shape(model, tokens).shape == (*tokens.shape, 23)
