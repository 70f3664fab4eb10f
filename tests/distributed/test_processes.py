"""Several real processes on this machine train one run, with the same numbers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import buckets
import pytest
import runs
from runs import ROOT, SECONDS, reserve_port, words

from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.store import stream
from symjax.storage import resolve
from symjax.training import loop

# On the same terms as conftest: all devices of this process, exact products.
ALONE = {"mesh__data": 2, "mesh__fsdp": 2}
CHANGES = {
    "steps": 8,
    "log__every": 1,
    "evaluate__every": 4,
    "checkpoint__every": 100,
    "model__dropout": 0.1,
    "model__width": 16,
    "optimizer__eps": 1e-6,  # with small steps: rounding noise is not blown up
    "optimizer__learning_rate": 1e-3,
}


# The exit code where jax ends a process that has lost another: by its heartbeats. It
# is 1 where a sum or a save finds out before.
LOST = -signal.SIGABRT


@pytest.fixture(scope="module")
def undisturbed(text, cache, tmp_path_factory):
    """Return the losses of a run in one process."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    assert runs.train(text, workdir, **CHANGES, **ALONE) == 0
    return losses(workdir)


def losses(workdir):
    """Return (step, name) → logged value; no step is logged twice."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [
        ((row["step"], name), row[name])
        for row in map(json.loads, lines)
        for name in ("train/loss", "heldout/loss")
        if name in row
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(found[name] - value) <= 1e-6, name


STARTS = "train.py starts: importing jax, which takes a while\n"


def start(
    count,
    arguments,
    cache,
    *,
    devices=1,
    program=("train.py",),
    extra=None,
    machines=None,
):
    """Start `count` processes of one run, each with its own words of `extra`.

    Args:
        machines: a folder in which each process has its own cache, as on several
            machines.
    """
    environment = {
        **runs.environment(),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": os.environ.get(
            "JAX_DISABLE_MOST_OPTIMIZATIONS", "1"
        ),
        "JAX_PLATFORMS": "cpu",
        # One process may read a program while another writes it; jax compiles it then.
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("XLA_FLAGS", None)
    there = f"127.0.0.1:{reserve_port()}"
    place = f"--coordinator {there} --processes {count} --process".split()
    return [
        subprocess.Popen(
            [sys.executable, *program, *arguments, *place, str(process)]
            + (extra or {}).get(process, []),
            cwd=ROOT,
            env=environment
            | ({"XDG_CACHE_HOME": f"{machines}/{process}"} if machines else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]


def ended(running):
    """Wait for all processes; return (exit code, stderr) of each."""
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    # gloo prints its connections
    plain = [
        "".join(x for x in lines.splitlines(True) if not x.startswith("[Gloo]"))
        for lines in said
    ]
    plain[0] = plain[0].removeprefix(STARTS)  # of the other processes nothing
    return [(p.returncode, lines) for p, lines in zip(running, plain, strict=True)]


# Notes the rows that each process reads; process 1 is sent SIGTERM in step 6. A step
# takes a while then, since jax looks for a signal once a second.
WATCHED = """
import os, signal, sys, time, train
from symjax.data import batches
from symjax.training import loop

process = int(sys.argv[sys.argv.index("--process") + 1])
notes = open(os.path.join(os.environ["NOTES"], str(process)), "w")
report = loop.report

def reported(run, done, metrics):
    report(run, done, metrics)
    if done == 5 and process == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if done >= 5:
        time.sleep(1.5)

def watched(name, cut):
    def noted(starts, tokens, length):
        print(name, len(starts), file=notes, flush=True)
        return cut(starts, tokens, length)
    return noted

