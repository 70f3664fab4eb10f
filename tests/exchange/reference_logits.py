"""Write tiny models as Hugging Face stores them, and their logits by transformers.

    pip install torch transformers && python tests/exchange/reference_logits.py

The logits are written beside this file. NumPy draws the weights from the names of the
tensors, so that tests make the same folders without torch.
"""

import json
import zlib
from pathlib import Path

import numpy as np

LOGITS = Path(__file__).with_suffix(".json")
VOCABULARY, WIDTH, HIDDEN, DEPTH, LENGTH = 29, 24, 34, 2, 40
TOKENS = np.array([[3, 17, 28, 0, 9, 9, 21], [1, 2, 26, 14, 5, 8, 13]])
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": LENGTH,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
}
MODELS = {
    "llama": {
        "model_type": "llama",
        **LLAMA,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "tie_word_embeddings": False,
    },
    "llama-tied": {
        "model_type": "llama",
        **LLAMA,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "diffllama": {
        "model_type": "diffllama",
        **LLAMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": DEPTH,
        "n_head": 3,
        "n_inner": HIDDEN,
        "n_positions": LENGTH,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
}
# The same models with a large epsilon.
MODELS |= {
    "llama-epsilon": MODELS["llama"] | {"rms_norm_eps": 0.02},
    "diffllama-epsilon": MODELS["diffllama"] | {"rms_norm_eps": 0.01},
    "gpt2-epsilon": MODELS["gpt2"] | {"layer_norm_epsilon": 0.04},
}
# RoPE for longer texts, as versions 5, 4 and older ones of transformers write it.
BEFORE = 16  # tokens of context before the scaling


def _scaled(kind: str, settings: dict | None = None, **numbers) -> dict:
    theta = {"rope_theta": 500.0}
    bare = {x: y for x, y in MODELS["llama"].items() if x != "rope_parameters"}
    own = {"rope_type": kind, **numbers}
    if settings is None:
        settings = {"rope_parameters": own | theta}
    return bare | settings


ORIGINAL = {"original_max_position_embeddings": BEFORE}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, **ORIGINAL}
SCALED = {
    "llama-plain": _scaled("default"),
    "llama-linear": _scaled("linear", factor=2.5),
    "llama-linear-old": _scaled(
        "linear",
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "llama-dynamic": _scaled("dynamic", factor=2.0),
    "llama-yarn": _scaled("yarn", factor=2.5, **ORIGINAL),
    "llama-yarn-ends": _scaled(
        *("yarn",),
        **ORIGINAL,
        **{"factor": 2.5, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
        attention_factor=1.3,
    ),
    "llama-yarn-mscale": _scaled(
        "yarn", factor=2.5, mscale=0.7, mscale_all_dim=0.4, **ORIGINAL
    ),
    "llama-3.1": _scaled("llama3", {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
}
MODELS |= SCALED
MODELS["diffllama-llama3"] = MODELS["diffllama"] | {
    "rope_parameters": LLAMA3 | {"rope_theta": 500.0}
}
# Longer than any length in the settings; logits are compared at every STRIDEth place.
LONG = np.random.default_rng(5).integers(VOCABULARY, size=(1, 75))
STRIDE = 6


def shapes(settings: dict) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a model, as transformers writes
    them."""
    if settings["model_type"] == "gpt2":
        return _gpt2_shapes()
    size = settings["head_dim"]
    queries = settings["num_attention_heads"] * size
    keys = settings["num_key_value_heads"] * size
    layer = {
        "self_attn.q_proj": (queries, WIDTH),
        "self_attn.k_proj": (keys, WIDTH),
        "self_attn.v_proj": (keys, WIDTH),
        "self_attn.o_proj": (WIDTH, queries),
        "mlp.gate_proj": (HIDDEN, WIDTH),
        "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    found = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    found["model.norm.weight"] = (WIDTH,)
    if not settings["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCABULARY, WIDTH)
    for i in range(DEPTH):
        prefix = f"model.layers.{i}."
        found |= {f"{prefix}{name}.weight": shape for name, shape in layer.items()}
        if settings["model_type"] == "diffllama":
            vectors = [f"lambda_{x}{n}" for x in "qk" for n in (1, 2)]
            found |= {f"{prefix}self_attn.{name}": (size,) for name in vectors}
    return found


def _gpt2_shapes() -> dict[str, tuple[int, ...]]:
    found = {
        "wte.weight": (VOCABULARY, WIDTH),
        "wpe.weight": (LENGTH, WIDTH),
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
    }
    for i in range(DEPTH):
        for name, shape in (
            ("ln_1", (WIDTH,)),
            ("attn.c_attn", (WIDTH, 3 * WIDTH)),
            ("attn.c_proj", (WIDTH, WIDTH)),
            ("ln_2", (WIDTH,)),
            ("mlp.c_fc", (WIDTH, HIDDEN)),
            ("mlp.c_proj", (HIDDEN, WIDTH)),
        ):
            found[f"h.{i}.{name}.weight"] = shape
            found[f"h.{i}.{name}.bias"] = shape[-1:]
    return {f"transformer.{name}": shape for name, shape in found.items()}


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a tensor of a size at which every part of the model matters."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    scale = 1 if "embed" in name or "wte" in name or "norm" in name else 0.4
    return (scale * rng.normal(size=shape)).astype(np.float32)


def write(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Write the folder of a model; return its tensors."""
    from safetensors.numpy import save_file

    settings = MODELS[name]
    tensors = {x: tensor(x, shape) for x, shape in shapes(settings).items()}
    if name in SCALED:  # less rounding of large angles
        for x in tensors:
            tensors[x] /= 3 if "q_proj" in x or "k_proj" in x else 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


def logits_of_transformers(folder: Path, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Return the logits of the model that transformers makes of a folder.

    It must know every tensor.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    if any(loading.values()):
        raise ValueError(f"transformers did not take every tensor: {loading}")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.float().numpy()


PROMPT = 30  # tokens of LONG that are read at once, before steps of one token


def decoded_by_transformers(folder: Path) -> np.ndarray:
    """Return logits of LONG from a cache: of the prompt, then token by token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens, cache, found = torch.from_numpy(LONG), None, []
    for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, LONG.size))]:
        with torch.no_grad():
            output = model.eval()(
                tokens[:, start:stop], past_key_values=cache, use_cache=True
            )
        cache = output.past_key_values
        found.append(output.logits.float().numpy())
    return np.concatenate(found, axis=1)


def _rounded(logits: np.ndarray) -> list:
    return [[[round(float(x), 6) for x in y] for y in z] for z in logits]


def main() -> None:
    import tempfile

    found = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder))
            found[name] = _rounded(logits_of_transformers(Path(folder)))
            if name in SCALED:
                logits = logits_of_transformers(Path(folder), LONG)
                found[f"{name}, long"] = _rounded(logits[:, ::STRIDE])
            if "dynamic" in name:
                logits = decoded_by_transformers(Path(folder))
                found[f"{name}, decoded"] = _rounded(logits[:, ::STRIDE])
    LOGITS.write_text(json.dumps(found).replace("]], [[", "]],\n[[") + "\n")


if __name__ == "__main__":
    main()
