"""Interpreter of Pallas for GPUs, with stand-ins for operations of Mosaic GPU.

The interpreter runs asynchronous products at once. So it checks what is computed, but
not the order of waits; only a GPU can show that (`benchmarks/device.py --part
correctness`).
"""

import jax
import numpy as np
from jax._src import state
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as gpu

INTERPRET = gpu.InterpretGPUParams()


def complete(monkeypatch):
    """Add what the interpreter lacks.

    Writes to accumulators, products with a left side in registers, copies that add, and
    two arrays in the same memory, which are separate arrays here.
    """
    copy, multiply = gpu.copy_smem_to_gmem, gpu_callbacks.wgmma

    def copy_or_add(source, to, reduction_op=None, **options):
        if reduction_op is None:
            return copy(source, to, **options)
        assert reduction_op == "add"
        to[...] += source[...]

    def product(*, a_allocation_key_as_array, **given):
        left = np.asarray(a_allocation_key_as_array)
        if left.ndim == 1:  # `left` names a buffer
            return multiply(a_allocation_key_as_array=left, **given)
        memory, thread = gpu_callbacks._get_shared_memory(), given["thread"]
        where = gpu_callbacks.memory.GPULoggingInfo(
            given["mesh_location"], thread, None
        )

        def place(name):
            number = given[f"{name}_allocation_key_as_array"]
            moves = gpu_callbacks._remove_noop_transforms(given[f"{name}_transforms"])
            key = gpu_callbacks.HostAllocationKey.from_array(number)
            return key, memory.access(key, jax.tree.map(int, moves))

        right, found = (
            np.asarray(
                memory.get_buffer_content(*place(x), thread, logging_info=where)[0]
            )
            for x in ("b", "acc")
        )
        found = found + left.astype(np.float32) @ right.astype(np.float32)
        memory.store_buffer_content(*place("acc"), found, thread, logging_info=where)
        return given["token"]

    write = state.AbstractRef._setitem
    monkeypatch.setattr(core.WGMMAAbstractAccumulatorRef, "_setitem", write)
    monkeypatch.setattr(gpu_callbacks, "wgmma", product)
    monkeypatch.setattr(gpu, "copy_smem_to_gmem", copy_or_add)
    monkeypatch.setattr(gpu, "RefUnion", lambda *refs: refs)