batches._cut_windows, batches.weighted_windows = (
    watched("cut", batches._cut_windows), watched("weighted", batches.weighted_windows)
)
loop.report = reported
from symjax.distributed.exit_codes import run_and_exit
run_and_exit(lambda: train.main(sys.argv[1:]))
"""


def interrupted_run(count, text, workdir, cache, notes, monkeypatch, **changes):
    """Return a run in which only process 1 gets SIGTERM, during step 6."""
    notes.mkdir()
    monkeypatch.setenv("NOTES", str(notes))
    arguments = words(text, workdir, **CHANGES, **changes)
    running = start(
        count, arguments, cache, devices=4 // count, program=("-c", WATCHED)
    )
    return ended(running)


def test_two_processes_train_as_one_and_stop_together_for_a_signal_to_one(
    text, undisturbed, cache, tmp_path, monkeypatch
):
    workdir, notes = tmp_path / "run", tmp_path / "notes"
    found = interrupted_run(2, text, workdir, cache, notes, monkeypatch, **ALONE)
    assert [code for code, _ in found] == [143, 143], found
    first, second = (said for _, said in found)
    assert "4 cpu device(s) of 2 processes: new run" in first
    [stopped] = Checkpoints(workdir / "checkpoints").steps()
    assert 6 <= stopped <= 7
    assert f"interrupted: saved checkpoint {stopped} in" in first
    assert "interrupted" not in second and "Traceback" not in first + second
    # Eight rows a batch over four devices, so each process reads twice two rows: of
    # every step's batch and the one made ahead, and of held-out ones (two at step 4,
    # one before the save).
    for process in (0, 1):
        read = Path(notes, str(process)).read_text().splitlines()
        batches, heldout = 2 * (stopped + 1), 2 * (2 + 1)
        assert read.count("weighted 2") == heldout
        assert read.count("cut 2") == batches + heldout == len(read) - heldout
    # One process continues where the two have stopped, on the same mesh.
    assert runs.train(text, workdir, **CHANGES, **ALONE) == 0
    assert_same(losses(workdir), undisturbed)


# Process 1 is sent SIGTERM as the save of step 4 begins, which takes a while then.
DURING_A_SAVE = """
import os, signal, sys, time, train
import orbax.checkpoint as ocp

process, save = sys.argv[sys.argv.index("--process") + 1], ocp.CheckpointManager.save

def slow(self, step, *arguments, **options):
    if step == 4 and process == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    found = save(self, step, *arguments, **options)
    time.sleep(2.5)
    return found

ocp.CheckpointManager.save = slow
from symjax.distributed.exit_codes import run_and_exit
run_and_exit(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_during_a_save_stops_both_after_the_next_step(text, cache, tmp_path):
    workdir = tmp_path / "run"
    changes = CHANGES | {"steps": 12, "checkpoint__every": 4, "evaluate__every": 0}
    arguments = words(text, workdir, **changes, mesh__data=2)
    found = ended(start(2, arguments, cache, program=("-c", DURING_A_SAVE)))
    assert [code for code, _ in found] == [143, 143], found
    assert Checkpoints(workdir / "checkpoints").steps() == [4, 5]


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (
            ["--config.seed=5"],
            "error: process 1 has seed 5, process 0 0: all need one command and one "
            "shared --workdir\n",
        ),
        pytest.param(
            ["--processes", "3"],
            "error: process 1: --processes (or WORLD_SIZE) is 3, but 2 processes have "
            "connected: all need the same number\n",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["seed", "count"],
)
def test_what_one_process_refuses_ends_all_with_one_line(
    extra, line, text, cache, tmp_path
):
    workdir = tmp_path / "run"
    arguments = words(text, workdir, steps=2, mesh__data=2)
    (code, said), other = ended(start(2, arguments, cache, extra={1: extra}))
    assert (code, *other) == (2, 2, "")
    assert said == line
    assert not workdir.exists()


def test_another_mesh_goes_on_with_the_same_losses(
    text, undisturbed, tmp_path, monkeypatch
):
    workdir = tmp_path / "run"
    report = loop.report

    def reported(run, done, metrics):
        report(run, done, metrics)
        if done == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "report", reported)
        assert runs.train(text, workdir, **CHANGES, **ALONE) == 143
    assert Checkpoints(workdir / "checkpoints").steps() == [4]
    other = {"mesh__data": 1, "mesh__tensor": 2, "mesh__sequence": 4}
    assert runs.train(text, workdir, **CHANGES, **other) == 0
    # Relative here: tokens are summed in another order, and float32 numbers are
    # 4.8e-7 apart at a loss of 5.
    assert losses(workdir) == pytest.approx(undisturbed, rel=1e-6, abs=0)


