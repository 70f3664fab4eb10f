"""Connection of the processes of one run: by flags, torchrun, or a launcher.

A run has one process unless one of these says otherwise. The first that applies
decides:

1. the flags `--coordinator HOST:PORT --processes N --process I`;
2. MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, as torchrun sets them. If
   LOCAL_WORLD_SIZE is above 1, a process uses the GPU number LOCAL_RANK;
3. Slurm, Open MPI or a TPU pod, which `jax.distributed.initialize` detects.

With one process nothing is started and no port is opened. The exception is a TPU VM,
where only jax can find out whether there are other processes.

`launch` reads these sources, `join` connects the processes, and `check_count` checks
that all have connected.
"""

import os
import socket
from argparse import Namespace
from collections.abc import Mapping
from typing import NamedTuple

import jax

from symjax.config import LARGEST

WAIT = 300  # seconds for the other processes to start; jax's default
HEARTBEAT = 20  # seconds of silence after which a process counts as dead
FLAGS = ("coordinator", "processes", "process")
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


class Launch(NamedTuple):
    """Position of this process among several, as the user or a launcher gives it.

    Attributes:
        coordinator: host:port on the machine of process 0.
        processes: number of processes.
        process: number of this process.
        devices: numbers of the GPUs of this machine to use; None means all.
        launcher: name of the launcher from which jax gets all values above; "" if they
            are given here.
        wait: seconds within which all processes must connect.
        heartbeat: seconds of silence after which a process counts as dead.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    devices: list[int] | None = None
    launcher: str = ""
    wait: int = WAIT
    heartbeat: int = HEARTBEAT


def is_distributed() -> bool:
    """Return whether this process is connected with others.

    If it is not, no device is initialised by this call.
    """
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_process_zero() -> bool:
    """Return whether this process writes the files and prints the lines of the run."""
    return not is_distributed() or jax.process_index() == 0


def launch(flags: Namespace, environment: Mapping[str, str]) -> Launch | None:
    """Return the position of this process among several; None if it is the only one.

    Args:
        flags: coordinator, processes and process, as text or None.
        environment: environment variables.
    Raises:
        ValueError: some flags or variables are missing, or they contradict each other.
    """
    values = {f"--{name}": getattr(flags, name) for name in FLAGS}
    if any(value is not None for value in values.values()):
        return _parsed(*_complete(values))
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _torchrun(environment)
    launcher = _launcher(environment)
    return Launch(launcher=launcher) if launcher else None


def join(found: Launch | None) -> None:
    """Connect with the other processes. Call it before any device is initialised.

    Afterwards `jax.devices()` are the devices of all processes. jax ends this process
    with SIGABRT (exit code 134) if the others do not connect, or if one of them dies
    later. jax also handles SIGTERM: it tells all processes that they will be stopped.

    Raises:
        ValueError: the host is unknown, the port is taken, or the launcher does not
            tell where the processes are.
    """
    if found is None:
        return
    if found.coordinator:
        _check_address(found.coordinator, opens=found.process == 0)
    try:
        jax.distributed.initialize(
            *found[:3],
            local_device_ids=found.devices,
            cluster_detection_method=None if found.launcher else "deactivate",
            initialization_timeout=found.wait,
            heartbeat_timeout_seconds=found.heartbeat,
        )
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        what = "start this process"
        if found.launcher:
            what = f"ask {found.launcher} where its processes are"
        raise ValueError(
            f"jax cannot {what} ({error}): give --coordinator, --processes and "
            "--process"
        ) from error


def check_count(found: Launch | None) -> None:
    """Check that as many processes have connected as this process expects.

    Raises:
        ValueError: another number of processes has connected.
    """
    if found and found.processes not in (None, jax.process_count()):
        raise ValueError(
            f"--processes (or WORLD_SIZE) is {found.processes}, but "
            f"{jax.process_count()} processes have connected: all need the same number"
        )


def _complete(values: dict[str, str | None]) -> list[str]:
    """Return the values of flags or variables.

    Raises:
        ValueError: one of them is missing or empty.
    """
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise ValueError(
            f"several processes need all of {', '.join(values)}: "
            f"{', '.join(missing)} is missing"
        )
    return [str(value) for value in values.values()]


def _parsed(
    coordinator: str, processes: str, process: str, device: str | None = None
) -> Launch | None:
    """Return the `Launch` with these values, or None for one process."""
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
    if ":" in host and not host.startswith("["):  # IPv6: without [] jax waits for ever
        host = f"[{host}]"
    return None if count == 1 else Launch(f"{host}:{port}", count, index, devices)


def number(name: str, text: str) -> int:
    """Return the number in a text: a count from 1, or an index from 0.

    Raises:
        ValueError: the text is no number, or out of range.
    """
    least = 0 if name in ("process", "LOCAL_RANK") else 1
    digits = text.isdecimal() and len(text) <= len(str(LARGEST))
    if not digits or not least <= int(text) <= LARGEST:
        raise ValueError(
            f"{name} must be a number from {least} to {LARGEST}, got {text!r}"
        )
    return int(text)


def _torchrun(environment: Mapping[str, str]) -> Launch | None:
    """Return the Launch that torchrun's variables describe."""
    values = {name: environment.get(name) for name in TORCHRUN}
    if values["WORLD_SIZE"] == "1":
        return None
    host, port, count, process = _complete(values)
    shared = environment.get("LOCAL_WORLD_SIZE", "1") != "1"
    if "JAX_LOCAL_DEVICE_IDS" in environment:  # jax reads it; the user chose devices
        shared = False
    device = environment.get("LOCAL_RANK") if shared else None
    return _parsed(f"{host}:{port}", count, process, device)


def _launcher(environment: Mapping[str, str]) -> str:
    """Return the name of the launcher that jax can ask; "" if there is none."""

    def several(name: str) -> bool:
        return environment.get(name, "1") != "1"

    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get(
        "TPU_WORKER_HOSTNAMES", ""
    )
    if several("OMPI_COMM_WORLD_SIZE"):
        return "Open MPI"
    # A shell inside an allocation has no job step, so there are no other processes.
    if several("SLURM_NTASKS") and "SLURM_STEP_NODELIST" in environment:
        return "Slurm"
    if "," in hosts or several("MEGASCALE_NUM_SLICES"):
        return "the TPU pod"
    # jax sets these variables at its import on a machine that has TPUs.
    on_tpu = "TPU_ML_PLATFORM" in environment
    return "the TPU VM" if on_tpu and "TPU_SKIP_MDS_QUERY" not in environment else ""


def _check_address(coordinator: str, *, opens: bool) -> None:
    """Check the host, and the port if this process opens it.

    jax would report an error only after `wait` seconds, or abort the process.

    Raises:
        ValueError: the host is unknown, or the port is taken.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        socket.getaddrinfo(host, None)
        if opens and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            socket.create_server(("", int(port))).close()
    except socket.gaierror as error:
        why = f"the coordinator's host {host!r} is unknown: {error.strerror}"
        raise ValueError(why) from None
    except OSError as error:
        why = f"port {port} of process 0 cannot be opened: {error.strerror}"
        raise ValueError(why) from None
