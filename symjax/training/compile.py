"""Compilation of the training step: its cache, and a check of the memory it needs."""

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
    """Return the compiled training step for batches of `shape`; print that it compiles.

    Args:
        refuse: whether to refuse a step that needs more memory than a device has. Pass
            False to compile for devices that this machine does not have.
        machine: name of another machine to compile for, shown in the printed line.
    Raises:
        ValueError: `refuse` is True, and the step needs more memory than a device has.
    """
    if refuse:  # before compiling too, since absurd sizes may crash a compiler
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
    """Check that a device has the memory that a step needs.

    Without the check the operating system may kill the run later.

    Args:
        needed: bytes on each device.
        what: beginning of the message: what needs the memory, and a verb.
    Raises:
        ValueError: there is less memory; the message names both sizes.
    """
    there = _device_memory()
    if needed > there:
        raise ValueError(
            f"{what} {needed / GIB:,.1f} GiB a device, there are {there / GIB:,.1f}: "
            "choose a smaller model or batch_size, a larger optimizer.accumulate, or "
            "model.remat=full"
        )


def use_compile_cache() -> None:
    """Keep compiled programs in the user's cache, unless jax has a cache already."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache("jax")))


def _device_memory() -> float:
    """Return the bytes of memory of a device; infinity if they are unknown."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return math.inf
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical / jax.local_device_count()
