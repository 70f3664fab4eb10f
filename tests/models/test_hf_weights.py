"""Weights of other implementations in layers of symjax, and round trips."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.layers import Attention
from symjax.models import (
    Decoder,
    diffllama_attention,
    load_diffllama,
    official_attention,
    to_diffllama,
    to_official,
)

FOLDER = Path(__file__).parents[2].parent / "shared" / "conformance"
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def layer_output(params, x, *, depth, dtype="float64", **options):
    """Return the output of a layer of symjax with these parameters."""
    chosen = config.Attention(
        differential="v1", symmetric="none" if "key" in params else "plain"
    )
    size = params["lambda_query_1"].size
    options = config.Model(
        width=x.shape[-1],
        heads=params["query"]["kernel"].shape[1] // (2 * size),
        kv_heads=params["value"]["kernel"].shape[1] // (2 * size),
        head_size=size,
        bias=False,
        dtype=dtype,
        attention=chosen,
        **options,
    )
    layer = nnx.eval_shape(lambda: Attention(options, depth, rngs=nnx.Rngs(0)))
    graph = nnx.split(layer)[0]
    run = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
    return run(params, x)


def conformance_cases():
    """Return causal cases of the two layers; other cases need masks that ours lack."""
    for family in ("diff_", "diffsym_", "diffllama_"):
        for path in sorted(FOLDER.glob(f"{family}*.npz")):
            with np.load(path) as case:
                if case["causal"] and "attn_mask" not in case.files:
                    yield pytest.param(path, id=path.stem)


CASES = list(conformance_cases())


@pytest.mark.skipif(not CASES, reason="no files in ../shared/conformance")
@pytest.mark.parametrize("path", CASES or [None])
def test_published_weights_give_the_published_output_and_go_back(path, x64):
    with np.load(path) as file:
        case = dict(file)
    weights = {x.removeprefix("w:"): y for x, y in case.items() if x.startswith("w:")}
    llama = "o_proj.weight" in weights
    take, give = (
        (diffllama_attention, to_diffllama)
        if llama
        else (official_attention, to_official)
    )
    params = take(weights)
    output = layer_output(
        params,
        case["x"],
        depth=case["layer_idx" if llama else "depth"].item(),
        positions="rope" if case["rope"] else "none",
    )
    # Their naive module mixes the branches of grouped heads; their flash one does not.
    wanted = case.get("out_flash1", case["out"])
    np.testing.assert_allclose(output, wanted, rtol=1e-9, atol=1e-9)
    back = give(params)
    assert back.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


# Both layers by definition, head by head, in float64.

WIDTH, HEADS, KV_HEADS, SIZE, EPSILON = 22, 4, 2, 6, 1e-5


def random_layer(rng, output, *, norm):
    """Draw weights [out, in] of an attention layer with grouped heads and large λ."""
    queries, keys = 2 * HEADS * SIZE, 2 * KV_HEADS * SIZE
    shapes = {
        "q_proj.weight": (queries, WIDTH),
        "k_proj.weight": (keys, WIDTH),
        "v_proj.weight": (keys, WIDTH),
        output: (WIDTH, queries),
        **{name: (SIZE,) for name in LAMBDAS},
        **({"subln.weight": (2 * SIZE,)} if norm else {}),
    }
    return {
        name: (rng.normal(size=shape) * 0.4).astype(np.float32)
        for name, shape in shapes.items()
    }


def rotated(x, base, first, second):
    """Rotate the features x[first] and x[second] of [T H] as complex numbers."""
    numbers = x[:, first] + 1j * x[:, second]
    time, i = np.ogrid[: len(x), : x.shape[1] // 2]
    numbers = numbers * np.exp(1j * time * base ** (-2 * i / x.shape[1]))
    x = x.copy()
    x[:, first], x[:, second] = numbers.real, numbers.imag
    return x


def normed(x, weight):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON) * weight


def attention_by_definition(weights, x, depth, base=10000.0):
    """Run one example [T D] through the official layer or that of a DiffLlama."""
    weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    official = "subln.weight" in weights
    time, half = len(x), SIZE // 2
    first, second = slice(0, half), slice(half, SIZE)
    if official:
        first, second = slice(0, SIZE, 2), slice(1, SIZE, 2)
    query, key, value = (
        (x @ weights[f"{name}_proj.weight"].T).reshape(time, -1, SIZE) for name in "qkv"
    )
    one, two = (
        np.exp(weights[f"lambda_q{i}"] @ weights[f"lambda_k{i}"]) for i in (1, 2)
    )
    initial = 0.8 - 0.6 * np.exp(-0.3 * depth)
    outputs = []
    for n in range(HEADS):
        group = n * KV_HEADS // HEADS
        maps = []
        for branch in range(2):
            own = 2 * n + branch if official else branch * HEADS + n
            its = 2 * group + branch if official else branch * KV_HEADS + group
            scores = rotated(query[:, own], base, first, second)
            scores = scores @ rotated(key[:, its], base, first, second).T
            scores = np.where(np.tri(time), scores / np.sqrt(SIZE), -np.inf)
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            maps.append(powers / powers.sum(axis=1, keepdims=True))
        parts = (2 * group, 2 * group + 1) if official else (group, KV_HEADS + group)
        values = np.concatenate([value[:, part] for part in parts], axis=1)
        mixed = (maps[0] - (one - two + initial) * maps[1]) @ values
        mixed = normed(mixed, weights["subln.weight"] if official else 1)
        outputs.append(mixed * (1 - initial))
    output = "out_proj.weight" if official else "o_proj.weight"
    return np.concatenate(outputs, axis=1) @ weights[output].T


def test_official_weights_fold_into_those_of_a_diffllama():
    """The output projection takes the weight of the norm; ours computes the same."""
    rng = np.random.default_rng(0)
    weights = random_layer(rng, "out_proj.weight", norm=True)
    x = rng.normal(size=(2, 9, WIDTH)).astype(np.float32)
    wanted = [attention_by_definition(weights, np.float64(one), 3) for one in x]
    params = official_attention(weights)
    as_llama = to_diffllama(params)
    assert as_llama.keys() == {*LAMBDAS, *(f"{x}_proj.weight" for x in "qkvo")}
    theirs = [attention_by_definition(as_llama, np.float64(one), 3) for one in x]
    np.testing.assert_allclose(theirs, wanted, atol=1e-5)
    output = layer_output(params, x, depth=3, positions="rope", dtype="float32")
    np.testing.assert_allclose(output, wanted, atol=1e-5)
    for name, array in to_official(params).items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)
        assert array.dtype == weights[name].dtype


VOCABULARY, HIDDEN, DEPTH, BASE = 29, 34, 2, 500.0
SETTINGS = {
    "model_type": "diffllama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2 * HEADS,
    "num_key_value_heads": 2 * KV_HEADS,
    "head_dim": SIZE,
    "rms_norm_eps": EPSILON,
    "rope_parameters": {"rope_theta": BASE, "rope_type": "default"},
    "max_position_embeddings": 40,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def random_checkpoint(rng):
    """Draw the tensors of a DiffLlama, by name."""

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": draw(VOCABULARY, WIDTH),
        "model.norm.weight": draw(WIDTH),
        "lm_head.weight": draw(VOCABULARY, WIDTH),
    }
    for i in range(DEPTH):
        attention = random_layer(rng, "o_proj.weight", norm=False)
        layer = {f"self_attn.{name}": array for name, array in attention.items()}
        layer |= {
            "input_layernorm.weight": draw(WIDTH),
            "post_attention_layernorm.weight": draw(WIDTH),
            "mlp.gate_proj.weight": draw(HIDDEN, WIDTH) * 0.3,
            "mlp.up_proj.weight": draw(HIDDEN, WIDTH) * 0.3,
            "mlp.down_proj.weight": draw(WIDTH, HIDDEN) * 0.3,
        }
        tensors |= {f"model.layers.{i}.{name}": array for name, array in layer.items()}
    return tensors


def logits_by_definition(tensors, tokens):
    """Run one example through a DiffLlama."""
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(DEPTH):
        prefix = f"model.layers.{i}."
        layer = {
            name.removeprefix(prefix): array
            for name, array in tensors.items()
            if name.startswith(prefix)
        }
        attention = {name.removeprefix("self_attn."): y for name, y in layer.items()}
        inputs = normed(x, layer["input_layernorm.weight"])
        x = x + attention_by_definition(attention, inputs, i, BASE)
        inputs = normed(x, layer["post_attention_layernorm.weight"])
        gate = inputs @ layer["mlp.gate_proj.weight"].T
        up = inputs @ layer["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return normed(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def write(directory, tensors, settings=SETTINGS):
    from safetensors.numpy import save_file

    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(settings))


def write_shards(directory, tensors):
    """Write two files and their index, as large checkpoints are stored."""
    from safetensors.numpy import save_file

    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, directory / file)
    index = {"weight_map": {name: file for file, own in files.items() for name in own}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(SETTINGS))


def logits(directory, tokens):
    options, params = load_diffllama(directory)
    model = Decoder(options, rngs=nnx.Rngs(0))
    nnx.update(model, params)
    return nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens))


def test_a_diffllama_in_shards_of_bfloat16_gives_the_logits_of_its_definition(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    rng = np.random.default_rng(1)
    tensors = random_checkpoint(rng)
    for name in list(tensors)[::3]:
        tensors[name] = tensors[name].astype(jnp.bfloat16)
    write_shards(tmp_path, tensors)
    tokens = rng.integers(VOCABULARY, size=(2, 13))
    wanted = [logits_by_definition(tensors, one) for one in tokens]
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(logits(tmp_path, tokens), wanted, atol=2e-6 * scale)


@pytest.mark.parametrize("tied", [False, True])
def test_a_random_diffllama_gives_the_logits_of_transformers(tmp_path, tied):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    torch.manual_seed(0)
    settings = {name: x for name, x in SETTINGS.items() if name != "model_type"}
    settings |= {"tie_word_embeddings": tied, "lambda_std_dev": 0.4}
    settings |= {"initializer_range": 0.2, "attn_implementation": "eager"}
    theirs = transformers.DiffLlamaForCausalLM(
        transformers.DiffLlamaConfig(**settings)
    ).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if tied else "1GB")
    tokens = np.random.default_rng(2).integers(VOCABULARY, size=(2, 17))
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(logits(tmp_path, tokens), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'diffllama', got 'llama'"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number above 0, got -1e-06"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        (
            {"rope_scaling": {"type": "linear"}},
            "factor must be a number above 0, got N",
        ),
        ({"rope_scaling": {"type": "su"}}, "rope_type must be one of default, linear"),
        ({"num_key_value_heads": 1}, "must be even, got 8 and 1"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 6}, "config.json: .* must divide model.heads"),
        ({"intermediate_size": 7}, r"down_proj.weight must be \(22, 7\).*\(22, 34"),
        ({"num_hidden_layers": 1}, "model has unknown 'model.layers.1.*' and 10 more"),
        ({"num_hidden_layers": 3}, "model lacks 'model.layers.2.*' and 10 more"),
    ],
)
def test_what_the_decoder_does_not_have_is_refused_by_name(tmp_path, changes, message):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    settings = {name: x for name, x in (SETTINGS | changes).items() if x is not None}
    write(tmp_path, random_checkpoint(np.random.default_rng(3)), settings)
    with pytest.raises(ValueError, match=message):
        load_diffllama(tmp_path)


def test_missing_files_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"config.json is missing"):
        load_diffllama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(ValueError, match="pip install safetensors"):
            load_diffllama(tmp_path)
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        load_diffllama(tmp_path)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (to_official, {"metric": np.ones(3)}, "to_official: .* unknown 'metric'"),
        (to_diffllama, {"key": None}, "to_diffllama: .* lacks 'key/kernel'"),
        (to_official, {"out": {"kernel": np.ones((47, 5))}}, r"out/kernel \(47, 5\)"),
        (to_diffllama, {"lambda_key_2": np.ones(4)}, r"lambda_key_2 \(4,\) does not"),
        (to_official, {"query": {"kernel": 1, "bias": 1}}, "has unknown 'query/bias'"),
    ],
)
def test_layers_that_the_others_do_not_have_are_refused(function, changes, message):
    weights = random_layer(np.random.default_rng(4), "out_proj.weight", norm=True)
    params = {**official_attention(weights), **changes}
    params = {name: x for name, x in params.items() if x is not None}
    with pytest.raises(ValueError, match=message):
        function(params)
