"""Machines that are not here: their real compilers run without them.

A compiler for TPUs is in the wheel `libtpu`, one for NVIDIA GPUs in jax's CUDA plugin.
Each compiles for a topology, a description of devices that stands in for them.
"""

import os
from typing import NamedTuple

import numpy as np
from jax.experimental import topologies

from symjax.training.chips import CHIPS, Chip

# Chips by topology, as the makers cut their pods: multiples of a host.
GRIDS = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
BOX = 8  # GPUs joined by NVLink
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 } device_description_str: "NVIDIA H200"
"""


class Target(NamedTuple):
    name: str
    chip: Chip
    devices: list  # only to compile for: nothing runs on them


def find(name: str) -> Target:
    """The machine that a name such as v5e-64 or h200-8 stands for.

    Raises:
        ValueError: no such machine, or its compiler is not installed.
    """
    kind, _, count = name.partition("-")
    sizes = _sizes()
    if kind not in sizes or not count.isdecimal() or int(count) not in sizes[kind]:
        known = "; ".join(
            f"{kind}-N with N {', '.join(map(str, counts))}"
            for kind, counts in sizes.items()
        )
        raise ValueError(f"--target {name!r} is unknown: choose from {known}")
    chip = next(chip for chip in CHIPS if chip.name.lower().endswith(kind))
    topology = (
        _gpus(int(count)) if kind == "h200" else _tpus(kind, sizes[kind][int(count)])
    )
    return Target(name, chip, list(topology.devices))


def _sizes() -> dict[str, dict[int, str]]:
    """By kind of chip, the grid of each number of them."""
    found = {
        kind: {int(np.prod([int(n) for n in grid.split("x")])): grid for grid in grids}
        for kind, grids in GRIDS.items()
    }
    return found | {"h200": {n: "" for n in (1, 2, 4, 8, 16, 32, 64)}}


def _tpus(kind: str, grid: str) -> topologies.TopologyDescription:
    # Nobody is to be asked for a machine, and other programs may compile too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{kind}-{grid}")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{kind}:{grid}"
        )
    except Exception as error:
        raise _missing("libtpu", "symjax[tpu-compiler]", error) from None


def _gpus(count: int) -> topologies.TopologyDescription:
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    boxes, each = max(1, count // BOX), min(count, BOX)
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology=f"{boxes}x{each}x1"
        )
    except Exception as error:
        raise _missing("jax's CUDA plugin", "jax[cuda13]", error) from None


def _missing(what: str, package: str, error: Exception) -> ValueError:
    first = str(error).strip().splitlines()[:1]
    return ValueError(
        f"--target needs {what} of this jax version: pip install '{package}' "
        f"({type(error).__name__}: {' '.join(first)})"
    )
