"""GPT-2: learned positions, LayerNorm, biases, tied embeddings.

Its weights are [in, out], as in symjax. One tensor has the projections of queries, keys
and values.
"""

from functools import partial
from typing import Any

import numpy as np
from einops import rearrange

from symjax import config
from symjax.models.huggingface.files import (
    check_all,
    check_choice,
    check_needed,
    check_settings,
    number,
)
from symjax.models.huggingface.weights import flat, nested

# activation_function → model.activation. symjax's gelu is the one with tanh.
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "quantization_config": None,
}
# Path in a block of symjax → name of the tensor.
BLOCK = {
    "attention_norm/scale": "ln_1.weight",
    "attention_norm/bias": "ln_1.bias",
    "attention/out/kernel": "attn.c_proj.weight",
    "attention/out/bias": "attn.c_proj.bias",
    "feedforward_norm/scale": "ln_2.weight",
    "feedforward_norm/bias": "ln_2.bias",
    "feedforward/up/kernel": "mlp.c_fc.weight",
    "feedforward/up/bias": "mlp.c_fc.bias",
    "feedforward/down/kernel": "mlp.c_proj.weight",
    "feedforward/down/bias": "mlp.c_proj.bias",
}
JOINED, PARTS = "attn.c_attn", ("query", "key", "value")
ENDS = {
    "embedding/embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "final_norm/scale": "transformer.ln_f.weight",
    "final_norm/bias": "transformer.ln_f.bias",
}


def options_of(settings: dict[str, Any]) -> config.Model:
    """Return symjax's configuration for a config.json.

    Raises:
        ValueError: a setting is missing, or symjax's decoder does not support it.
    """
    sizes = "vocab_size", "n_embd", "n_layer", "n_head", "n_positions"
    activation = settings.get("activation_function", "gelu_new")
    check_all(
        partial(check_settings, settings, ONLY),
        partial(check_choice, "activation_function", activation, ACTIVATIONS),
        partial(check_needed, settings, *sizes),
        partial(number, settings, "layer_norm_epsilon", 1e-5),
    )
    width, heads = settings["n_embd"], settings["n_head"]
    return config.Model(
        vocabulary=settings["vocab_size"],
        width=width,
        depth=settings["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        feedforward=settings.get("n_inner") or 4 * width,
        activation=ACTIVATIONS[activation],
        norm_eps=number(settings, "layer_norm_epsilon", 1e-5),
        length=settings["n_positions"],
        tie_embeddings=True,
    )


def settings_of(options: config.Model) -> dict[str, Any]:
    """Return the config.json of a GPT-2 with symjax's configuration."""
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": options.vocabulary,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # None: not known here
        "n_embd": options.width,
        "n_layer": options.depth,
        "n_head": options.heads,
        "n_inner": options.feedforward,
        "n_positions": options.length,
        "activation_function": activations.get(options.activation, "gelu_new"),
        "layer_norm_epsilon": options.norm_eps,
        "tie_word_embeddings": True,
    }


def params_of(tensors: dict[str, Any], options: config.Model) -> dict[str, Any]:
    """Return symjax's parameters for the tensors of a GPT-2."""
    params = {ours: tensors[theirs] for ours, theirs in ENDS.items()}
    for i in range(options.depth):
        block, prefix = f"blocks/{i}/", f"transformer.h.{i}."
        params |= {block + x: tensors[prefix + y] for x, y in BLOCK.items()}
        for theirs, ours in (("weight", "kernel"), ("bias", "bias")):
            thirds = np.split(tensors[f"{prefix}{JOINED}.{theirs}"], 3, axis=-1)
            for part, array in zip(PARTS, thirds, strict=True):
                params[f"{block}attention/{part}/{ours}"] = array
    return nested(params)


def tensors_of(params: dict[str, Any], options: config.Model) -> dict[str, Any]:
    """Return the tensors of a GPT-2 with symjax's parameters."""
    own = flat(params)
    tensors = {theirs: own[ours] for ours, theirs in ENDS.items()}
    for i in range(options.depth):
        block, prefix = f"blocks/{i}/", f"transformer.h.{i}."
        tensors |= {prefix + y: own[block + x] for x, y in BLOCK.items()}
        for theirs, ours in (("weight", "kernel"), ("bias", "bias")):
            thirds = [own[f"{block}attention/{part}/{ours}"] for part in PARTS]
            joined = rearrange(thirds, "part ... out -> ... (part out)")
            tensors[f"{prefix}{JOINED}.{theirs}"] = joined
    return tensors


def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Add the prefix "transformer." to names of tensors. Files of 2019 lack it."""
    return {
        name if name.startswith("transformer.") else f"transformer.{name}": x
        for name, x in tensors.items()
    }
