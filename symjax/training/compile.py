"""Compiled programs: kept in a cache, and refused where they do not fit."""

import math
import os

import jax

from symjax.monitor.progress import print_line
from symjax.storage import user_cache
from symjax.training.sharding import shard_bytes
from symjax.training.step import Program

GIB = 2**30


def compiled_step(
    program: Program, shape: tuple[int, int], *, refuse: bool = True, machine: str = ""
) -> jax.stages.Compiled:
    """The training step for batches of `shape`, compiled; a line on stderr says so.

    Args:
        refuse: what does not fit; False for devices that are not there.
        machine: the name of another machine that it is compiled for.
    Raises:
        ValueError: it needs more memory than there is.
    """
    if refuse:  # here too, since sizes beyond all bounds may end a compiler
        state = shard_bytes((program.state, program.constants))
        batch = 2 * 4 * math.prod(shape) // program.mesh.size
        check_memory(state + batch, "weights, optimizer and batch alone take")
    print_line(f"compiling the training step{machine and f' for {machine}'}")
    step = program.lower(shape).compile()
    memory = step.memory_analysis()
    if refuse and memory is not None:
        needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        check_memory(needed, "a training step takes")
    return step


def check_memory(needed: int, what: str) -> None:
    """Refuse what a device cannot hold, instead of being killed half-way.

    Raises:
        ValueError: naming both sizes.
    """
    there = _memory_of_a_device()
    if needed > there:
        raise ValueError(
            f"{what} {needed / GIB:,.1f} GiB a device, there are {there / GIB:,.1f}: "
            "choose a smaller model or batch_size, a larger optimizer.accumulate, or "
            "model.remat=full"
        )


def use_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless jax has one set."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache("jax")))


def _memory_of_a_device() -> float:
    """Bytes; infinite where the platform does not tell."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return math.inf
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical / jax.local_device_count()
