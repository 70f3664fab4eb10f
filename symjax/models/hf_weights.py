"""Exact conversion of weights: unilm's Diff Transformer, Hugging Face's DiffLlama.

Ours: kernels [in, out], sub-heads in (head, branch) order, and with
`positions="rope"` features turned in pairs (i, i + H/2). Weights of torch are
[out, in]. The maps below are permutations of rows and columns, save that
Hugging Face has no weight in the norm of a head: it is multiplied into the output
projection. They are for layers without bias, query/key norms or normalised keys.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.tree_util import keystr, tree_leaves_with_path

from symjax import config
from symjax.layers.primitives import EPSILON

Weights = Mapping[str, Any]  # names → arrays, or groups of them

# Our names of a layer's parameters → those of the others.
SHARED = {
    "query/kernel": "q_proj.weight",
    "key/kernel": "k_proj.weight",
    "value/kernel": "v_proj.weight",
    "lambda_query_1": "lambda_q1",
    "lambda_key_1": "lambda_k1",
    "lambda_query_2": "lambda_q2",
    "lambda_key_2": "lambda_k2",
}
OFFICIAL = SHARED | {"out/kernel": "out_proj.weight", "head_norm/scale": "subln.weight"}
LLAMA = SHARED | {"out/kernel": "o_proj.weight"}

# What our decoder does, by the names in a DiffLlama's config.json.
ONLY = {
    "model_type": "diffllama",
    "hidden_act": "silu",
    "rms_norm_eps": EPSILON,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def official_attention(weights: Weights) -> dict[str, Any]:
    """Parameters of our layer from those of microsoft/unilm's Diff Transformer V1.

    There RoPE turns pairs of features (2i, 2i + 1). Without `k_proj.weight`, keys are
    the queries: a layer with `symmetric="plain"`. For grouped heads the layer equals
    their flash modules; their plain one mixes the branches of a group's keys.

    Raises:
        ValueError: a name or a shape that their layer does not have.
    Source: Ye et al. 2024, arXiv:2410.05258; Diff-Transformer/multihead_diffattn.py.
    """
    who = "official_attention"
    names = {theirs: ours for ours, theirs in OFFICIAL.items()}
    own = _renamed(who, weights, names, optional="k_proj.weight")
    pairs = {"pair": 2, "i": _even(who, _head_size(who, own, axis=0)) // 2}
    for name in {"query/kernel", "key/kernel"} & own.keys():
        own[name] = rearrange(own[name], "(n i pair) e -> e (n pair i)", **pairs)
    for name in ("value/kernel", "out/kernel"):
        own[name] = own[name].T
    return _nested(own)


def to_official(params: Weights) -> dict[str, Any]:
    """The inverse of `official_attention`: weights of microsoft/unilm's V1 layer.

    Raises:
        ValueError: a parameter that their layer does not have, such as a bias.
    """
    who = "to_official"
    own = _flat(params)
    theirs = _renamed(who, own, OFFICIAL, optional="key/kernel")
    pairs = {"pair": 2, "i": _even(who, _head_size(who, own, axis=1)) // 2}
    for name in {"q_proj.weight", "k_proj.weight"} & theirs.keys():
        theirs[name] = rearrange(theirs[name], "e (n pair i) -> (n i pair) e", **pairs)
    for name in ("v_proj.weight", "out_proj.weight"):
        theirs[name] = theirs[name].T
    return theirs


def diffllama_attention(weights: Weights) -> dict[str, Any]:
    """Parameters of our layer from those of Hugging Face's DiffLlamaAttention.

    There sub-heads stand in (branch, head) order, and so do the halves of values.
    A DiffLlama with 2N attention heads has N of ours.

    Raises:
        ValueError: a name or a shape that their layer does not have.
    """
    who = "diffllama_attention"
    own = _renamed(who, weights, {theirs: ours for ours, theirs in LLAMA.items()})
    order = {"branch": 2, "h": _head_size(who, own, axis=0)}
    for name in ("query/kernel", "key/kernel", "value/kernel"):
        own[name] = rearrange(own[name], "(branch n h) e -> e (n branch h)", **order)
    own["out/kernel"] = own["out/kernel"].T
    own["head_norm/scale"] = np.ones(2 * order["h"], own["out/kernel"].dtype)
    return _nested(own)


def to_diffllama(params: Weights) -> dict[str, Any]:
    """Weights of a DiffLlamaAttention that computes what our layer computes.

    The inverse of `diffllama_attention`, up to the norm's weight.

    Raises:
        ValueError: a parameter that their layer does not have, such as a bias.
    """
    who = "to_diffllama"
    own = _flat(params)
    _check_names(who, own, [*LLAMA, "head_norm/scale"])
    order = {"branch": 2, "h": _head_size(who, own, axis=1)}
    scale = own.pop("head_norm/scale")
    theirs = _renamed(who, own, LLAMA)
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        own_order = theirs[name]
        theirs[name] = rearrange(own_order, "e (n branch h) -> (branch n h) e", **order)
    out = theirs["o_proj.weight"]
    scales = np.tile(scale, out.shape[0] // scale.size)
    return theirs | {"o_proj.weight": (out * scales[:, None]).T}


def load_diffllama(directory: str | Path) -> tuple[config.Model, dict[str, Any]]:
    """A DiffLlama as Hugging Face stores it: our configuration and parameters.

        options, params = load_diffllama(directory)
        model = Decoder(options, rngs=nnx.Rngs(0))
        nnx.update(model, params)

    Reads config.json and *.safetensors, sharded or not. Parameters become float32.
    Dropout is not carried over; `dataclasses.replace` changes it and other options.

    Raises:
        ValueError: a file is missing, a setting is one that the decoder does not have,
            names and shapes differ from those of the configuration, or the package
            safetensors is not installed.
    """
    directory = Path(directory)
    options = _options(_json(directory / "config.json"))
    weights = _tensors(directory)
    shapes = _shapes(options)
    _check_names(str(directory), weights, shapes)
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"{directory}: {name} must be {shape} by config.json, got "
                f"{weights[name].shape}"
            )
    params: dict[str, Any] = {
        "embedding": {"embedding": weights["model.embed_tokens.weight"]},
        "final_norm": {"scale": weights["model.norm.weight"]},
        "blocks": {i: _block(weights, i) for i in range(options.depth)},
    }
    if not options.tie_embeddings:
        params["head"] = {"kernel": weights["lm_head.weight"].T}
    return options, jax.tree.map(jnp.asarray, params)


def _options(settings: dict[str, Any]) -> config.Model:
    """Our configuration from a DiffLlama's."""
    rope = settings.get("rope_parameters") or {}
    settings = {**settings, **rope}
    for name, wanted in {**ONLY, "rope_type": "default"}.items():
        if settings.get(name, wanted) != wanted:
            raise ValueError(
                f"config.json: {name} must be {wanted!r}, got {settings[name]!r}"
            )
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    for name in (*needed, "num_attention_heads"):
        if name not in settings:
            raise ValueError(f"config.json: {name} is missing")
    heads = settings["num_attention_heads"]
    kv_heads = settings.get("num_key_value_heads") or heads
    if heads % 2 or kv_heads % 2:
        raise ValueError(
            "config.json: num_attention_heads and num_key_value_heads count both "
            f"branches and must be even, got {heads} and {kv_heads}"
        )
    return config.Model(
        vocabulary=settings["vocab_size"],
        width=settings["hidden_size"],
        depth=settings["num_hidden_layers"],
        heads=heads // 2,
        kv_heads=kv_heads // 2,
        head_size=settings.get("head_dim") or settings["hidden_size"] // heads,
        feedforward=settings["intermediate_size"],
        activation="swiglu",
        norm="rmsnorm",
        positions="rope",
        rope_base=float(settings.get("rope_theta", 10000.0)),
        length=settings.get("max_position_embeddings", 2048),
        bias=False,
        tie_embeddings=settings.get("tie_word_embeddings", False),
        attention=config.Attention(differential="v1"),
    )


