"""Folders of weights: those of transformers, and round trips."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_logits
from flax import nnx
from safetensors.numpy import load_file, save_file

import symjax
from symjax import config
from symjax.data import subwords
from symjax.data.tokens import ByteTokenizer
from symjax.exchange import Loaded, pretrained
from symjax.models import build, convert
from symjax.models.huggingface.folders import read_folder

REFERENCE = json.loads(reference_logits.LOGITS.read_text())
TOKENS, LONG = reference_logits.TOKENS, reference_logits.LONG
ABSENT = [x for x in ("torch", "transformers") if not importlib.util.find_spec(x)]
with_transformers = pytest.mark.skipif(
    bool(ABSENT), reason=f"{' and '.join(ABSENT)} not installed"
)
SHAPE = config.Model(
    vocabulary=29, width=24, heads=2, depth=2, length=40, feedforward=30
)
LLAMA = dataclasses.replace(
    SHAPE,
    positions="rope",
    rope_base=500.0,
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)
GPT2 = dataclasses.replace(SHAPE, activation="gelu", tie_embeddings=True)


def like(options, **attention):
    return dataclasses.replace(options, attention=config.Attention(**attention))


EXPORTED = {
    "llama": (LLAMA, "llama"),
    "grouped": (
        dataclasses.replace(LLAMA, heads=4, kv_heads=2, tie_embeddings=True),
        "llama",
    ),
    "sym": (like(LLAMA, symmetric="plain"), "llama"),
    "diff": (like(LLAMA, differential="v1"), "diffllama"),
    "diff_sym": (like(LLAMA, differential="v1", symmetric="plain"), "diffllama"),
    "epsilon": (
        dataclasses.replace(like(LLAMA, differential="v1"), norm_eps=0.01),
        "diffllama",
    ),
    "gpt2": (dataclasses.replace(GPT2, norm_eps=0.02), "gpt2"),
    "gpt2_relu": (dataclasses.replace(GPT2, activation="relu", heads=3), "gpt2"),
}


SCALINGS = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0, "original_length": 30},
    "yarn": {"factor": 2.5, "original_length": 16, "beta_fast": 5.0},
    "llama3": {"factor": 8.0, "original_length": 16, "high_frequency_factor": 5.0},
}
EXPORTED |= {
    kind: (
        dataclasses.replace(
            LLAMA,
            norm_eps=0.1,
            rope_scaling=config.RopeScaling(kind=kind, **numbers),
        ),
        "llama",
    )
    for kind, numbers in SCALINGS.items()
}


def random_model(options, seed=3) -> Loaded:
    """Return a model far from initial values: no bias is 0 and no norm is 1."""
    model = build(options, rngs=nnx.Rngs(seed))
    weights = nnx.state(model, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(4), 999))
    draw = lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape)  # noqa: E731
    nnx.update(model, jax.tree.map(draw, weights))
    whole = config.Config(model=options)
    tokenizer = ByteTokenizer()
    return Loaded(model, tokenizer, whole, 7, language=tokenizer.describe())


@pytest.mark.parametrize("name", reference_logits.MODELS)
def test_a_folder_of_transformers_gives_its_logits(tmp_path, name):
    reference_logits.write(name, tmp_path)
    found = symjax.load_pretrained(tmp_path)
    assert found.tokenizer is None and np.abs(REFERENCE[name]).max() > 1
    np.testing.assert_allclose(found.logits(TOKENS), REFERENCE[name], atol=1e-5)


@pytest.mark.parametrize("name", reference_logits.SCALED)
def test_scaled_rope_gives_the_logits_of_transformers_at_long_texts(tmp_path, name):
    reference_logits.write(name, tmp_path)
    found = symjax.load_pretrained(tmp_path)
    logits, wanted = found.logits(LONG)[:, :: reference_logits.STRIDE], f"{name}, long"
    np.testing.assert_allclose(logits, REFERENCE[wanted], atol=1e-5)
    if name != "llama-plain":
        scaled = np.asarray(REFERENCE[wanted]) - REFERENCE["llama-plain, long"]
        assert np.abs(scaled).max() > 0.1


def test_dynamic_rope_decodes_as_transformers_does(tmp_path):
    """A token is rotated for the length when it is read, not for the whole row."""
    reference_logits.write("llama-dynamic", tmp_path)
    model = symjax.load_pretrained(tmp_path).model
    read = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    first = reference_logits.PROMPT
    logits, cache = read(model, LONG[:, :first], model.init_cache(1, LONG.size))
    found = [logits]
    for place in range(first, LONG.size):
        logits, cache = read(model, LONG[:, place : place + 1], cache)
        found.append(logits)
    logits = np.concatenate(found, axis=1)[:, :: reference_logits.STRIDE]
    wanted = np.asarray(REFERENCE["llama-dynamic, decoded"])
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert np.abs(wanted - REFERENCE["llama-dynamic, long"]).max() > 0.1


@with_transformers
@pytest.mark.parametrize("name", reference_logits.MODELS)
def test_the_reference_is_what_transformers_gives(tmp_path, name):
    reference_logits.write(name, tmp_path)
    found = reference_logits.logits_of_transformers(tmp_path)
    np.testing.assert_allclose(found, REFERENCE[name], atol=2e-6)
    if name in reference_logits.SCALED:
        found = reference_logits.logits_of_transformers(tmp_path, LONG)
        found, wanted = found[:, :: reference_logits.STRIDE], f"{name}, long"
        np.testing.assert_allclose(found, REFERENCE[wanted], atol=2e-6)


@with_transformers
@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_gives_the_logits_of_what_is_written(tmp_path, name):
    loaded = random_model(EXPORTED[name][0])
    assert symjax.save_pretrained(loaded, tmp_path) == EXPORTED[name][1]
    found = reference_logits.logits_of_transformers(tmp_path)
    assert np.abs(found).max() > 1
    np.testing.assert_allclose(found, loaded.logits(TOKENS), atol=1e-5)
    if loaded.config.model.rope_scaling.kind != "none":
        found = reference_logits.logits_of_transformers(tmp_path, LONG)
        np.testing.assert_allclose(found, loaded.logits(LONG), atol=1e-5)


@pytest.mark.parametrize("name", EXPORTED)
def test_what_is_written_is_read_again(tmp_path, name):
    loaded = random_model(EXPORTED[name][0])
    assert symjax.save_pretrained(loaded, tmp_path) == EXPORTED[name][1]
    found = symjax.load_pretrained(tmp_path)
    assert (found.step, found.tokenizer) == (7, loaded.tokenizer)
    np.testing.assert_allclose(
        found.logits(TOKENS), loaded.logits(TOKENS), rtol=1e-5, atol=1e-5
    )
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == EXPORTED[name][1]


SHARD = 2500  # bytes, of which some kernels have more


def test_an_export_names_the_tokens_before_and_after_a_document(tmp_path):
    loaded = random_model(dataclasses.replace(LLAMA, vocabulary=256))

    def settings(**language):
        known = dataclasses.replace(loaded, language=loaded.language | language)
        symjax.save_pretrained(known, tmp_path)
        found = json.loads((tmp_path / "config.json").read_text())
        return found["bos_token_id"], found["eos_token_id"]

    assert settings() == (None, 0)
    assert settings(document_start=0) == (0, 0)
    assert symjax.load_pretrained(tmp_path).delimiters.start == 0


def test_large_weights_are_written_in_shards(tmp_path):
    """In the index format of safetensors. Writing again leaves no old shard."""
    loaded = random_model(LLAMA)
    symjax.save_pretrained(loaded, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    symjax.save_pretrained(loaded, tmp_path, shard_size=SHARD)
    names = sorted(x.name for x in tmp_path.glob("*.safetensors"))
    count = len(names)
    assert count > 3
    assert names == [
        f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / name) for name in names}
    assert all(
        len(x) == 1 or sum(y.nbytes for y in x.values()) <= SHARD
        for x in files.values()
    )
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(files[index["weight_map"][name]][name], tensor)
    found = symjax.load_pretrained(tmp_path)
    np.testing.assert_array_equal(found.logits(TOKENS), loaded.logits(TOKENS))
    symjax.save_pretrained(loaded, tmp_path)
    assert [x.name for x in tmp_path.glob("model*")] == ["model.safetensors"]


def test_a_path_or_a_bare_module_is_refused_as_a_model_to_write(tmp_path):
    for given in ("runs/gpt", random_model(LLAMA).model):
        name = type(given).__name__
        with pytest.raises(ValueError, match=f"symjax.load returns it, got a {name}"):
            symjax.save_pretrained(given, tmp_path)  # pyright: ignore
    assert not list(tmp_path.iterdir())


def test_the_workdir_of_a_run_is_no_folder_for_weights(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="is the workdir of a run: give another"):
        symjax.save_pretrained(random_model(LLAMA), tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["checkpoints"]


def test_shards_of_two_models_are_no_model(tmp_path):
    for seed, name in enumerate(("old", "new")):
        loaded = random_model(LLAMA, seed)
        symjax.save_pretrained(loaded, tmp_path / name, shard_size=SHARD)
    new = sorted((tmp_path / "new").glob("*.safetensors"))
    pairs = ((tmp_path / "old" / x.name, x) for x in new)
    shutil.copy(*next(x for x in pairs if x[0].read_bytes() != x[1].read_bytes()))
    with pytest.raises(
        ValueError, match="new does not have the tensors that it was written"
    ):
        symjax.load_pretrained(tmp_path / "new")


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    symjax.save_pretrained(random_model(LLAMA), tmp_path, shard_size=SHARD)
    index = tmp_path / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    first = next(iter(known["weight_map"].values()))
    known["weight_map"] = dict.fromkeys(known["weight_map"], first)
    index.write_text(json.dumps(known))
    with pytest.raises(ValueError, match=f"index.json does not fit .*{first}"):
        symjax.load_pretrained(tmp_path)


def test_a_save_that_fails_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    """For instance on a full disk. A left-over index does not hide a whole file."""
    loaded = random_model(LLAMA)
    symjax.save_pretrained(loaded, tmp_path, shard_size=SHARD)
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "write_tensors", full)
        with pytest.raises(OSError, match="No space"):
            symjax.save_pretrained(loaded, tmp_path)
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_remove_others", lambda *_: None)
        symjax.save_pretrained(loaded, tmp_path)
    found = symjax.load_pretrained(tmp_path)
    np.testing.assert_array_equal(found.logits(TOKENS), loaded.logits(TOKENS))


@with_transformers
def test_transformers_reads_shards(tmp_path):
    loaded = random_model(EXPORTED["diff_sym"][0])
    symjax.save_pretrained(loaded, tmp_path, shard_size=SHARD)
    found = reference_logits.logits_of_transformers(tmp_path)
    np.testing.assert_allclose(found, loaded.logits(TOKENS), atol=1e-5)


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_an_index_that_names_no_files_is_refused(tmp_path, index):
    symjax.save_pretrained(random_model(LLAMA), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="index.json has no weight_map that names fil"):
        symjax.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="shard_size must be at least 1 byte, got 0"):
        symjax.save_pretrained(random_model(LLAMA), tmp_path, shard_size=0)


@pytest.mark.parametrize(
    "options",
    [
        like(SHAPE, mechanism="performer", feature_count=8, features="favor#"),
        like(SHAPE, mechanism="decay", decay="mamba2", differential="v2"),
        dataclasses.replace(SHAPE, kind="encoder", classes=3),
    ],
    ids=["performer", "mamba2", "encoder"],
)
def test_every_model_has_a_folder_of_our_own_names(tmp_path, options):
    loaded = dataclasses.replace(random_model(options), labels=("a", "b", "c"))
    assert symjax.save_pretrained(loaded, tmp_path) == "symjax"
    found = symjax.load_pretrained(tmp_path)
    assert (found.config, found.labels) == (loaded.config, loaded.labels)
    np.testing.assert_array_equal(found.logits(TOKENS), loaded.logits(TOKENS))
    card = (tmp_path / "README.md").read_text()
    assert "transformers does not load this folder: no model of trans" in card
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            like(LLAMA, mechanism="performer"),
            "model.attention.mechanism is 'performer', in a llama it is 'softmax'",
        ),
        (like(LLAMA, differential="v2"), "attention.differential is 'v2', in a llama"),
        (like(LLAMA, symmetric="pairwise"), "symmetric is 'pairwise', in a llama"),
        (like(LLAMA, window=9, differential="v1"), "window is 9, in a diffllama it is"),
        (
            dataclasses.replace(LLAMA, positions="rope_interleaved"),
            "model.positions is 'rope_interleaved', in a llama it is 'rope'",
        ),
        (SHAPE, "tie_embeddings is False, in a gpt2 it is True$"),
        (
            dataclasses.replace(SHAPE, positions="rope"),
            "this: model.activation is 'relu', in a llama it is 'swiglu'; model.norm is"
            " 'layernorm', .*'rmsnorm'; model.bias is True, in a llama it is False$",
        ),
    ],
)
def test_what_transformers_does_not_compute_is_refused_by_its_key(
    tmp_path, options, message
):
    with pytest.raises(ValueError, match=message) as error:
        symjax.save_pretrained(random_model(options), tmp_path, format="transformers")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_the_card_shows_the_numbers_of_the_evaluation(tmp_path):
    loaded, path = random_model(LLAMA), tmp_path / "found.json"
    heldout = {"loss": 1.25, "bits_per_byte": 1.5, "ngrams": {"bigram": 2.5}}
    weights = nnx.state(loaded.model, nnx.Param)
    about = {"step": 7, "parameters": sum(x.size for x in jax.tree.leaves(weights))}
    path.write_text(json.dumps(about | {"heldout": heldout}))
    symjax.save_pretrained(loaded, tmp_path / "out", results=path)
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "| held-out loss | 1.2500 |",
        "| held-out bits per byte | 1.5000 |",
        "| bigram table | 2.5000 |",
        "AutoModelForCausalLM.from_pretrained",
    ):
        assert line in card
    others = {
        "step": about | {"step": 8},
        "size": about | {"parameters": 9},
        "harness": {"step": 7, "harness": {}},  # output of symjax.programs.harness
    }
    for name, found in others.items():
        (tmp_path / name).write_text(json.dumps(found))
    for results, message in (
        (tmp_path / "step", "results are of step 8, the model is of step 7"),
        (tmp_path / "size", f"of parameters 9, .* parameters {about['parameters']}"),
        (tmp_path / "harness", "are not the JSON of eval.py"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "out" / "config.json", "are not the JSON of eval.py"),
    ):
        with pytest.raises(ValueError, match=message):
            symjax.save_pretrained(loaded, tmp_path / "new", results=results)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="format 'onnx' is unknown: choose from auto"):
        symjax.save_pretrained(loaded, tmp_path / "new", format="onnx")


def test_the_tokenizer_of_a_folder_has_the_tokens_of_its_model(tmp_path):
    loaded = random_model(LLAMA)  # of 29 tokens, and bytes
    tokenizer = subwords.train_bpe(["a sheep met a fox"], 260)
    stated = dataclasses.replace(loaded, tokenizer=tokenizer, language={})
    symjax.save_pretrained(stated, tmp_path)
    with pytest.raises(ValueError, match="tokenizer.json has 260 tokens, the .* 29"):
        symjax.load_pretrained(tmp_path)
    symjax.save_pretrained(loaded, tmp_path)
    assert not list(tmp_path.glob("tokenizer*"))
    assert symjax.load_pretrained(tmp_path).tokenizer == ByteTokenizer()


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.rotary_emb.inv_freq"),
        ("diffllama", "model.layers.1.self_attn.rotary_emb.cos_cached"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
        ("gpt2", "transformer.h.0.attn.bias"),
    ],
)
@pytest.mark.parametrize("shards", [False, True])
def test_buffers_that_transformers_computes_are_ignored(tmp_path, name, buffer, shards):
    tensors = reference_logits.write(name, tmp_path)
    own = {buffer: np.full(6, np.nan, np.float32)}  # its numbers are not used
    if shards:
        (tmp_path / "model.safetensors").unlink()
        files = {"a.safetensors": tensors, "b.safetensors": own}
        places = {x: file for file, some in files.items() for x in some}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    else:
        files = {"model.safetensors": tensors | own}
    for file, some in files.items():
        save_file(some, tmp_path / file)
    assert symjax.load_pretrained(tmp_path).logits(TOKENS).shape == (2, 7, 29)


def test_a_llama_without_an_epsilon_has_that_of_transformers(tmp_path):
    for kind, wanted in (("llama", 1e-6), ("diffllama", 1e-5)):
        folder = tmp_path / kind
        folder.mkdir()
        reference_logits.write(kind, folder)
        settings = dict(reference_logits.MODELS[kind])
        del settings["rms_norm_eps"]
        (folder / "config.json").write_text(json.dumps(settings))
        assert read_folder(folder).options.norm_eps == wanted


def bad_folder(folder, fault):
    """Return the folder of a Llama in which one thing is wrong."""
    tensors = reference_logits.write("llama", folder)
    weights = folder / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "nan":
        tensors[name][3, 4:6] = np.nan, np.inf
        save_file(tensors, weights)
    elif fault == "integers":
        save_file(tensors | {name: tensors[name].astype(np.int8)}, weights)
    elif fault == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    elif fault == "cut":
        weights.write_bytes(weights.read_bytes()[:-99])
    elif fault == "shard":
        weights.rename(folder / "a.safetensors")
        places = dict.fromkeys(tensors, "a.safetensors") | {name: "b.safetensors"}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    else:
        weights.rename(folder / fault)
    return folder


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("nan", "up_proj.weight has 2 of 816 numbers that are NaN .* another checkp"),
        ("integers", "up_proj.weight has int8, as quantised weights have: write"),
        ("pointer", "model.safetensors is a pointer of Git LFS: git lfs pull gets it"),
        ("cut", r"model.safetensors is damaged \(.*\): download or write it again"),
        ("shard", "b.safetensors is missing, which .*index.json names: download it"),
        (
            "pytorch_model.bin",
            "has pytorch_model.bin and no model.safetensors: load it",
        ),
        ("consolidated.00.pth", "has consolidated.00.pth and no model.safetensors"),
        ("other", "model.safetensors is missing$"),
    ],
)
def test_weights_that_cannot_be_read_say_what_to_do(tmp_path, fault, line):
    with pytest.raises(ValueError, match=line) as error:
        symjax.load_pretrained(bad_folder(tmp_path, fault))
    assert "\n" not in str(error.value)


def test_a_name_of_the_hub_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "x/Llama-3.2-1B is no folder: .* hf download x/Llama-3.2-1B --local-dir"
    with pytest.raises(ValueError, match=line):
        symjax.load_pretrained("x/Llama-3.2-1B")
    with pytest.raises(ValueError, match=f"{tmp_path}/none is no folder$"):
        symjax.load_pretrained(tmp_path / "none")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json is missing: it is an adapter: m"):
        symjax.load_pretrained(tmp_path)


def test_an_export_without_a_tokenizer_of_transformers_says_so(tmp_path, capsys):
    loaded = random_model(EXPORTED["diff"][0])
    line = "AutoTokenizer of transformers finds no tokenizer in this folder: the tokens"
    line += " are those of data.tokenizer=byte"
    assert symjax.save_pretrained(loaded, tmp_path / "byte") == "diffllama"
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'byte'}: {line}")
    assert line in (tmp_path / "byte" / "README.md").read_text()
    tokenizer = subwords.train_bpe(["a sheep met a fox"], 260)
    loaded = dataclasses.replace(loaded, tokenizer=tokenizer, language={})
    symjax.save_pretrained(loaded, tmp_path / "bpe")
    symjax.save_pretrained(loaded, tmp_path / "own", format="symjax")
    assert capsys.readouterr().err == ""
    assert "AutoTokenizer" not in (tmp_path / "bpe" / "README.md").read_text()


def test_gpt2_as_it_was_stored_in_2019_is_read(tmp_path):
    tensors = reference_logits.write("gpt2", tmp_path)
    old = {x.removeprefix("transformer."): y for x, y in tensors.items()}
    old["h.0.attn.bias"] = np.tri(40, dtype=np.float32)[None, None]
    save_file(old, tmp_path / "model.safetensors")
    found = symjax.load_pretrained(tmp_path)
    np.testing.assert_allclose(found.logits(TOKENS), REFERENCE["gpt2"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "bert"}, "must be 'llama' or 'diffllama' or 'gpt2'"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0, got 0"),
        ("gpt2", {"layer_norm_epsilon": "x"}, "must be a number above 0, got 'x'"),
        ("llama", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("llama", {"hidden_size": "24"}, "hidden_size must be a whole number above"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope"}},
            "rope_type must be one of default, linear, dynamic, .* got 'longrope'",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor must be a number above 0, got None",
        ),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_scaling must be one object for all layers",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "config.json: model.rope_scaling.factor must be at least 1, got 0.5",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ("gpt2", {"activation_function": "gelu"}, "must be one of gelu_new, .*'gelu'"),
        ("gpt2", {"n_positions": None}, "n_positions is missing"),
        ("gpt2", {"n_layer": 3}, "model lacks 'transformer.h.2"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "must be False, got True"),
    ],
)
def test_settings_that_the_decoder_does_not_have_are_refused(
    tmp_path, name, changes, message
):
    reference_logits.write(name, tmp_path)
    settings = {**reference_logits.MODELS[name], **changes}
    settings = {x: y for x, y in settings.items() if y is not None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        symjax.load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "problems"),
    [
        ("llama", {"model_type": "mistral"}, ["model_type must be .*, got 'mistral'"]),
        (
            "llama",
            {
                "attention_bias": True,
                "hidden_act": "gelu",
                "hidden_size": None,
                "num_hidden_layers": None,
                "rope_scaling": {"type": "su", "partial_rotary_factor": 0.5},
            },
            [
                "hidden_act must be 'silu', got 'gelu'",
                "attention_bias must be False, got True",
                "hidden_size is missing",
                "num_hidden_layers is missing",
                "partial_rotary_factor must be 1.0, got 0.5",
                "rope_type must be one of default, .*, got 'su'",
            ],
        ),
        (
            "gpt2",
            {"add_cross_attention": True, "activation_function": "silu", "n_head": "4"},
            [
                "add_cross_attention must be False, got True",
                "activation_function must be one of .*, got 'silu'",
                "n_head must be a whole number above 0, got '4'",
            ],
        ),
    ],
)
def test_a_refusal_names_the_folder_every_setting_and_what_is_read(
    tmp_path, name, changes, problems
):
    settings = {**reference_logits.MODELS[name], **changes}
    settings = {x: y for x, y in settings.items() if y is not None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="; ".join(problems)) as refusal:
        symjax.load_pretrained(tmp_path)
    line = str(refusal.value)
    assert line.startswith(f"{tmp_path / 'config.json'}: ")
    assert line.endswith("symjax reads Llama, DiffLlama and GPT-2)")
    assert "\n" not in line


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    symjax.save_pretrained(random_model(LLAMA), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-99])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        symjax.load_pretrained(tmp_path)
    (tmp_path / "symjax.json").write_text('{"format": "llama", "config": {"x": 1}}')
    with pytest.raises(ValueError, match="symjax.json: x is unknown|is damaged"):
        symjax.load_pretrained(tmp_path)
    (tmp_path / "symjax.json").write_text("{")
    with pytest.raises(ValueError, match="symjax.json is no JSON"):
        symjax.load_pretrained(tmp_path)


@pytest.mark.parametrize("differential", ["none", "v1"])
def test_grouped_heads_become_heads_of_their_own(differential):
    """Symmetric keys, for instance, need them; the function stays the same."""
    grouped = dataclasses.replace(
        like(LLAMA, differential=differential),
        heads=4,
        kv_heads=2,
        head_size=4,
        bias=True,
    )
    loaded = random_model(grouped)
    target = dataclasses.replace(grouped, kv_heads=0)
    params = nnx.to_pure_dict(nnx.state(loaded.model, nnx.Param))
    model = build(target, rngs=nnx.Rngs(0))
    nnx.update(model, convert(params, grouped, target))
    run = nnx.jit(lambda model, tokens: model(tokens))
    np.testing.assert_allclose(
        run(model, jnp.asarray(TOKENS)), loaded.logits(TOKENS), atol=1e-5
    )


@pytest.mark.parametrize(
    "attention",
    [
        {"symmetric": "plain"},
        {"differential": "v1"},
        {"differential": "v1", "symmetric": "plain"},
        {"mechanism": "performer", "feature_count": 16},
    ],
    ids=["sym", "diff", "diff_sym", "performer"],
)
def test_a_llama_turns_into_other_models(tmp_path, attention):
    reference_logits.write("llama", tmp_path)
    found = read_folder(tmp_path)
    target = dataclasses.replace(
        found.options, kv_heads=4, attention=config.Attention(**attention)
    )
    if attention.get("differential"):
        target = dataclasses.replace(target, head_size=6)
    model = build(target, rngs=nnx.Rngs(0))
    nnx.update(model, convert(found.params, found.options, target))
    logits = jax.jit(model)(jnp.asarray(TOKENS))
    assert np.isfinite(logits).all()
    values = model.blocks[1].attention.value.kernel[...]
    kernel = found.params["blocks"][1]["attention"]["value"]["kernel"]
    wanted = np.repeat(kernel.reshape(24, 2, 12), 2, axis=1).reshape(24, 48)
    np.testing.assert_array_equal(values, wanted)
