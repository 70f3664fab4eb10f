"""Meshes of devices, and the sharding of weights, optimizer states and batches.

Rules give the mesh axes of a weight by its path: `FIRST_RULES`, then those of
`symjax.layers`, then `LAST_RULES`.
"""

import math
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.extend.backend import clear_backends
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from symjax import config
from symjax.layers import rules as rules_of_layers

AXES = ("data", "fsdp", "tensor", "sequence")
TOKENS = P(("data", "fsdp"), "sequence")  # arrays [rows, tokens]
ROWS = P(("data", "fsdp"))  # images, and arrays with one entry for each row
MOST_DEVICES = 4096  # largest number of devices that a process simulates

# The first pattern that matches a weight's path gives its axes. * matches any text,
# including slashes.
FIRST_RULES = (
    ("embedding/embedding", P(None, "fsdp")),
    ("positions", P(None, "fsdp")),
    ("patches/kernel", P(None, "fsdp")),
    ("patches/bias", P(None)),
    ("head/kernel", P("fsdp", None)),
    ("head/bias", P(None)),
    ("*norm/*", P(None)),
)
LAST_RULES = (
    ("blocks/*/out/kernel", P("tensor", "fsdp")),
    ("blocks/*/down/kernel", P("tensor", "fsdp")),
    ("blocks/*/out/bias", P(None)),
    ("blocks/*/down/bias", P(None)),
    ("blocks/*/kernel", P("fsdp", "tensor")),
    ("blocks/*/bias", P("tensor")),
)


def simulate(options: config.Mesh) -> bool:
    """Simulate the devices of a mesh on the CPU if the machine has too few.

    Returns:
        True if devices are simulated. Arrays and compiled functions that were made
        before the call can then no longer be used.
    Raises:
        ValueError: the machine has too few devices, and the mesh has more than
            `MOST_DEVICES`.
    """
    needed = math.prod([size for axis in AXES if (size := getattr(options, axis)) > 0])
    if needed <= jax.device_count():
        return False
    if needed > MOST_DEVICES:
        raise ValueError(
            f"a mesh of {needed} devices: at most {MOST_DEVICES} are simulated"
        )
    clear_backends()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", needed)
    return True


def make_mesh(options: config.Mesh, devices: list | None = None) -> Mesh:
    """Return the mesh (data, fsdp, tensor, sequence) of a configuration.

    One size may be -1: it becomes the number of devices divided by the other sizes.

    Args:
        devices: devices to use; None uses all that jax has.
    Raises:
        ValueError: the sizes do not fit the number of devices, or the mesh leaves out
            all devices of a process. The message names the sizes and the number.
    """
    sizes = [getattr(options, axis) for axis in AXES]
    devices = jax.devices() if devices is None else devices
    shown = " × ".join(f"{a} {s}" for a, s in zip(AXES, sizes, strict=True))
    if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(
            f"mesh {shown}: sizes are positive, and one may be -1 for what is left"
        )
    if -1 in sizes:
        known = -math.prod(sizes)
        if len(devices) % known:
            raise ValueError(
                f"mesh {shown}: {len(devices)} devices are not a multiple of {known}"
            )
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) > len(devices):
        raise ValueError(
            f"mesh {shown} needs {math.prod(sizes)} devices, there are {len(devices)}"
        )
    used = devices[: math.prod(sizes)]
    count = len({device.process_index for device in used})
    if count < jax.process_count():
        raise ValueError(
            f"mesh {shown} has the devices of {count} of {jax.process_count()} "
            f"processes: use all {len(devices)}, or start fewer processes"
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes), AXES, axis_types=types, devices=used)


_OPTIONS = {
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 2**20},
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
}


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Return XLA options for the devices of a mesh.

    On TPUs the option makes XLA gather a weight before a product. Without it, on 32
    devices or fewer, XLA passes the shards of the weight from device to device and adds
    up one product for each shard. Each product reads and writes the whole result. For
    the product of 16,384 tokens with a weight [2,048 5,632] on 16 v5e, XLA's compiler
    estimates 27.8 Mcycles on each device with passed shards, and 2.9 Mcycles after a
    gather.

    On CPUs the option makes XLA use its library YNNPACK for sums only. Products are
    computed by Eigen. The option multiplies the time of a step by 0.88 to 0.95 for the
    configurations gpt:3l and performer:3l, and does not change it for diff:3l
    (benchmarks/compiler_options.py).
    """
    return _OPTIONS.get(mesh.devices.flat[0].platform, {})


def check_batch(options: config.Config, mesh: Mesh) -> None:
    """Check that rows, tokens and key/value heads divide over the mesh.

    Raises:
        ValueError: they do not; the message names the sizes.
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    accumulate = options.optimizer.accumulate
    if options.batch_size % (rows * accumulate):
        raise ValueError(
            f"batch_size {options.batch_size} does not divide over mesh data "
            f"{mesh.shape['data']} × fsdp {mesh.shape['fsdp']}"
            + (f" × optimizer.accumulate {accumulate}" if accumulate > 1 else "")
        )
    if options.model.length % mesh.shape["sequence"]:
        raise ValueError(
            f"model.length {options.model.length} does not divide over mesh sequence "
            f"{mesh.shape['sequence']}"
        )
    kv_heads = options.model.kv_heads or options.model.heads
    if kv_heads % mesh.shape["tensor"]:
        raise ValueError(
            f"{kv_heads} key/value heads do not divide over mesh tensor "
            f"{mesh.shape['tensor']}"
        )


def weight_shardings(weights: Any, mesh: Mesh) -> Any:
    """Return the sharding of every weight of a nested dict, by its rule.

    The rules are those of `FIRST_RULES`, `symjax.layers.rules()` and `LAST_RULES`,
    in this order. The first rule that matches the weight's path decides.

    Raises:
        ValueError: no rule matches a weight; or an axis of the mesh does not divide
            it, and the message also names the mesh.
    """

    inside = [(f"blocks/*/{pattern}", axes) for pattern, axes in rules_of_layers()]
    rules = *FIRST_RULES, *inside, *LAST_RULES

    def place(path: tuple, weight: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, axes in rules:
            if fnmatchcase(name, pattern):
                _check_divides(name, weight.shape, axes, mesh)
                return NamedSharding(mesh, axes)
        raise ValueError(f"no sharding rule matches weight {name!r} {weight.shape}")

    return jax.tree_util.tree_map_with_path(place, weights)


def optimizer_shardings(state: Any, shardings: Any, mesh: Mesh) -> Any:
    """Return the shardings of an optimizer's state.

    A moment has the sharding of its weight: the path of the moment ends with the path
    of the weight. All other arrays, such as counters, are replicated.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(shardings)
    of_weights = dict(paths)

    def place(path: tuple, _: Any) -> NamedSharding:
        ends = (path[start:] for start in range(len(path)))
        matches = (of_weights[end] for end in ends if end in of_weights)
        return next(matches, NamedSharding(mesh, P()))

    return jax.tree_util.tree_map_with_path(place, state)


def shard_bytes(tree: Any) -> int:
    """Return the bytes that a tree of abstract arrays takes on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def _check_divides(name: str, shape: tuple, axes: P, mesh: Mesh) -> None:
    for size, axis in zip(shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"weight {name!r} {shape} does not divide over mesh axis {axis} "
                f"of {dict(mesh.shape)}"
            )