@pytest.mark.slow
def test_four_processes_save_what_one_and_two_go_on_with(
    text, undisturbed, cache, tmp_path, monkeypatch
):
    made = tmp_path / "four"
    found = interrupted_run(
        4, text, made, cache, tmp_path / "notes", monkeypatch, **ALONE
    )
    assert [code for code, _ in found] == [143] * 4, found
    assert all(said == "" for _, said in found[2:])
    read = [Path(tmp_path, "notes", str(p)).read_text() for p in range(4)]
    assert set("".join(read).split("\n")) == {"cut 2", "weighted 2", ""}
    for count in (1, 2):
        workdir = tmp_path / f"on {count}"
        subprocess.run(["cp", "-r", made, workdir], check=True)
        arguments = words(text, workdir, **CHANGES, mesh__data=count)
        assert [code for code, _ in ended(start(count, arguments, cache))] == [
            0
        ] * count
        assert_same(losses(workdir), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["corpus", "checkpoint", "path", "key", "other run"])
def test_a_refused_start_ends_both_and_leaves_what_was(broken, text, cache, tmp_path):
    workdir = tmp_path / "run"
    assert runs.train(text, workdir, steps=1, data__cache=tmp_path / "cache") == 0
    place = {"data__cache": tmp_path / "cache"}
    arguments = words(text, workdir, steps=2, mesh__data=2, **place)
    said = "error: "
    if broken == "corpus":
        path = runs.packed(workdir, tmp_path / "cache") / "train.npy"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        said += f"corpus file {str(path)!r} is damaged"
    elif broken == "checkpoint":
        for path in workdir.glob("checkpoints/1/meta/*"):
            path.write_bytes(b"")
        said += "checkpoint 1 is damaged"
    elif broken == "path":
        arguments += ["--workdir", str(tmp_path / "new"), "--config.data.path=no.txt"]
        said += "data.path"
    elif broken == "key":
        arguments += ["--config.wibble=1"]
        said += "config.wibble is unknown"
    else:
        arguments += ["--config.seed=3"]
        said += f"{workdir} holds a run of another configuration (seed: 0 → 3)"
    before = sorted((p, p.stat().st_mtime_ns) for p in workdir.rglob("*"))
    (code, line), other = ended(start(2, arguments, cache))
    assert (code, *other) == (2, 2, "")
    assert line.startswith(said) and line.count("\n") == 1
    after = sorted((p, p.stat().st_mtime_ns) for p in workdir.rglob("*"))
    assert after == before and not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("saving", [False, True])
def test_a_process_that_dies_ends_the_others_and_the_run_goes_on(
    killed, saving, text, cache, tmp_path
):
    workdir = tmp_path / "run"
    changes = {"steps": 10**6, "checkpoint__every": 20, "evaluate__every": 0}
    arguments = words(text, workdir, "--heartbeat", "10", mesh__data=2, **changes)
    running = start(2, arguments, cache)
    checkpoints = workdir / "checkpoints"
    try:
        while len(Checkpoints(checkpoints).steps()) < 2 or (
            saving and not list(checkpoints.glob("*tmp*"))
        ):
            assert running[killed].poll() is None
            time.sleep(0.002)  # leave the cores to the run
        running[killed].kill()
        died = time.monotonic()
        running[1 - killed].wait(SECONDS)
        seconds = time.monotonic() - died
    finally:
        found = ended(running)
    assert found[killed][0] == -signal.SIGKILL
    code, said = found[1 - killed]
    assert code in (1, LOST), said
    assert "another process or its connection" in said or "JAX distributed" in said
    print(f"process {1 - killed} ended after {seconds:.1f} s with {code}")
    assert seconds < 60  # a save that waits for the dead one would take 20 minutes
    last = Checkpoints(checkpoints).steps()[-1]
    changes["steps"] = last + 1
    assert runs.train(text, workdir, **changes) == 0
    assert Checkpoints(checkpoints).steps()[-1] == last + 1


