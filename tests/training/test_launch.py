"""Where several processes find each other, and when there is only one."""

import re
import socket
from argparse import Namespace

import pytest
from runs import call

from symjax.training import launch
from symjax.training.launch import Launch

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


def found(flags, environment, monkeypatch):
    """jax reads the variables of the process itself."""
    others = ("JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_PORT")
    for name in (*TORCHRUN, *SLURM, *OPEN_MPI, *others):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return launch.launch(flags, environment)


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
        ((None,) * 3, SLURM, Launch("gpu03:61441", 16, 9, [1])),
        (
            (None,) * 3,
            SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1", "JAX_COORDINATOR_PORT": "88"},
            Launch("gpu03:88", 16, 9),
        ),
        ((None,) * 3, OPEN_MPI, Launch("10.96.0.1:62624", 2, 1, [0])),
        (
            (None,) * 3,
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b,2620::2]:4"},
            Launch("[fe80::b9b]:61441", 2, 1, [0]),
        ),
    ],
)
def test_the_first_that_speaks_places_the_process(
    given, environment, expected, monkeypatch
):
    assert found(flags(*given), environment, monkeypatch) == expected


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
    ],
)
def test_one_process_starts_nothing(given, environment, monkeypatch):
    assert found(flags(*given), environment, monkeypatch) is None


@pytest.mark.parametrize(
    ("given", "environment", "words"),
    [
        (("h:12", None, "1"), {}, "--processes is missing"),
        ((None, "2", None), TORCHRUN, "--coordinator, --process is missing"),
        (("h", "2", "1"), {}, "must be HOST:PORT, got 'h'"),
        ((":12", "2", "1"), {}, "must be HOST:PORT, got ':12'"),
        (("h:99999", "2", "1"), {}, "must be HOST:PORT"),
        (("h:12", "0", "0"), {}, "processes must be a number of at least 1, got '0'"),
        (("h:12", "2", "-1"), {}, "process must be a number of at least 0, got '-1'"),
        (("h:12", "2", "two"), {}, "got 'two'"),
        (("h:12", "2", "2"), {}, "process 2 of 2 processes: they are numbered from 0"),
        ((None,) * 3, {"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR, MASTER_PORT is"),
        ((None,) * 3, {"RANK": "0"}, "WORLD_SIZE is missing"),
        (
            (None,) * 3,
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "Open MPI started 2 processes, but OMPI_MCA_orte_hnp_uri",
        ),
        (
            (None,) * 3,
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;"},
            "ompi does not say where its processes are (Could not parse",
        ),
        (
            (None,) * 3,
            SLURM | {"SLURM_PROCID": "nine"},
            "slurm does not say where its processes are (invalid literal",
        ),
        (
            (None,) * 3,
            SLURM | {"JAX_COORDINATOR_PORT": "http"},
            "must be HOST:PORT, got 'gpu03:http'",
        ),
    ],
)
def test_half_a_place_is_refused_by_name(given, environment, words, monkeypatch):
    with pytest.raises(ValueError, match=re.escape(words)):
        found(flags(*given), environment, monkeypatch)


def test_a_wrong_place_is_one_line_and_exit_code_2(capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        place = f"--coordinator {here} --processes 2 --process".split()
        for words, said in [
            (place[:2], "--processes, --process is missing"),
            ([*place, "0"], "cannot be opened"),
            (["--coordinator", "127.0.0.1:x", *place[2:], "1"], "must be HOST:PORT"),
        ]:
            assert call("train", words) == 2
            line = capsys.readouterr().err
            assert said in line and line.count("\n") == 1