def _shapes(options: config.Model) -> dict[str, tuple[int, ...]]:
    """The names of a DiffLlama's tensors, and their shapes [out, in]."""
    width, hidden, size = options.width, options.feedforward, options.head_size
    queries, keys = 2 * options.heads * size, 2 * options.kv_heads * size
    layer = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        **{f"self_attn.lambda_{x}{i}": (size,) for x in "qk" for i in (1, 2)},
        "mlp.gate_proj.weight": (hidden, width),
        "mlp.up_proj.weight": (hidden, width),
        "mlp.down_proj.weight": (width, hidden),
    }
    table = (options.vocabulary, width)
    shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (width,)}
    if not options.tie_embeddings:
        shapes["lm_head.weight"] = table
    for i in range(options.depth):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _block(weights: dict[str, np.ndarray], index: int) -> dict[str, Any]:
    """Our block's parameters from the tensors of a DiffLlama's layer."""
    prefix = f"model.layers.{index}."

    def part(name: str) -> np.ndarray:
        return weights[f"{prefix}{name}.weight"]

    own = f"{prefix}self_attn."
    inside = {x.removeprefix(own): y for x, y in weights.items() if x.startswith(own)}
    names = ("gate", "up", "down")
    return {
        "attention_norm": {"scale": part("input_layernorm")},
        "attention": diffllama_attention(inside),
        "feedforward_norm": {"scale": part("post_attention_layernorm")},
        "feedforward": {x: {"kernel": part(f"mlp.{x}_proj").T} for x in names},
    }


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: it is no checkpoint of Hugging Face")
    return json.loads(path.read_text(encoding="utf-8"))


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint by its name, in float32."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ValueError(
            "load_diffllama needs safetensors: pip install safetensors"
        ) from error
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(_json(index)["weight_map"].values())
    tensors = {}
    for path in (directory / name for name in sorted(files)):
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        with safe_open(path, framework="flax") as file:  # NumPy has no bfloat16
            for name in file.keys():
                tensors[name] = np.asarray(file.get_tensor(name), np.float32)
    return tensors


