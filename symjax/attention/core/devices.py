"""Devices and platforms that the program being traced may run on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AxisType

# Names of platforms, set by `lowered_for`; part of the key of jax's caches.
_LOWERED_FOR = jax.make_user_context(())


def lowered_for(*platforms: str) -> AbstractContextManager:
    """Declare the platforms that programs traced in this context are lowered for.

        with lowered_for("tpu", "cuda"):
            jax.export.export(jax.jit(function), platforms=("tpu", "cuda"))(*arrays)

    Only `jax.export` and `lowering_platforms` need it. Without it a program for a
    platform that is not on this machine is right, but may have the CPU's loops.

    Args:
        platforms: "cpu", "cuda", "rocm" or "tpu", as `jax.lax.platform_dependent`
            names them.
    """
    return _LOWERED_FOR(platforms)


def platforms() -> frozenset[str]:
    """Return the platforms that the program being traced may be lowered for.

    The first of these that says anything decides:

    1. `lowered_for`;
    2. the devices of the mesh in context (`jax.set_mesh`, `jax.shard_map`), which need
       not be on this machine;
    3. `jax_platforms` (the environment variable JAX_PLATFORMS);
    4. the default backend, and the CPU beside it.
    """
    if _LOWERED_FOR.value:
        return frozenset(_LOWERED_FOR.value)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        names = [device.platform]
    elif chosen := jax.config.values["jax_platforms"]:
        names = chosen.split(",")
    else:
        names = [jax.default_backend(), "cpu"]
    if "gpu" in names:  # the name of a backend; programs are for its maker's platform
        maker, _, _ = _device_kind().partition(" ")
        names += {"NVIDIA": ["cuda"], "AMD": ["rocm"]}.get(maker, ["cuda", "rocm"])
    return frozenset(names) - {"gpu"}


def by_platform(*arrays: Any, default: Callable, **forms: Callable) -> Any:
    """Call the form of a function that is for the platform of the program.

    It does what `jax.lax.platform_dependent` does, but traces only the forms for which
    the program may be lowered (`platforms`): on a machine with CPUs alone just one.
    Where several are left, each is traced as if the program were for its own platforms
    alone, so that choices inside a form are made once.

    Args:
        forms: functions of the arrays, by platform; all return the same types.
        default: that of all other platforms.
    """
    possible = platforms()
    left = possible - forms.keys()
    found = {name: form for name, form in forms.items() if name in possible}
    if not found:
        return default(*arrays)
    if len(found) == 1 and not left:
        (form,) = found.values()
        return form(*arrays)
    branches = {name: _traced_for((name,), form) for name, form in found.items()}
    if left:
        branches["default"] = _traced_for(tuple(sorted(left)), default)
    return jax.lax.platform_dependent(*arrays, **branches)


def _traced_for(platforms: tuple[str, ...], form: Callable) -> Callable:
    """The form, traced as for these platforms alone."""

    def call(*arrays: Any) -> Any:
        with lowered_for(*platforms):
            return form(*arrays)

    return call


def backend() -> str:
    """That of the devices which the program at hand may be for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _device_kind() -> str:
    """The maker's name of these devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def on_tpu() -> bool:
    """Whether the program at hand may be for a TPU that kernels compile for.

    Their compiler has no types of 64 bits, and TPUs before v4 no products of bfloat16.
    """
    if backend() != "tpu" or jax.config.read("jax_enable_x64"):
        return False
    return not _device_kind().startswith(("TPU v2", "TPU v3"))


def on_cuda() -> bool:
    """Whether the program at hand may be for an NVIDIA GPU whose tensor cores multiply
    bfloat16 (compute capability 8.0)."""
    if backend() != "gpu":
        return False
    if jax.default_backend() != "gpu":  # compiled for one that is not here
        return True
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return capability[:1].isdigit() and float(capability) >= 8  # AMD's begin with gfx


def on_hopper() -> bool:
    """Whether the program at hand may be for an NVIDIA H100, H200 or the like, and this
    jax is one whose Mosaic GPU the kernels for them are written in, without its types
    of 64 bits."""
    if backend() != "gpu" or jax.config.read("jax_enable_x64"):
        return False
    if jax.__version_info__ < (0, 11):
        return False
    return _device_kind().startswith(("NVIDIA H", "NVIDIA GH"))


def on_one_device() -> bool:
    """Whether no axis of a mesh is left for XLA to split arrays over."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.device_count() == 1
    return not split_by_xla()


def split_by_xla() -> bool:
    """Whether there is a mesh with an axis that XLA may split arrays over."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)
