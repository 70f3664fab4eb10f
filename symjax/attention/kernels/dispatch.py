"""The table of kernels, and the rule that decides whether a call runs on one.

A kernel is written for a family of mechanisms and for a platform. A call runs on the
first kernel of its family for which all of these hold:

- The program may be for the kernel's platform (`core.devices`): a TPU of v4 or later
  without jax's 64-bit types, or an NVIDIA GPU with tensor cores for bfloat16.
- The call is made for one device: outside of a mesh on a machine that has one, or in a
  `jax.shard_map`, as layers under a mesh do. XLA cannot split a kernel over devices.
- The kernel supports the arguments, so that its `refusal` is None.

All other calls run their fallback in XLA, and so do other platforms for which the same
program is lowered.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jaxtyping import Array, Float

from symjax.attention.core.devices import by_platform, on_cuda, on_one_device, on_tpu
from symjax.attention.core.meshes import on_any_mesh, rows_alone
from symjax.attention.core.operands import Operands, ScoreSettings, Tokens, rows_spec
from symjax.attention.core.products import TILE
from symjax.attention.kernels.gpu.cudnn import CudnnSoftmax
from symjax.attention.kernels.gpu.differential import GpuDifferential
from symjax.attention.kernels.gpu.normalised import GpuFeatures
from symjax.attention.kernels.gpu.recurrent import GpuDecay, GpuDelta
from symjax.attention.kernels.tpu.attention import TpuSoftmax
from symjax.attention.kernels.tpu.recurrent import TpuDecay, TpuDelta, TpuFeatures


class Kernel(Protocol):
    """A kernel with the static half of a call: a recurrence or `ScoreSettings`.

    It is hashable. It gets the arrays of a call: `Operands` of scores, or the `Tokens`
    and parameters of a recurrence. A kernel of scores has the `name` that
    `implementation` gives it.
    """

    def refusal(self, *given: Any) -> str | None:
        """Return why the kernel does not support the call; None if it does."""
        ...

    def attend(self, *given: Any) -> Array:
        """Return the rows of the call; the last argument computes them in XLA."""
        ...


KERNELS: dict[tuple[str, str], tuple[Callable[..., Any], ...]] = {
    ("softmax", "tpu"): (TpuSoftmax,),
    ("softmax", "cuda"): (GpuDifferential, CudnnSoftmax),
    ("features", "tpu"): (TpuFeatures,),
    ("features", "cuda"): (GpuFeatures,),
    ("decay", "tpu"): (TpuDecay,),
    ("decay", "cuda"): (GpuDecay,),
    ("delta", "tpu"): (TpuDelta,),
    ("delta", "cuda"): (GpuDelta,),
}
PLATFORMS = {"tpu": on_tpu, "cuda": on_cuda}
# Former names of implementations, by which configurations and calls may name them.
ALIASES = {"fused": "tpu", "hopper": "gpu_differential"}


def present_name(implementation: str) -> str:
    """Return the present name of an implementation; any other value as it is."""
    known = isinstance(implementation, str) and implementation in ALIASES
    return ALIASES[implementation] if known else implementation


def run_recurrence(
    recurrence: Any, tokens: Tokens, parameters: Any, fallback: Callable
) -> Float[Array, "B T N V"]:
    """Return rows of a recurrence that begins without a state.

    Args:
        recurrence: its `kernel` names the family of its kernels, if there are any.
        fallback: the same in XLA, a hashable function of tokens and parameters.
    """
    given = tokens, parameters
    family = getattr(recurrence, "kernel", None)
    for platform, kernel in _kernels(family, recurrence):
        if kernel.refusal(*given) is None:
            return _tokens_by_platform(platform, kernel, fallback, *given)
    return fallback(*given)


def run_scores(
    names: tuple[str, ...],
    settings: ScoreSettings,
    operands: Operands,
    fallback: Callable,
) -> Float[Array, "B N T V"]:
    """Return rows of a score mechanism, which names the kernels that may compute them.

    Args:
        fallback: the same in XLA, a hashable function of the operands.
    """
    if operands.query.shape[2] >= TILE:
        for platform, kernel in _kernels("softmax", settings):
            if kernel.name in names and kernel.refusal(operands) is None:
                return _rows_by_platform(platform, kernel, fallback, operands)
    return fallback(operands)


def run_named(
    name: str, settings: ScoreSettings, operands: Operands, fallback: Callable
) -> Float[Array, "B N T V"]:
    """Return rows of softmax by the kernel of this name.

    Raises:
        ValueError: it does not support these operands; the message says why.
    """
    kernel = NAMED[name](settings)
    if reason := kernel.refusal(operands):
        raise ValueError(
            f"implementation {name!r} does not support this call: {reason}"
        )
    return kernel.attend(operands, fallback)


NAMED = {
    kernel.name: kernel
    for (family, _), kernels in KERNELS.items()
    if family == "softmax"
    for kernel in kernels
}


def _kernels(family: str | None, static: Any) -> Iterator[tuple[str, Any]]:
    """Yield the kernels of a family for the platforms of the program, with these."""
    if family is not None and on_one_device():
        for platform, present in PLATFORMS.items():
            if present():
                for kernel in KERNELS.get((family, platform), ()):
                    yield platform, kernel(static)


def _by_platform(platform: str, kernel: Kernel, fallback: Callable, *given: Any) -> Any:
    return by_platform(
        **{platform: lambda: kernel.attend(*given, fallback)},
        default=lambda: fallback(*given),
    )


STATIC = "platform", "kernel", "fallback"
_tokens_by_platform = on_any_mesh(*STATIC, specs=rows_alone)(_by_platform)
_rows_by_platform = on_any_mesh(*STATIC, specs=rows_spec, inline=True)(_by_platform)
