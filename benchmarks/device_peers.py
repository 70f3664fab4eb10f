"""The rivals that device.py times: attention of this project and of others."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from device_correctness import delta, documents, gated, retention, symmetric

from symjax import attention

DOCUMENT = 500  # tokens of one, where they are kept apart


class Rival(NamedTuple):
    """A causal attention of arrays [B T N H], drawn normal with the shapes given."""

    library: str  # torch and fla take tensors, all others arrays of jax
    attend: Callable
    shapes: tuple[tuple[int, ...], ...]
    flops: float  # of a token, forward
    backward: float  # forward + backward in forwards: 3.5 if scores are made again
    twin: str = ""  # the one of ours that it must equal


def ours(batch: int, t: int, n: int, h: int) -> dict[str, Rival]:
    """This project's, for heads n of size h: two branches of h/2 make one of V1."""
    one, half, two = (batch, t, n, h), (batch, t, 2 * n, h // 2), (batch, t, 2 * n, h)
    score = n * t * 2 * h  # half the pairs, 2 operations a pair and feature, q·k and V
    state = 4 * n * h * h
    first = partial(attention.differential, lam=0.5, is_causal=True)
    apart = partial(documents, DOCUMENT, is_causal=True)
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
            apart, (one,) * 3, fewer, 3.5, attend=attention.softmax
        ),
        "differential V1, documents": rival(
            apart, (half, half, one), fewer, 3.5, attend=first
        ),
        "differential V2": rival(second, (two, one, one, one[:3]), 1.5 * score, 3.5),
        "linear": rival(attention.linear_causal, (one,) * 3, state, 3),
        "performer": rival(attention.performer_causal, (one,) * 3, performer, 3),
        "cosine": rival(attention.cosine_causal, (one,) * 3, state, 3),
        "retention": rival(retention, (one,) * 3, state, 3),
        "gated decay": rival(gated, (one,) * 4, state, 3),
        "delta": rival(delta, (one, one, one, one[:3]), state, 3),
        "delta, gated channels": rival(delta, (*[one] * 3, one[:3], one), state, 3),
    }


def peers(mine: dict[str, Rival]) -> dict[str, Rival | str]:
    """The same by others: rivals, or why there is none."""
    found: dict[str, Rival | str] = {}
    for name, library in LIBRARIES.items():
        try:
            for rival, (twin, attend) in library().items():
                other = {"library": name, "attend": attend, "twin": twin}
                found[rival] = mine[twin]._replace(**other)
        except Exception as error:  # what an import of CUDA code may raise
            found[name] = f"not here: {error}"
    return found


def _two_maps(call: Callable, concatenate: Callable) -> Callable:
    """Differential V1 by calls in which values are as wide as keys: four of them."""

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


def _pairs(call: Callable) -> Callable:
    """Differential V2: one call over all query heads, whose outputs are subtracted."""

    def attend(query, key, value, lam):
        output = call(query, key, value)
        return output[:, :, 0::2] - lam[..., None] * output[:, :, 1::2]

    return attend


def _cudnn() -> dict[str, tuple[str, Callable]]:
    call = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

    def padded(query, key, value):
        missing = value.shape[-1] - query.shape[-1]
        wide = [jnp.pad(x, ((0, 0),) * 3 + ((0, missing),)) for x in (query, key)]
        value = jnp.repeat(value, 2, axis=2)
        output = call(*wide, value, scale=query.shape[-1] ** -0.5)
        return output[:, :, 0::2] - 0.5 * output[:, :, 1::2]

    two_maps = _two_maps(call, jnp.concatenate)
    return {
        "softmax, cudnn": ("softmax", call),
        "differential V1, four calls of cudnn": ("differential V1", two_maps),
        "differential V1, one call of cudnn, padded": ("differential V1", padded),
        "differential V2, one call of cudnn": ("differential V2", _pairs(call)),
    }


def _torch() -> dict[str, tuple[str, Callable]]:
    torch = importlib.import_module("torch")
    kernels = importlib.import_module("torch.nn.attention")
    found = {}
    for name in ("FLASH", "CUDNN"):
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
        found |= {
            f"softmax, {kernel}": ("softmax", call),
            f"differential V1, four calls of {kernel}": ("differential V1", two_maps),
            f"differential V2, one call of {kernel}": ("differential V2", _pairs(call)),
        }
    return found


def _fla() -> dict[str, tuple[str, Callable]]:
    elu = importlib.import_module("torch.nn.functional").elu
    log_sigmoid = importlib.import_module("torch.nn.functional").logsigmoid
    linear = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    decayed = importlib.import_module("fla.ops.retention").chunk_retention
    gated_decay = importlib.import_module("fla.ops.gla").chunk_gla

    def features(query, key, value):
        return linear(elu(query) + 1, elu(key) + 1, value)[0]

    def retention(query, key, value):
        return decayed(query, key, value, scale=1.0)[0]

    def gated(query, key, value, gate):
        return gated_decay(query, key, value, log_sigmoid(gate) / 16, scale=1.0)[0]

    return {
        "linear, fla": ("linear", features),
        "retention, fla": ("retention", retention),
        "gated decay, fla": ("gated decay", gated),
    }


def _jla() -> dict[str, tuple[str, Callable]]:
    # Asked for by name, so that the plain form does not answer where it cannot run.
    run = importlib.import_module("jla.ops").linear_attention
    run = partial(run, impl="mosaic_gpu", scale=1.0)

    def retention(query, key, value):
        log_decay = attention.retention_log_decay(key.shape[2])
        gate = jnp.broadcast_to(log_decay, key.shape[:3])
        return run("simple_gla", query, key, value, g=gate)[0]

    def gated(query, key, value, gate):
        log_decay = attention.gated_log_decay(gate)
        return run("gla", query, key, value, g=log_decay)[0]

    return {
        "retention, jla": ("retention", retention),
        "gated decay, jla": ("gated decay", gated),
    }


LIBRARIES = {"cudnn": _cudnn, "torch": _torch, "fla": _fla, "jla": _jla}