def _renamed(
    who: str, arrays: Weights, names: Mapping[str, str], *, optional: str = ""
) -> dict[str, np.ndarray]:
    """The arrays under their new names; all must be there, save one."""
    _check_names(who, arrays, [name for name in names if name != optional], optional)
    return {names[name]: np.asarray(array) for name, array in arrays.items()}


def _check_names(
    who: str, found: Iterable[str], wanted: Iterable[str], optional: str = ""
) -> None:
    found, wanted = set(found), set(wanted)
    for what, names in (
        ("lacks", wanted - found),
        ("has unknown", found - wanted - {optional}),
    ):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:3]))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{who}: the layer or model {what} {shown}{more}")


def _even(who: str, size: int) -> int:
    if size % 2:
        raise ValueError(
            f"{who}: RoPE turns pairs of features, head size {size} is odd"
        )
    return size


def _head_size(who: str, own: Mapping[str, np.ndarray], *, axis: int) -> int:
    """Features of a branch: the length of λ's vectors, of which heads are made.

    Args:
        own: arrays by our names; `axis` is that of heads in queries, keys and values.
    """
    size = own["lambda_query_1"].size
    for name, array in own.items():
        if name.startswith("lambda_"):
            fits = array.shape == (size,)
        elif name.endswith("/kernel"):
            heads = 1 - axis if name == "out/kernel" else axis
            fits = array.ndim == 2 and array.shape[heads] % (2 * size) == 0
        else:
            fits = array.shape == (2 * size,)
        if not fits:
            raise ValueError(
                f"{who}: {name} {array.shape} does not fit heads of two branches of "
                f"{size} features, the size of lambda_query_1"
            )
    return size


def _flat(params: Weights) -> dict[str, np.ndarray]:
    """Nested parameters by path: {"query": {"kernel": x}} as {"query/kernel": x}."""
    leaves = tree_leaves_with_path(dict(params))
    return {
        keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves
    }


def _nested(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `_flat`, for paths of one or two names."""
    params: dict[str, Any] = {}
    for path, array in flat.items():
        *group, name = path.split("/")
        (params.setdefault(group[0], {}) if group else params)[name] = array
    return params
