"""The engine that a call of softmax runs on: blocks of rows, or a kernel for a machine.

`implementation=None` takes the first kernel of a machine, "fused" on TPUs, "hopper" or
"cudnn" on NVIDIA GPUs, if

- such a device is in sight: one of the mesh, or the default backend without one; a
  TPU of v4 or later, or for "hopper" an H100 or H200, without jax's 64-bit types;
- there are at least 128 rows, and the kernel serves the arguments (its `refusal`);
- the call is of one device alone: in a `jax.shard_map`, as layers under a mesh make it,
  or where there is but one. XLA cannot split a kernel among devices.

What runs is then decided where the program is lowered: the kernel for its machine, the
engine of rows for any other.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxtyping import Array, Float

from symjax.attention.core.devices import backend, by_platform, on_one_device
from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import Operands, Rule, rows_spec
from symjax.attention.kernels.gpu import cudnn, differential
from symjax.attention.kernels.tpu import attention
from symjax.attention.kernels.tpu.attention import FEWEST_ROWS

Engine = Callable[[Rule, Operands], Array]


class Kernel(NamedTuple):
    platform: str  # that programs are lowered for
    backend: str  # as jax names devices that run it
    attend: Engine
    elsewhere: Engine  # where it is forced
    refusal: Callable[[Rule, Operands], str | None]


KERNELS = {
    "fused": Kernel(
        "tpu",
        "tpu",
        attention.attend_fused,
        attention.attend_interpreted,
        attention.refusal,
    ),
    "hopper": Kernel(
        "cuda",
        "gpu",
        differential.attend_hopper,
        differential.attend_hopper,
        differential.refusal,
    ),
    "cudnn": Kernel(
        "cuda",
        "gpu",
        cudnn.attend_cudnn,
        cudnn.attend_cudnn,
        cudnn.refusal,
    ),
}


def forced(name: str, rule: Rule, operands: Operands) -> Engine:
    """The kernel of this name.

    Raises:
        ValueError: it does not serve these operands, saying why.
    """
    kernel = KERNELS[name]
    if reason := kernel.refusal(rule, operands):
        raise ValueError(f"implementation {name!r} does not serve this call: {reason}")
    return kernel.attend if backend() == kernel.backend else kernel.elsewhere


def best(
    names: tuple[str, ...], engine: Engine, rule: Rule, operands: Operands
) -> Engine:
    """The engine of rows, or the choice between it and a kernel of these names."""
    if operands.query.shape[2] < FEWEST_ROWS or not on_one_device():
        return engine
    for name, kernel in KERNELS.items():
        if name in names and backend() == kernel.backend:
            if not kernel.refusal(rule, operands):
                return partial(_by_platform, engine, kernel)
    return engine


@on_any_mesh("engine", "kernel", "rule", specs=rows_spec, inline=True)
def _by_platform(
    engine: Engine, kernel: Kernel, rule: Rule, operands: Operands
) -> Float[Array, "B N T V"]:
    return by_platform(
        **{kernel.platform: partial(kernel.attend, rule, operands)},
        default=partial(engine, rule, operands),
    )
