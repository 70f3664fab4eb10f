"""Llama, and DiffLlama, which is a Llama with differential attention.

Both rotate pairs of features (i, i + H/2), as symjax does with `positions="rope"`.
Weights of torch are [out, in], kernels of symjax are [in, out].
"""

from functools import partial
from typing import Any

from symjax import config
from symjax.models.huggingface.files import (
    check_all,
    check_needed,
    check_settings,
    number,
)
from symjax.models.huggingface.rope import rope_of, settings_of_rope
from symjax.models.huggingface.weights import (
    diffllama_attention,
    flat,
    nested,
    to_diffllama,
)

RMS_NORM_EPS = {"llama": 1e-6, "diffllama": 1e-5}  # defaults of rms_norm_eps
# Settings of config.json → the only values that symjax's decoder supports.
ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
# Path in a block of symjax → name of the tensor. Kernels are transposed.
BLOCK = {
    "attention/query/kernel": "self_attn.q_proj.weight",
    "attention/key/kernel": "self_attn.k_proj.weight",
    "attention/value/kernel": "self_attn.v_proj.weight",
    "attention/out/kernel": "self_attn.o_proj.weight",
    "attention_norm/scale": "input_layernorm.weight",
    "feedforward_norm/scale": "post_attention_layernorm.weight",
    "feedforward/gate/kernel": "mlp.gate_proj.weight",
    "feedforward/up/kernel": "mlp.up_proj.weight",
    "feedforward/down/kernel": "mlp.down_proj.weight",
}
ENDS = {
    "embedding/embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}


def _transposed(path: str, array: Any) -> Any:
    """Transpose an array if its path in symjax is that of a kernel."""
    return array.T if path.endswith("kernel") else array


def _branches(differential: str) -> int:
    """Return the number of Hugging Face's heads per head of symjax."""
    return 2 if differential == "v1" else 1


def options_of(settings: dict[str, Any]) -> config.Model:
    """Return symjax's configuration for a config.json.

    Raises:
        ValueError: a setting is missing, or symjax's decoder does not support it.
    """
    differential = "v1" if settings["model_type"] == "diffllama" else "none"
    branches = _branches(differential)
    epsilon = RMS_NORM_EPS[settings["model_type"]]
    sizes = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"
    check_all(
        partial(check_settings, settings, ONLY),
        partial(check_needed, settings, *sizes, "num_attention_heads"),
        partial(number, settings, "rms_norm_eps", epsilon),
        partial(rope_of, settings),
    )
    heads = settings["num_attention_heads"]
    kv_heads = settings.get("num_key_value_heads") or heads
    if heads % branches or kv_heads % branches:
        raise ValueError(
            "num_attention_heads and num_key_value_heads count both "
            f"branches and must be even, got {heads} and {kv_heads}"
        )
    return config.Model(
        vocabulary=settings["vocab_size"],
        width=settings["hidden_size"],
        depth=settings["num_hidden_layers"],
        heads=heads // branches,
        kv_heads=kv_heads // branches,
        head_size=settings.get("head_dim") or settings["hidden_size"] // heads,
        feedforward=settings["intermediate_size"],
        activation="swiglu",
        norm="rmsnorm",
        norm_eps=number(settings, "rms_norm_eps", epsilon),
        positions="rope",
        **rope_of(settings),
        length=settings.get("max_position_embeddings", 2048),
        bias=False,
        tie_embeddings=settings.get("tie_word_embeddings", False),
        attention=config.Attention(differential=differential),
    )


def settings_of(options: config.Model) -> dict[str, Any]:
    """Return the config.json that versions 4 and 5 of transformers read."""
    branches = _branches(options.attention.differential)
    return {
        "model_type": "diffllama" if branches == 2 else "llama",
        "architectures": [
            "DiffLlamaForCausalLM" if branches == 2 else "LlamaForCausalLM"
        ],
        "vocab_size": options.vocabulary,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # None: not known here
        "hidden_size": options.width,
        "intermediate_size": options.feedforward,
        "num_hidden_layers": options.depth,
        "num_attention_heads": options.heads * branches,
        "num_key_value_heads": options.kv_heads * branches,
        "head_dim": options.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": options.norm_eps,
        **settings_of_rope(options),
        "tie_word_embeddings": options.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def params_of(tensors: dict[str, Any], options: config.Model) -> dict[str, Any]:
    """Return symjax's parameters for the tensors of a Llama or DiffLlama."""
    arrays = {x: _transposed(x, tensors[y]) for x, y in ENDS.items() if y in tensors}
    for i in range(options.depth):
        block = {x: tensors[f"model.layers.{i}.{y}"] for x, y in BLOCK.items()}
        arrays |= {f"blocks/{i}/{x}": _transposed(x, y) for x, y in block.items()}
    params = nested(arrays)
    if options.attention.differential == "v1":
        for i, block in params["blocks"].items():
            prefix = f"model.layers.{i}.self_attn."
            layer = {
                x.removeprefix(prefix): y for x, y in tensors.items() if prefix in x
            }
            block["attention"] = diffllama_attention(layer)
    return params


def tensors_of(params: dict[str, Any], options: config.Model) -> dict[str, Any]:
    """Return the tensors of a Llama or DiffLlama with symjax's parameters."""
    ends = flat({x: y for x, y in params.items() if x != "blocks"})
    tensors = {ENDS[x]: _transposed(x, y) for x, y in ends.items()}
    for i in range(options.depth):
        block, prefix = dict(params["blocks"][i]), f"model.layers.{i}."
        if options.attention.differential == "v1":
            layer = to_diffllama(block.pop("attention"))
            tensors |= {f"{prefix}self_attn.{x}": y for x, y in layer.items()}
        tensors |= {
            prefix + BLOCK[x]: _transposed(x, y) for x, y in flat(block).items()
        }
    return tensors
