"""Devices and platforms that the program being traced may run on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AxisType

# Platforms of `lowered_for`. If they change, jax traces and compiles again.
_LOWERED_FOR = jax.make_user_context(())


def lowered_for(*platforms: str) -> AbstractContextManager:
    """Declare the platforms that programs traced in this context are lowered for.

        with lowered_for("tpu", "cuda"):
            jax.export.export(jax.jit(function), platforms=("tpu", "cuda"))(*arrays)

    Callers need it only for `jax.export` and for `lower(lowering_platforms=…)`. Without
    it, a program for a platform that is not on this machine is correct, but may be
    slow: it may have the loops that are fast on a CPU.

    Args:
        platforms: "cpu", "cuda", "rocm" or "tpu", as `jax.lax.platform_dependent`
            names them.
    """
    return _LOWERED_FOR(platforms)


def platforms() -> frozenset[str]:
    """Return the platforms that the program being traced may be lowered for.

    The first of these that is set decides:

    1. `lowered_for`;
    2. the devices of the mesh in context (`jax.set_mesh`, `jax.shard_map`), which need
       not be on this machine;
    3. `jax_platforms` (the environment variable JAX_PLATFORMS);
    4. the default backend, together with the CPU.
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
    if "gpu" in names:  # name of a backend, not of a platform
        maker, _, _ = _device_kind().partition(" ")
        names += {"NVIDIA": ["cuda"], "AMD": ["rocm"]}.get(maker, ["cuda", "rocm"])
    return frozenset(names) - {"gpu"}


def by_platform(*arrays: Any, default: Callable, **forms: Callable) -> Any:
    """Call the form of a function for the platform of the traced program.

    `jax.lax.platform_dependent` would trace all forms. This function traces only the
    forms for `platforms()`. If there are several, `platform_dependent` chooses one when
    the program is lowered. While a form is traced, `platforms()` returns only the
    platforms of this form.

    Args:
        default: form for all platforms without one in `forms`.
        forms: functions of the arrays, by platform; all return the same types.
    """
    possible = platforms()
    without_form = possible - forms.keys()
    possible_forms = {name: form for name, form in forms.items() if name in possible}
    if not possible_forms:
        return default(*arrays)
    if len(possible_forms) == 1 and not without_form:
        (form,) = possible_forms.values()
        return form(*arrays)
    branches = {
        name: _traced_for((name,), form) for name, form in possible_forms.items()
    }
    if without_form:
        branches["default"] = _traced_for(tuple(sorted(without_form)), default)
    return jax.lax.platform_dependent(*arrays, **branches)


def _traced_for(platforms: tuple[str, ...], form: Callable) -> Callable:
    """Return the form; while it is traced, `platforms()` returns these platforms."""

    def call(*arrays: Any) -> Any:
        with lowered_for(*platforms):
            return form(*arrays)

    return call


def backend() -> str:
    """Return the backend of the devices that the traced program may run on."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _device_kind() -> str:
    """Return the name of the devices' model, for instance "NVIDIA H100"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def on_tpu() -> bool:
    """Return whether the traced program may run our kernels for TPUs.

    They need TPUs of v4 or later, and jax_enable_x64 off, since the compiler of kernels
    has no 64-bit types. The devices are those of the mesh, or of this machine.
    """
    if backend() != "tpu" or jax.config.read("jax_enable_x64"):
        return False
    return not _device_kind().startswith(("TPU v2", "TPU v3"))


def on_cuda() -> bool:
    """Return whether the devices are NVIDIA GPUs with bfloat16 tensor cores.

    These have compute capability 8.0 or higher. The devices are those of the mesh, or
    of this machine. If the mesh has GPUs and this machine has none, the result is True.
    """
    if backend() != "gpu":
        return False
    if jax.default_backend() != "gpu":  # compiled for a GPU that is not here
        return True
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return capability[:1].isdigit() and float(capability) >= 8  # not "gfx…" of AMD


def on_hopper() -> bool:
    """Return whether the traced program may run our kernels for NVIDIA Hopper GPUs.

    The kernels need a Hopper GPU such as the H100, H200 or GH200, Mosaic GPU of jax
    0.11 or later, and jax_enable_x64 off.
    """
    if backend() != "gpu" or jax.config.read("jax_enable_x64"):
        return False
    if jax.__version_info__ < (0, 11):
        return False
    return _device_kind().startswith(("NVIDIA H", "NVIDIA GH"))


def xla_keeps_arrays_whole() -> bool:
    """Return whether XLA cannot split arrays over devices.

    Without a mesh: whether all processes together have one device. With a mesh: whether
    each of its axes is manual (inside `jax.shard_map`) or has one device.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return jax.device_count() == 1
    return not split_by_xla()


def split_by_xla() -> bool:
    """Return whether the mesh has an axis that XLA may split arrays over."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)