# Process 1 alone meets what its first words say.
ALONE_IN_TROUBLE = """
import errno, os, signal, sys, time
import train
from orbax.checkpoint._src.checkpointers import async_checkpointer
from symjax.training import fits, record
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.distributed.exit_codes import run_and_exit

def refuse(error):
    def refused(*_, **__):
        raise error
    return refused

def signalled(program, shape):
    signal.raise_signal(signal.SIGTERM)
    time.sleep(3)
    return compiled_step(program, shape)

compiled_step = fits.compiled_step
trouble = os.environ["TROUBLE"]
if sys.argv[-1] == "1":
    if trouble == "a file of another":
        record._read_item = refuse(PermissionError(errno.EACCES, "Permission denied"))
    elif trouble == "no memory":
        record._read_item = refuse(MemoryError("1 TiB"))
    elif trouble == "a damaged file":
        record._read_item = refuse(KeyError("shape"))
    elif trouble == "a full disk":
        full = OSError(errno.ENOSPC, "No space left on device")
        async_checkpointer._background_wait_for_commit_futures = refuse(full)
    elif trouble == "a signal":
        fits.compiled_step = signalled
run_and_exit(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "codes", "said"),
    [
        ("a file of another", [2, 2], "error: process 1: Permission denied"),
        ("no memory", [LOST, LOST], "stopped: process 1: out of memory (1 TiB)"),
        ("a damaged file", [2, 2], "error: checkpoint 1 is damaged (params cannot be"),
        ("a full disk", [LOST, 2], ""),
        ("a signal", [143, 143], "interrupted: no new step was made, the same command"),
    ],
)
def test_what_goes_wrong_in_one_process_ends_all_with_one_line(
    trouble, codes, said, text, cache, tmp_path, monkeypatch
):
    workdir = tmp_path / "run"
    assert runs.train(text, workdir, steps=1) == 0
    monkeypatch.setenv("TROUBLE", trouble)
    arguments = words(text, workdir, steps=4, checkpoint__every=1, mesh__data=2)
    arguments += ["--heartbeat", "10"]
    found = ended(start(2, arguments, cache, program=("-c", ALONE_IN_TROUBLE)))
    assert [LOST if code in (1, LOST) else code for code, _ in found] == codes, found
    if said:
        assert found[0][1].splitlines()[-1].startswith(said)
    else:  # process 0 has lost process 1, which says why
        last = found[1][1].splitlines()[-1]
        assert last.startswith("error: a checkpoint cannot be written to")
    assert "Traceback" not in found[0][1] + found[1][1]
    assert Checkpoints(workdir / "checkpoints").steps() == [1]
    assert runs.train(text, workdir, steps=2) == 0
    assert Checkpoints(workdir / "checkpoints").steps() == [1, 2]


@pytest.mark.slow
def test_two_processes_begin_with_the_weights_of_another_run(text, cache, tmp_path):
    origin = tmp_path / "origin"
    assert runs.train(text, origin, **CHANGES) == 0
    changes = CHANGES | {"init_from": origin, "seed": 7}
    changes["model.attention.symmetric"] = "none"  # a conversion takes place
    one, two = tmp_path / "one", tmp_path / "two"
    assert runs.train(text, one, **changes) == 0
    arguments = words(text, two, **changes, mesh__data=2)
    assert [code for code, _ in ended(start(2, arguments, cache))] == [0, 0]
    # Relative here too: means over two halves are summed in another order.
    assert losses(two) == pytest.approx(losses(one), rel=1e-6, abs=0)


# A stream of small shards, so that the steps below need more than the first one.
STREAMED = """
import sys, train
from symjax.data.store import stream
from symjax.distributed.exit_codes import run_and_exit
stream.SHARD = 1500
run_and_exit(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_two_machines_train_on_a_stream_as_one_does(
    where, cache, tmp_path, monkeypatch
):
    """Each packs the stream itself; also with a run in a bucket, and resumed there."""
    lines = [json.dumps({"text": line}) for line in runs.TEXT.splitlines()]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(lines))
    keys = {
        **CHANGES,
        "data__source": "hub",
        "data__name": tmp_path / "rows",
        "data__streaming": True,
        "data__tokens": 9000,
        "batch_size": 8,
        "optimizer__decay_steps": 20,
    }
    alone = tmp_path / "alone"
    with monkeypatch.context() as patch:
        patch.setattr(stream, "SHARD", 1500)
        assert runs.train("", alone, **keys, **ALONE) == 0
    workdir = tmp_path / "run"
    with buckets.emulated() if where == "bucket" else contextlib.nullcontext() as found:
        if found:
            workdir = resolve(f"{found}/run")
        for steps in (5, 8):
            arguments = words("", workdir, **keys | {"steps": steps}, **ALONE)
            program = {
                "program": ("-c", STREAMED),
                "machines": tmp_path / f"to {steps}",
            }
            ends = ended(start(2, arguments, cache, devices=2, **program))
            assert [code for code, _ in ends] == [0, 0], ends
            assert "of 2 processes" in ends[0][1] and "step" not in ends[1][1]
        assert Checkpoints(workdir / "checkpoints").steps() == [5, 8]
        rows = losses(workdir)
    rows.pop((5, "heldout/loss"))  # the last step of the first of both
    assert_same(rows, losses(alone))
