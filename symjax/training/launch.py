"""How the processes of one run find each other: flags, a launcher, or a pod.

A run is one process unless something says otherwise. What speaks first decides:

1. the flags `--coordinator HOST:PORT --processes N --process I`;
2. MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, as torchrun sets them; with
   LOCAL_WORLD_SIZE above 1 a process takes the GPU of its LOCAL_RANK;
3. a TPU pod, Slurm or Open MPI, which jax itself knows how to ask.

Where that is one process, nothing is started and no port is opened.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax._src import clusters  # what jax.distributed.initialize() asks; not public

from symjax.training import meeting

WAIT = 300  # seconds for the other processes to start, jax's own default
FLAGS = ("coordinator", "processes", "process")
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
LAUNCHERS = ("gcetpu", "gketpu", "slurm", "ompi")  # jax's names


class Launch(NamedTuple):
    """One process of several."""

    coordinator: str  # host:port, on the machine of process 0
    processes: int
    process: int
    devices: list[int] | None = None  # of this machine's GPUs; None is all
    wait: float = WAIT  # seconds


def launch(flags: Namespace, environment: Mapping[str, str]) -> Launch | None:
    """The place of this process among several; None where it is the only one.

    Args:
        flags: coordinator, processes and process, as words or None.
    Raises:
        ValueError: some are given and others not, or they contradict each other.
    """
    given = {f"--{name}": getattr(flags, name) for name in FLAGS}
    if any(value is not None for value in given.values()):
        found = _checked(*_complete(given))
    elif "RANK" in environment or "WORLD_SIZE" in environment:
        found = _torchrun(environment)
    else:
        found = _detected(environment)
    # Its user knows better than a launcher; jax reads the variable itself.
    if found and "JAX_LOCAL_DEVICE_IDS" in environment:
        return found._replace(devices=None)
    return found


def join(found: Launch | None) -> None:
    """Meet the other processes, before anything touches a device.

    Process 0 opens the port, the others come to it. Afterwards `jax.devices()` are
    those of all processes, and none of them outlives another (`meeting`).

    Raises:
        ValueError: not all have come, or they disagree about who they are.
    """
    if found is None:
        return
    meeting.meet(found.coordinator, found.processes, found.process, found.wait)
    # jax would take SIGTERM for itself, also while nobody asks it for a step to stop
    # at, and does not know SIGINT: symjax.training.interrupt treats both alike.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        found.coordinator,
        found.processes,
        found.process,
        local_device_ids=found.devices,
        cluster_detection_method="deactivate",  # it would choose devices by itself
        initialization_timeout=WAIT,  # all are there
    )


def _complete(given: dict[str, str | None]) -> list[str]:
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise ValueError(
            f"several processes need all of {', '.join(given)}: "
            f"{', '.join(missing)} is missing"
        )
    return [str(value) for value in given.values()]


def _checked(
    coordinator: str, processes: str, process: str, device: str | None = None
) -> Launch | None:
    """Words as a Launch, or None for one process."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"the coordinator must be HOST:PORT, got {coordinator!r}")
    count, index = number("processes", processes), number("process", process)
    if not index < count:
        raise ValueError(
            f"process {index} of {count} processes: they are numbered from 0 to "
            f"{count - 1}"
        )
    devices = None if device is None else [number("LOCAL_RANK", device)]
    if ":" in host and not host.startswith("["):  # jax would wait for ever
        host = f"[{host}]"
    return None if count == 1 else Launch(f"{host}:{port}", count, index, devices)


def number(name: str, text: str) -> int:
    """Raises: ValueError: the text is no number, or too small a one."""
    least = 0 if name in ("process", "LOCAL_RANK") else 1
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} must be a number of at least {least}, got {text!r}")
    return int(text)


def _torchrun(environment: Mapping[str, str]) -> Launch | None:
    given = {name: environment.get(name) for name in TORCHRUN}
    if given["WORLD_SIZE"] == "1":
        return None
    host, port, count, process = _complete(given)
    shared = environment.get("LOCAL_WORLD_SIZE", "1") != "1"
    device = environment.get("LOCAL_RANK") if shared else None
    return _checked(f"{host}:{port}", count, process, device)


def _detected(environment: Mapping[str, str]) -> Launch | None:
    """What jax finds out about a TPU pod, Slurm or Open MPI."""
    count = environment.get("OMPI_COMM_WORLD_SIZE", "1")
    if count != "1" and "OMPI_MCA_orte_hnp_uri" not in environment:
        raise ValueError(
            f"Open MPI started {count} processes, but OMPI_MCA_orte_hnp_uri does not "
            "say where the first is: give --coordinator, --processes and --process"
        )
    for cluster in clusters.ClusterEnv._cluster_types:
        if cluster.name in LAUNCHERS and cluster.is_env_present():
            return _asked(cluster, environment.get("JAX_COORDINATOR_PORT"))
    return None


def _asked(cluster: type[clusters.ClusterEnv], port: str | None) -> Launch | None:
    """What a launcher says; by jax's rule, one process has one GPU."""
    try:
        count = cluster.get_process_count()
        if count == 1:
            return None
        address = cluster.get_coordinator_address(
            timeout_secs=WAIT, override_coordinator_port=port
        )
        process, device = cluster.get_process_id(), cluster.get_local_process_id()
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{cluster.name} does not say where its processes are ({error}): give "
            "--coordinator, --processes and --process"
        ) from error
    words = address, str(count), str(process)
    return _checked(*words, None if device is None else str(device))
