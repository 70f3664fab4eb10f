"""Llama, and DiffLlama, which is a Llama with differential attention.

Both turn features in pairs (i, i + H/2), as ours with `positions="rope"`. The weights
of torch are [out, in], our kernels [in, out].
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

RMS_NORM_EPS = {"llama": 1e-6, "diffllama": 1e-5}  # the defaults of rms_norm_eps
# What our decoder does, by the names in config.json.
ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
# Ours → theirs, of a block; kernels are transposed.
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


def _turned(ours: str, array: Any) -> Any:
    return array.T if ours.endswith("kernel") else array


def _branches(differential: str) -> int:
    """Their heads of one of ours."""
    return 2 if differential == "v1" else 1


def options_of(settings: dict[str, Any]) -> config.Model:
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
    """Their config.json, as versions 4 and 5 of transformers have it."""
    branches = _branches(options.attention.differential)
    return {
        "model_type": "diffllama" if branches == 2 else "llama",
        "architectures": [
            "DiffLlamaForCausalLM" if branches == 2 else "LlamaForCausalLM"
        ],
        "vocab_size": options.vocabulary,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # none of our own
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
    found = {x: _turned(x, tensors[y]) for x, y in ENDS.items() if y in tensors}
    for i in range(options.depth):
        block = {x: tensors[f"model.layers.{i}.{y}"] for x, y in BLOCK.items()}
        found |= {f"blocks/{i}/{x}": _turned(x, y) for x, y in block.items()}
    params = nested(found)
    if options.attention.differential == "v1":
        for i, block in params["blocks"].items():
            own = f"model.layers.{i}.self_attn."
            inside = {x.removeprefix(own): y for x, y in tensors.items() if own in x}
            block["attention"] = diffllama_attention(inside)
    return params


def tensors_of(params: dict[str, Any], options: config.Model) -> dict[str, Any]:
    ends = flat({x: y for x, y in params.items() if x != "blocks"})
    tensors = {ENDS[x]: _turned(x, y) for x, y in ends.items()}
    for i in range(options.depth):
        block, prefix = dict(params["blocks"][i]), f"model.layers.{i}."
        if options.attention.differential == "v1":
            inside = to_diffllama(block.pop("attention"))
            tensors |= {f"{prefix}self_attn.{x}": y for x, y in inside.items()}
        tensors |= {prefix + BLOCK[x]: _turned(x, y) for x, y in flat(block).items()}
    return tensors
