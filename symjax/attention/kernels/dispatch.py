"""Dispatch: the choice of a kernel for a call, or of its fallback in XLA.

A kernel computes one family of mechanisms on one platform. `KERNELS` lists the kernels
of each family. Softmax is the family "softmax"; other score mechanisms have no kernel.
The family of a recurrence is its attribute `kernel`. The first kernel of the family
that passes all of these tests computes the call:

1. The program may run on the platform of the kernel (`PLATFORMS`): a TPU v4 or later
   with jax_enable_x64 off, or an NVIDIA GPU with bfloat16 tensor cores.
2. XLA does not split the arrays over devices, since it cannot split a kernel: there is
   one device, or the call is inside `jax.shard_map` (`devices.xla_keeps_arrays_whole`).
   On a mesh of several devices layers call mechanisms in a `jax.shard_map`
   (`symjax.layers.sharded`).
3. The call has at least 128 query rows. Kernels of recurrences check this themselves,
   as a part of test 4.
4. The kernel supports the arguments: its `refusal` returns None.

If no kernel passes, XLA computes the call by its fallback:

- a score mechanism by `scores.windows` if the window is bounded on both sides, and by
  `scores.rows` otherwise;
- a recurrence by the chunks of `recurrent.engine`.

So causal softmax of 4,096 tokens in bfloat16, without a window, runs

- on a CPU in `scores.rows`, since no kernel is for a CPU;
- on a TPU in `tpu.attention.TpuSoftmax`;
- on an H100 in `gpu.cudnn.CudnnSoftmax`. With jax 0.11 or later differential attention
  V1 with keys of 64 and values of 128 runs there in `gpu.differential.GpuDifferential`.

These calls bypass the dispatch and use no kernel:

- score mechanisms with `implementation=` "rows", "whole" or "ring";
- recurrences that take or return a state, as steps of one token do, or whose time is
  split over devices: `recurrent.engine` runs their chunks;
- linear attention of encoders (`recurrent.bidirectional`).

If one program is lowered for several platforms, the kernel computes the call on its own
platform and the fallback on the others.

`implementation=` may name a kernel instead: see `run_named` for softmax, and
`run_named_recurrence` for decay_causal and delta_causal.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.devices import (
    by_platform,
    on_cuda,
    on_tpu,
    xla_keeps_arrays_whole,
)
from symjax.attention.core.meshes import (
    on_any_mesh,
    sharded_like_first,
    spec_of_rows,
    vary_alike,
)
from symjax.attention.core.operands import (
    ScoreArrays,
    ScoreSettings,
    Tokens,
    spec_of_score_rows,
)
from symjax.attention.core.products import TILE


class Kernel(Protocol):
    """A kernel. It holds the static part of a call, and is hashable.

    This part is the recurrence, or the `ScoreSettings` of a score mechanism. Methods
    take the arrays of the call: `ScoreArrays` of scores, or the `Tokens` and parameters
    of a recurrence.
    """

    def refusal(self, *arrays: Any) -> str | None:
        """Return why the kernel does not support the call; None if it does."""
        ...

    def attend(self, *arrays: Any) -> Array:
        """Return the output of the call, a row for each query.

        The last argument is the fallback, which computes the same rows in XLA. GPU
        kernels of features call it for rows that underflow. TPU kernels of features
        call it in the backward pass, for the gradient of a random projection.
        """
        ...


class KernelSource(NamedTuple):
    """Source of a kernel: its class, imported when a call first tries it.

    Attributes:
        module: its module in `symjax.attention.kernels`.
        implementation: its name as `implementation=` of softmax.
    """

    module: str
    class_name: str
    implementation: str | None = None

    def __call__(self, static: Any) -> Kernel:
        """Return the kernel with the static settings of a call."""
        module = import_module(f"symjax.attention.kernels.{self.module}")
        return getattr(module, self.class_name)(static)


class RepeatedNoise(NamedTuple):
    """Kernel of grouped differential attention, made of a kernel for pairs of maps.

    If r signal heads share a noise head, the noise head is repeated for each signal
    head, and its map is computed r times.
    """

    kernel: Kernel
    signals: int

    def refusal(self, *arrays: Any) -> str | None:
        (operands,) = arrays
        return self.kernel.refusal(operands.repeat_noise(self.signals))

    def attend(self, *arrays: Any) -> Array:
        operands, fallback = arrays
        return self.kernel.attend(operands.repeat_noise(self.signals), fallback)


def _kernel_of_scores(
    source: Callable[[Any], Kernel], settings: ScoreSettings
) -> Kernel:
    """Return a kernel of softmax, for any number of signal heads."""
    kernel = source(settings._replace(signals=1))
    if settings.signals == 1:
        return kernel
    return RepeatedNoise(kernel, settings.signals)


# (family, platform) → kernels, the preferred one first.
KERNELS: dict[tuple[str, str], tuple[KernelSource, ...]] = {
    ("softmax", "tpu"): (KernelSource("tpu.attention", "TpuSoftmax", "tpu"),),
    ("softmax", "cuda"): (
        KernelSource("gpu.differential", "GpuDifferential", "gpu_differential"),
        KernelSource("gpu.cudnn", "CudnnSoftmax", "cudnn"),
    ),
    ("features", "tpu"): (KernelSource("tpu.recurrent", "TpuFeatures"),),
    ("features", "cuda"): (KernelSource("gpu.recurrent", "GpuFeatures"),),
    ("decay", "tpu"): (KernelSource("tpu.recurrent", "TpuDecay"),),
    ("decay", "cuda"): (KernelSource("gpu.recurrent", "GpuDecay"),),
    ("delta", "tpu"): (KernelSource("tpu.recurrent", "TpuDelta"),),
    ("delta", "cuda"): (KernelSource("gpu.recurrent", "GpuDelta"),),
}
PLATFORMS = {"tpu": on_tpu, "cuda": on_cuda}
NAMED: dict[str, Callable[[Any], Kernel]] = {
    kernel.implementation: kernel
    for kernels in KERNELS.values()
    for kernel in kernels
    if kernel.implementation is not None
}
# Values of `implementation=` of decay_causal and delta_causal → kernels for GPUs.
OF_RECURRENCES = {"jla": KernelSource("gpu.jla", "Jla")}
# Former names of implementations, which configurations and calls may still use.
ALIASES = {"fused": "tpu", "hopper": "gpu_differential"}


def present_name(implementation: str) -> str:
    """Return the present name of an implementation; any other value as it is."""
    known = isinstance(implementation, str) and implementation in ALIASES
    return ALIASES[implementation] if known else implementation


def run_recurrence(
    recurrence: Any, tokens: Tokens, parameters: Any, fallback: Callable
) -> Float[Array, "B T N V"]:
    """Return the rows of a recurrence that starts with an empty state.

    Args:
        recurrence: its attribute `kernel` is the family of its kernels, or None.
        fallback: (tokens, parameters) → the same rows in XLA. Hashable.
    """
    arrays = tokens, parameters
    for platform, source in _sources(getattr(recurrence, "kernel", None)):
        kernel = source(recurrence)
        if kernel.refusal(*arrays) is None:
            return _tokens_by_platform(platform, kernel, fallback, *arrays)
    return fallback(*arrays)


def run_named_recurrence(
    name: str, recurrence: Any, tokens: Tokens, parameters: Any, fallback: Callable
) -> Float[Array, "B T N V"]:
    """Return the rows of a recurrence by the kernel of `OF_RECURRENCES` of this name.

    These kernels run only if a call names them.

    Raises:
        ValueError: the kernel does not support the call; the message says why.
    """
    kernel = OF_RECURRENCES[name](recurrence)
    _raise_if_refused(name, kernel, tokens, parameters)
    return _tokens_by_platform("cuda", kernel, fallback, tokens, parameters)


def run_scores(
    names: tuple[str, ...],
    settings: ScoreSettings,
    arrays: ScoreArrays,
    fallback: Callable,
) -> Float[Array, "B N T V"]:
    """Return the rows of a score mechanism.

    Args:
        names: implementations that the mechanism has.
        fallback: arrays → the same rows in XLA. Hashable.
    """
    if arrays.query.shape[2] >= TILE:
        for platform, source in _sources("softmax"):
            if source.implementation in names:
                kernel = _kernel_of_scores(source, settings)
                if kernel.refusal(arrays) is None:
                    return _rows_by_platform(platform, kernel, fallback, arrays)
    return fallback(arrays)


def run_named(
    name: str, settings: ScoreSettings, arrays: ScoreArrays, fallback: Callable
) -> Float[Array, "B N T V"]:
    """Return the rows of softmax by the kernel of this name.

    Tests 1 to 3 are not made, so the kernel's `refusal` checks the device itself.
    Without a TPU, kernels for TPUs are interpreted.

    Raises:
        ValueError: the kernel does not support the call; the message says why.
    """
    kernel = _kernel_of_scores(NAMED[name], settings)
    _raise_if_refused(name, kernel, arrays)
    return kernel.attend(arrays, fallback)


def supports_heads(x: Float[Array, "B T N H"]) -> bool:
    """Return whether a TPU kernel may rotate or normalise these heads.

    It may if the program runs on a TPU, T and H are multiples of 128, and the dtype is
    bfloat16 or float32.
    """
    whole = 0 < x.size and x.shape[1] % TILE == x.shape[3] % TILE == 0
    return on_tpu() and whole and x.dtype in (jnp.bfloat16, jnp.float32)


def run_heads(
    name: str, static: Any, fallback: Callable, x: Float[Array, "B T N H"], *arrays: Any
) -> Float[Array, "B T N H"]:
    """Return the result of a kernel of `tpu.heads`, or of its fallback in XLA.

    Args:
        static: first argument of the kernel.
        fallback: function of the arrays.
    """
    if not (supports_heads(x) and xla_keeps_arrays_whole()):
        return fallback(x, *arrays)
    kernels = import_module("symjax.attention.kernels.tpu.heads")
    kernel = partial(getattr(kernels, name), static, False)
    call = partial(by_platform, tpu=kernel, default=fallback)
    return sharded_like_first(call)(*vary_alike((x, *arrays)))


def _raise_if_refused(name: str, kernel: Kernel, *arrays: Any) -> None:
    if reason := kernel.refusal(*arrays):
        raise ValueError(
            f"implementation {name!r} does not support this call: {reason}"
        )


def _sources(family: str | None) -> Iterator[tuple[str, KernelSource]]:
    """Yield (platform, kernel) for the kernels of a family that pass tests 1 and 2."""
    if family is not None and xla_keeps_arrays_whole():
        for platform, present in PLATFORMS.items():
            if present():
                for source in KERNELS.get((family, platform), ()):
                    yield platform, source


def _by_platform(
    platform: str, kernel: Kernel, fallback: Callable, *arrays: Any
) -> Any:
    return by_platform(
        **{platform: lambda: kernel.attend(*arrays, fallback)},
        default=lambda: fallback(*arrays),
    )


STATIC = "platform", "kernel", "fallback"
_tokens_by_platform = on_any_mesh(*STATIC, specs=spec_of_rows)(_by_platform)
_rows_by_platform = on_any_mesh(*STATIC, specs=spec_of_score_rows, inline=True)(
    _by_platform
)
