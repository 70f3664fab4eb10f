"""Machines of `--target`: accelerators to compile for, which need not be present.

The compiler for TPUs is in the wheel `libtpu`, the compiler for NVIDIA GPUs in jax's
CUDA plugin. Each compiles for a topology, a description of devices; nothing runs.
"""

import math
import os
from typing import NamedTuple

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from symjax.models.chips import CHIPS, Chip

# Sizes in which the machines are sold. TPUs: slices of a pod in whole hosts. GPUs: up
# to 8 in one machine, joined by NVLink, or several machines of 8.
GRIDS = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "h200": ("1x1x1", "1x2x1", "1x4x1", "1x8x1", "2x8x1", "4x8x1", "8x8x1"),
}
GRIDS_BY_COUNT = {
    kind: {math.prod(map(int, grid.split("x"))): grid for grid in grids}
    for kind, grids in GRIDS.items()
}
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
    """A machine to compile for.

    Attributes:
        devices: descriptions of its devices, on which nothing can run.
    """

    name: str
    chip: Chip
    devices: list

    def one_device(self) -> NamedSharding:
        """Return the sharding of arrays on the first device alone.

        Trace with the mesh of this sharding in context (`jax.set_mesh`), so that
        attention is traced for the platform of the target.
        """
        mesh = Mesh(np.array(self.devices[:1]), ("device",))
        return NamedSharding(mesh, PartitionSpec())


def find(name: str) -> Target:
    """Return the machine of a name such as v5e-64 or h200-8.

    Raises:
        ValueError: there is no such machine, or its compiler is not installed.
    """
    kind, _, count = name.partition("-")
    grids = {str(n): grid for n, grid in GRIDS_BY_COUNT.get(kind, {}).items()}
    if count not in grids:
        choices = "; ".join(
            f"{kind}-N with N {', '.join(map(str, counts))}"
            for kind, counts in GRIDS_BY_COUNT.items()
        )
        raise ValueError(f"--target {name!r} is unknown: choose from {choices}")
    grid = grids[count]
    if kind == "h200":
        needed, package = "jax's CUDA plugin", "jax[cuda13]"
        settings = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        request = {"platform": "cuda", "target_config": H200, "topology": grid}
    else:
        needed, package = "libtpu", "jax[tpu]"
        settings = {  # ask no server for a machine; let other programs use libtpu too
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": f"{kind}-{grid}",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
        request = {"platform": "tpu", "topology_name": f"{kind}:{grid}"}
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)
    try:
        topology = topologies.get_topology_desc(**request)
    except Exception as error:
        first = " ".join(str(error).strip().splitlines()[:1])
        raise ValueError(
            f"--target needs {needed} of this jax version: pip install '{package}' "
            f"({type(error).__name__}: {first})"
        ) from None
    chip = next(chip for chip in CHIPS if chip.name.lower().endswith(kind))
    return Target(name, chip, list(topology.devices))
