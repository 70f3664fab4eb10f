"""Rendezvous of several processes, and runs of a single process."""

import re
import socket
import subprocess
import sys
from argparse import Namespace

import pytest
import runs
from runs import ROOT, SECONDS, call, reserve_port

from symjax.distributed import launch
from symjax.distributed.launch import Launch

NONE = Namespace(coordinator=None, processes=None, process=None)
TORCHRUN = {
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[03-04,09]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


def flags(*values):
    return Namespace(**dict(zip(launch.FLAGS, values, strict=True)))


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (("h:12", "2", "1"), {}, Launch("h:12", 2, 1)),
        (("[::1]:12", "2", "0"), TORCHRUN, Launch("[::1]:12", 2, 0)),
        (("h:12", "3", "2"), SLURM, Launch("h:12", 3, 2)),
        ((None,) * 3, TORCHRUN, Launch("node7:29500", 4, 3, [1])),
        (
            (None,) * 3,
            TORCHRUN | {"LOCAL_WORLD_SIZE": "1"},
            Launch("node7:29500", 4, 3),
        ),
        ((None,) * 3, SLURM | TORCHRUN, Launch("node7:29500", 4, 3, [1])),
        (
            (None,) * 3,
            TORCHRUN | {"JAX_LOCAL_DEVICE_IDS": "0,1", "MASTER_ADDR": "::1"},
            Launch("[::1]:29500", 4, 3),
        ),
        ((None,) * 3, SLURM, Launch(launcher="Slurm")),
        ((None,) * 3, OPEN_MPI, Launch(launcher="Open MPI")),
        (
            (None,) * 3,
            {"TPU_WORKER_HOSTNAMES": "host0,host1"},
            Launch(launcher="the TPU pod"),
        ),
        (
            (None,) * 3,
            {"TPU_WORKER_HOSTNAMES": "host0", "MEGASCALE_NUM_SLICES": "2"},
            Launch(launcher="the TPU pod"),
        ),
        ((None,) * 3, {"TPU_ML_PLATFORM": "JAX"}, Launch(launcher="the TPU VM")),
    ],
)
def test_the_first_that_speaks_places_the_process(given, environment, expected):
    assert launch.launch(flags(*given), environment) == expected


@pytest.mark.parametrize(
    ("given", "environment"),
    [
        ((None,) * 3, {}),
        (("h:12", "1", "0"), SLURM),
        ((None,) * 3, TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}),
        ((None,) * 3, {"WORLD_SIZE": "1"}),
        ((None,) * 3, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),
        # a shell inside an allocation is no step of it
        ((None,) * 3, {n: v for n, v in SLURM.items() if "STEP" not in n}),
        ((None,) * 3, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}),
        ((None,) * 3, {"MASTER_ADDR": "node7", "MASTER_PORT": "1"}),
        ((None,) * 3, {"TPU_ML_PLATFORM": "JAX", "TPU_SKIP_MDS_QUERY": "1"}),
        ((None,) * 3, {"TPU_WORKER_HOSTNAMES": "host0"}),
    ],
)
def test_one_process_starts_nothing(given, environment):
    assert launch.launch(flags(*given), environment) is None


@pytest.mark.parametrize(
    ("given", "environment", "words"),
    [
        (("h:12", None, "1"), {}, "--processes is missing"),
        ((None, "2", None), TORCHRUN, "--coordinator, --process is missing"),
        (("h", "2", "1"), {}, "must be HOST:PORT, got 'h'"),
        ((":12", "2", "1"), {}, "must be HOST:PORT, got ':12'"),
        (("h:99999", "2", "1"), {}, "must be HOST:PORT"),
        (
            ("h:12", "0", "0"),
            {},
            "processes must be a number from 1 to 2147483647, got '0'",
        ),
        (
            ("h:12", "2", "-1"),
            {},
            "process must be a number from 0 to 2147483647, got '-1'",
        ),
        (("h:12", "2", "two"), {}, "got 'two'"),
        (("h:12", "2", "2"), {}, "process 2 of 2 processes: they are numbered from 0"),
        ((None,) * 3, {"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR, MASTER_PORT is"),
        ((None,) * 3, {"RANK": "0"}, "WORLD_SIZE is missing"),
    ],
)
def test_half_a_place_is_refused_by_name(given, environment, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        launch.launch(flags(*given), environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--coordinator 127.0.0.1:1", "--processes, --process is missing"),
        ("--coordinator h:x --processes 2 --process 1", "must be HOST:PORT"),
        (
            "--coordinator nowhere.invalid:1 --processes 2 --process 1",
            "host 'nowhere.invalid' is unknown",
        ),
        ("--wait 0", "--wait must be a number from 1 to 2147483647, got '0'"),
        ("--heartbeat soon", "--heartbeat must be a number from 1 to"),
        ("--heartbeat 3000000000", "to 2147483647, got '3000000000'"),
    ],
)
def test_a_wrong_place_is_one_line_and_exit_code_2(words, said, capsys):
    assert call("train", words.split()) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def process(words, **environment):
    """Run train.py in a new process, in which nothing has used a device."""
    known = {**runs.environment(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=known | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_line(running):
    said = running.communicate(timeout=SECONDS)
    return running.returncode, "".join(said).splitlines()[-1]


def test_a_port_that_is_taken_is_exit_code_2(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = f"--coordinator 127.0.0.1:{port} --processes 2 --process 0"
        assert call("train", place.split()) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: port {port} of process 0 cannot be opened: Address")
    assert line.count("\n") == 1


def test_a_launcher_that_jax_cannot_ask_is_exit_code_2():
    environment = SLURM | {"SLURM_PROCID": "nine"}
    code, line = last_line(process(["train.py"], **environment))
    assert code == 2
    assert line.startswith("error: jax cannot ask Slurm where its processes are (inva")


ROLL_CALL = """
import os, sys, jax
from symjax.training import commandline, launch, processes
launch.join(commandline.parse_launch([]))
print(jax.process_index(), processes.allgather(sys.argv[1]))
"""


def test_processes_that_slurm_starts_meet_and_speak():
    """They exchange strings of different lengths, with characters beyond ASCII."""
    words = ["λ", "a longer word " * 30]
    place = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    place["JAX_COORDINATOR_PORT"] = str(reserve_port())
    running = [
        process(["-c", ROLL_CALL, word], **SLURM | place | {"SLURM_PROCID": str(index)})
        for index, word in enumerate(words)
    ]
    found = [process.communicate(timeout=SECONDS)[0] for process in running]
    assert [said.splitlines()[-1] for said in found] == [f"0 {words}", f"1 {words}"]
