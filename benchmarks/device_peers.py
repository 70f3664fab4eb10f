"""Attention functions that device.py times: those of symjax and of other libraries."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from device_correctness import (
    delta,
    documents,
    gated,
    retention,
    symmetric,
    write_strength,
)

from symjax import attention

DOCUMENT = 500  # tokens of a document, where rows have several


class Rival(NamedTuple):
    """A causal attention function, and the shapes of its inputs [B T N H]."""

    library: str  # torch and fla take tensors, all others take arrays of jax
    attend: Callable
    shapes: tuple[tuple[int, ...], ...]
    flops: float  # per token, forward
    # FLOPs of forward + backward over those of forward: 3.5 if scores are recomputed.
    backward: float


def ours(batch: int, t: int, n: int, h: int) -> dict[str, Rival]:
    """Return the functions of symjax by name, for n heads of size h and t tokens.

    A head of differential V1 has two branches of size h/2.
    """
    one, half, two = (batch, t, n, h), (batch, t, 2 * n, h // 2), (batch, t, 2 * n, h)
    score = n * t * 2 * h  # half of t pairs, 2 products (q·k and V), 2 FLOPs a feature
    state = 4 * n * h * h
    first = partial(attention.differential, lam=0.5, is_causal=True)
    separate = partial(documents, DOCUMENT, is_causal=True)
    whole, rest = divmod(t, DOCUMENT)
    fewer = score * (whole * DOCUMENT**2 + rest**2) / t**2
    second = partial(attention.differential_v2, is_causal=True)
    performer = 4 * n * 256 * 2 * h

    def rival(call, shapes, flops, backward, **options):
        return Rival("ours", partial(call, **options), shapes, flops, backward)

    return {
        "softmax": rival(attention.softmax, (one,) * 3, score, 3.5, is_causal=True),
        "symmetric": rival(symmetric, (one,) * 2, score, 3.5, is_causal=True),
        "differential V1": rival(first, (half, half, one), score, 3.5),
        "softmax, documents": rival(
            separate, (one,) * 3, fewer, 3.5, attend=attention.softmax
        ),
        "differential V1, documents": rival(
            separate, (half, half, one), fewer, 3.5, attend=first
        ),
        "differential V2": rival(second, (two, one, one, one[:3]), 1.5 * score, 3.5),
        "linear": rival(attention.linear_causal, (one,) * 3, state, 3),
        "performer": rival(attention.performer_causal, (one,) * 3, performer, 3),
        "cosine": rival(attention.cosine_causal, (one,) * 3, state, 3),
        "retention": rival(retention, (one,) * 3, state, 3),
        "gated decay": rival(gated, (one,) * 4, state, 3),
        "delta": rival(delta, (one, one, one, one[:3]), state, 3),
        "gated delta": rival(delta, (*[one] * 3, *[one[:3]] * 2), state, 3),
        "delta, gated channels": rival(delta, (*[one] * 3, one[:3], one), state, 3),
    }


def peers(name: str, mine: Rival) -> dict[str, Rival | str]:
    """Return the same function of other libraries, or the reason why one is missing."""
    found: dict[str, Rival | str] = {}
    for library, (load, names) in LIBRARIES.items():
        if name not in names:
            continue
        try:
            for rival, attend in load()[name].items():
                found[rival] = mine._replace(library=library, attend=attend)
        except Exception as error:  # imports of CUDA code raise anything
            found[library] = f"not here: {error}"
    return found


Functions = dict[str, dict[str, Callable]]  # by our name, then by name of the rival


def _two_maps(call: Callable, concatenate: Callable) -> Callable:
    """Compose differential V1 of four calls, with values as wide as keys."""

    def attend(query, key, value):
        half = value.shape[-1] // 2
        first, second = (
            concatenate(
                [
                    call(query[:, :, branch::2], key[:, :, branch::2], part)
                    for part in (value[..., :half], value[..., half:])
                ],
                -1,
            )
            for branch in (0, 1)
        )
        return first - 0.5 * second

    return attend


def _subtracted_pairs(call: Callable) -> Callable:
    """Compose differential V2 of one call over all query heads."""

    def attend(query, key, value, lam):
        output = call(query, key, value)
        return output[:, :, 0::2] - lam[..., None] * output[:, :, 1::2]

    return attend


def _cudnn() -> Functions:
    call = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

    def padded(query, key, value):
        missing = value.shape[-1] - query.shape[-1]
        wide = [jnp.pad(x, ((0, 0),) * 3 + ((0, missing),)) for x in (query, key)]
        value = jnp.repeat(value, 2, axis=2)
        output = call(*wide, value, scale=query.shape[-1] ** -0.5)
        return output[:, :, 0::2] - 0.5 * output[:, :, 1::2]

    return {
        "softmax": {"cudnn": call},
        "differential V1": {
            "one call of cudnn, padded": padded,
            "four calls of cudnn": _two_maps(call, jnp.concatenate),
        },
        "differential V2": {"one call of cudnn": _subtracted_pairs(call)},
    }


def _torch() -> Functions:
    torch = importlib.import_module("torch")
    kernels = importlib.import_module("torch.nn.attention")
    found: Functions = {"softmax": {}, "differential V1": {}, "differential V2": {}}
    for name in ("CUDNN", "FLASH"):
        backend = getattr(kernels.SDPBackend, f"{name}_ATTENTION")

        def call(query, key, value, backend=backend):
            heads_first = (x.transpose(1, 2) for x in (query, key, value))
            grouped = query.shape[2] != key.shape[2]
            with kernels.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *heads_first, is_causal=True, enable_gqa=grouped
                ).transpose(1, 2)

        kernel = f"SDPA {name.lower()}"
        two_maps = _two_maps(call, torch.cat)
        found["softmax"][kernel] = call
        found["differential V1"][f"four calls of {kernel}"] = two_maps
        found["differential V2"][f"one call of {kernel}"] = _subtracted_pairs(call)
    return found


def _fla() -> Functions:
    library = importlib.import_module("fla.ops")
    functions = importlib.import_module("torch.nn.functional")

    def log_decay(gate):
        return functions.logsigmoid(gate.float()) / 16

    def linear(query, key, value):
        query, key = (functions.elu(x) + 1 for x in (query, key))
        return library.chunk_linear_attn(query, key, value)[0]

    def retention(query, key, value):
        return library.chunk_retention(query, key, value, scale=1.0)[0]

    def gated(query, key, value, gate):
        gate = log_decay(gate)
        return library.chunk_gla(query, key, value, gate, scale=1.0)[0]

    def delta(query, key, value, beta, gate=None, *, call):
        key = functions.normalize(key.float(), dim=-1).to(value.dtype)
        gates = () if gate is None else (log_decay(gate),)
        beta = beta.float().sigmoid()
        return call(query, key, value, *gates, beta, scale=1.0)[0]

    return {
        "linear": {"fla": linear},
        "retention": {"fla": retention},
        "gated decay": {"fla": gated},
        "delta": {"fla": partial(delta, call=library.chunk_delta_rule)},
        "gated delta": {"fla": partial(delta, call=library.chunk_gated_delta_rule)},
        "delta, gated channels": {"fla": partial(delta, call=library.chunk_kda)},
    }


def _jla() -> Functions:
    """Return the package's functions, and ours with `implementation="jla"`."""
    # Ask for the kernel by name, or an XLA form replaces a kernel that cannot run.
    run = importlib.import_module("jla.ops").linear_attention
    run = partial(run, impl="mosaic_gpu", scale=1.0)

    def fixed(query, key, value):
        log_decay = attention.retention_log_decay(key.shape[2])
        gate = jnp.broadcast_to(log_decay, key.shape[:3])
        return run("simple_gla", query, key, value, g=gate)[0]

    def per_channel(query, key, value, gate):
        log_decay = attention.gated_log_decay(gate)
        return run("gla", query, key, value, g=log_decay)[0]

    def rule(query, key, value, beta, gate=None, *, kind):
        key, beta = write_strength(key, beta)
        gates = {} if gate is None else {"g": attention.gated_log_decay(gate)}
        return run(kind, query, key, value, beta=beta, **gates)[0]

    pairs = {
        "retention": (fixed, retention),
        "gated decay": (per_channel, gated),
        "delta": (partial(rule, kind="deltanet"), delta),
        "gated delta": (partial(rule, kind="gated_deltanet"), delta),
        "delta, gated channels": (partial(rule, kind="kda"), delta),
    }
    return {
        name: {"jla": package, "ours by jla": partial(own, implementation="jla")}
        for name, (package, own) in pairs.items()
    }


SCORED = ("softmax", "differential V1", "differential V2")
DECAYED = ("retention", "gated decay", "delta", "gated delta", "delta, gated channels")
LIBRARIES = {
    "cudnn": (_cudnn, SCORED),
    "torch": (_torch, SCORED),
    "jla": (_jla, DECAYED),
    "fla": (_fla, ("linear", *DECAYED)),
}
