"""Exact conversion of layers: unilm's Diff Transformer, Hugging Face's DiffLlama.

symjax has kernels [in, out], the branches of heads in (head, branch) order, and rotates
pairs of features (i, i + H/2) with `positions="rope"`. Weights of torch are [out, in].
The functions below permute rows and columns. Hugging Face's norm per head has no
weight, so `to_diffllama` multiplies the weight of symjax's norm into the output
projection. Layers with bias, query/key norms or normalised keys cannot be converted.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from einops import rearrange, repeat
from flax.traverse_util import unflatten_dict
from jax import Array
from jax.tree_util import keystr, tree_leaves_with_path

from symjax.models.huggingface.files import check_names

Weights = Mapping[str, Any]  # name → array, or a group of arrays

# Path of a layer's parameter in symjax → its name in the other implementation.
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


def official_attention(weights: Weights) -> dict[str, Any]:
    """Return parameters of symjax's layer for microsoft/unilm's Diff Transformer V1.

    unilm's RoPE rotates pairs of features (2i, 2i + 1). Without `k_proj.weight` keys
    are the queries: a layer with `symmetric="plain"`. For grouped heads the layer
    equals unilm's flash modules; unilm's plain module mixes the branches of a group's
    keys.

    Raises:
        ValueError: a name or a shape that unilm's layer does not have.
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
    return nested(own)


def to_official(params: Weights) -> dict[str, Any]:
    """Return weights of microsoft/unilm's V1 layer: inverse of `official_attention`.

    Raises:
        ValueError: a parameter that unilm's layer does not have, such as a bias.
    """
    who = "to_official"
    own = flat(params)
    theirs = _renamed(who, own, OFFICIAL, optional="key/kernel")
    pairs = {"pair": 2, "i": _even(who, _head_size(who, own, axis=1)) // 2}
    for name in {"q_proj.weight", "k_proj.weight"} & theirs.keys():
        theirs[name] = rearrange(theirs[name], "e (n pair i) -> (n i pair) e", **pairs)
    for name in ("v_proj.weight", "out_proj.weight"):
        theirs[name] = theirs[name].T
    return theirs


def diffllama_attention(weights: Weights) -> dict[str, Any]:
    """Return parameters of symjax's layer for Hugging Face's DiffLlamaAttention.

    DiffLlama has branches and halves of values in (branch, head) order. A DiffLlama
    with 2N attention heads has N heads in symjax.

    Raises:
        ValueError: a name or a shape that DiffLlama's layer does not have.
    """
    who = "diffllama_attention"
    own = _renamed(who, weights, {theirs: ours for ours, theirs in LLAMA.items()})
    order = {"branch": 2, "h": _head_size(who, own, axis=0)}
    for name in ("query/kernel", "key/kernel", "value/kernel"):
        own[name] = rearrange(own[name], "(branch n h) e -> e (n branch h)", **order)
    own["out/kernel"] = own["out/kernel"].T
    own["head_norm/scale"] = np.ones(2 * order["h"], own["out/kernel"].dtype)
    return nested(own)


def to_diffllama(params: Weights) -> dict[str, Any]:
    """Return weights of a DiffLlamaAttention that equals a layer of symjax.

    Inverse of `diffllama_attention`, up to the weight of the norm.

    Raises:
        ValueError: a parameter that DiffLlama's layer does not have, such as a bias.
    """
    who = "to_diffllama"
    own = flat(params)
    theirs = _renamed(who, own, LLAMA | {"head_norm/scale": "scale"})
    order = {"branch": 2, "h": _head_size(who, own, axis=1)}
    scale = theirs.pop("scale")
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        own_order = theirs[name]
        theirs[name] = rearrange(own_order, "e (n branch h) -> (branch n h) e", **order)
    out = theirs["o_proj.weight"]
    scales = repeat(scale, "h -> (n h)", n=out.shape[0] // scale.size)
    return theirs | {"o_proj.weight": (out * scales[:, None]).T}


def _renamed(
    who: str, arrays: Weights, names: Mapping[str, str], *, optional: str = ""
) -> dict[str, Any]:
    """Return the arrays under new names; all must be there, except `optional`."""
    check_names(who, arrays, [name for name in names if name != optional], optional)
    return {
        names[name]: x if isinstance(x, Array) else np.asarray(x)
        for name, x in arrays.items()
    }


def _even(who: str, size: int) -> int:
    """Return the head size if it is even."""
    if size % 2:
        raise ValueError(
            f"{who}: RoPE rotates pairs of features, head size {size} is odd"
        )
    return size


def _head_size(who: str, own: Mapping[str, np.ndarray], *, axis: int) -> int:
    """Return the features of a branch: the length of the λ vectors.

    Args:
        own: arrays by symjax's names.
        axis: axis of heads in the weights of queries, keys and values.
    Raises:
        ValueError: another array does not fit this size.
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


def flat(params: Weights) -> dict[str, Any]:
    """Return parameters by path: {"query": {"kernel": x}} → {"query/kernel": x}."""
    leaves = tree_leaves_with_path(dict(params))
    return {keystr(path, simple=True, separator="/"): x for path, x in leaves}


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested parameters from paths, as `flat` makes them.

    A number in a path becomes an int, such as the index of a block.
    """

    def path(name: str) -> tuple[int | str, ...]:
        return tuple(int(x) if x.isdecimal() else x for x in name.split("/"))

    return unflatten_dict({path(name): array for name, array in arrays.items()})
