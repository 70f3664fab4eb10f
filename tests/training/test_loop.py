"""A run: what it logs and saves, and how it resumes and stops."""

import json
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import runs
from runs import ROOT, SECONDS, train

from symjax import config
from symjax.checkpoints import checkpoint
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.distributed import signals
from symjax.evaluation.loading import load
from symjax.models import chips
from symjax.monitor import progress
from symjax.monitor.progress import Clock
from symjax.training import compile, loop, preflight
from symjax.training.prefetch import prefetch
from symjax.training.schedule import schedule

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps(workdir):
    return Checkpoints(workdir / "checkpoints").steps()


def at_step(monkeypatch, number, act):
    """Call `act` when the metrics of that step have been read."""
    report = loop.report

    def reported(run, done, metrics):
        report(run, done, metrics)
        if done == number:
            act()

    monkeypatch.setattr(loop, "report", reported)


def test_a_run_that_goes_on_has_each_step_once(text, workdir, capsys):
    changed = {"log__every": 1, "checkpoint__every": 2, "optimizer__decay_steps": 9}
    assert train(text, workdir, steps=4, evaluate__every=2, **changed) == 0
    (workdir / "metrics.jsonl").open("a").write('{"step": 5, "train/loss": 1}\n{"st')
    capsys.readouterr()
    assert train(text, workdir, steps=6, evaluate__every=3, **changed) == 0
    assert "resumed at step 4" in capsys.readouterr().err
    found = rows(workdir)
    assert [r["step"] for r in found if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in found if "heldout/loss" in r] == [2, 4, 6]
    assert min(r["data_seconds"] for r in found if "train/loss" in r) >= 0
    assert steps(workdir) == [4, 6]
    assert train(text, workdir, steps=6, **changed) == 0
    assert "complete at step 6" in capsys.readouterr().err
    assert rows(workdir) == found


def test_a_resumed_run_refuses_other_keys_by_name(text, workdir, capsys):
    assert train(text, workdir, steps=2) == 0
    before = sorted((p, p.stat().st_mtime_ns) for p in workdir.rglob("*"))
    capsys.readouterr()
    code = train(text, workdir, steps=4, seed=5, batch_size=16, model__width=64)
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1
    assert "seed: 0 → 5" in said
    assert "batch_size: 8 → 16" in said
    assert "model.width: 32 → 64" in said
    assert sorted((p, p.stat().st_mtime_ns) for p in workdir.rglob("*")) == before
    free = {"mesh__data": 2, "log__every": 1, "evaluate__every": 3}
    assert train(text, workdir, steps=4, checkpoint__every=1, **free) == 0
    assert steps(workdir) == [3, 4]


def test_allowed_keys_may_change_and_the_checkpoint_says_so(text, workdir, capsys):
    assert train(text, workdir, steps=2) == 0
    changes = {"steps": 4, "optimizer__learning_rate": 1e-4, "batch_size": 16}
    allow = "--allow", "optimizer.learning_rate"
    assert train(text, workdir, *allow, **changes) == 2
    said = capsys.readouterr().err
    assert "(batch_size: 8 → 16)" in said and "learning_rate" not in said
    allow = "--allow", "optimizer.learning_rate,batch_size"
    assert train(text, workdir, "--pack", **changes) == 2
    assert train(text, workdir, "--pack", *allow, **changes) == 0
    assert train(text, workdir, *allow, **changes) == 0
    said = capsys.readouterr().err
    wanted = [
        "from step 2: batch_size: 8 → 16",
        "from step 2: optimizer.learning_rate: 0.004 → 0.0001",
    ]
    assert all(f"changed {line}\n" in said for line in wanted)
    checkpoints = Checkpoints(workdir / "checkpoints")
    assert checkpoints.read_meta(2)["changed"] == []
    assert checkpoints.read_meta()["changed"] == wanted
    assert train(text, workdir, **changes | {"steps": 6}) == 0  # resumes its own values
    assert checkpoints.read_meta()["changed"] == wanted
    assert train(text, workdir, *allow, model__width=64) == 2
    capsys.readouterr()
    assert (
        train(text, workdir, "--allow", "model.width", **changes | {"model__width": 64})
        == 2
    )
    *progress, message = capsys.readouterr().err.splitlines()
    assert "does not fit" in message and progress == ["compiling the training step"]


@pytest.mark.parametrize(
    ("key", "values", "refused"),
    [
        ("ema", (0, 0.9), "optimizer.ema: 0.0 → 0.9"),
        ("ema", (0.9, 0), "optimizer.ema: 0.9 → 0.0"),
        ("ema", (0.9, 0.8), ""),
        ("name", ("adamw", "lion"), "optimizer.name: 'adamw' → 'lion'"),
        ("clip", (1.0, 0), "optimizer.clip: 1.0 → 0.0"),
        ("clip", (1.0, 2.0), ""),
        ("embedding_learning_rate", (1.0, 0.5), "embedding_learning_rate: 1.0 → 0.5"),
        ("embedding_learning_rate", (0.25, 0.5), ""),
    ],
)
def test_arrays_of_another_optimizer_are_refused_by_the_key(
    text, workdir, capsys, key, values, refused
):
    first, second = ({f"optimizer__{key}": x} for x in values)
    assert train(text, workdir, steps=1, **first) == 0
    capsys.readouterr()
    allow = "--allow", f"optimizer.{key}"
    code = train(text, workdir, "--pack", *allow, steps=1, **second)
    assert code == (2 if refused else 0)
    said = capsys.readouterr().err
    assert refused in said and ("--allow cannot change" in said) == bool(refused)


def test_a_signal_may_come_while_a_batch_is_awaited_and_a_checkpoint_is_written(
    text, workdir, monkeypatch, capfd
):
    """The checkpoint of step 2 is on disk only after `wait`, as on a slow disk."""
    written = []
    committed, wait = checkpoint.committed, Checkpoints.wait

    def waited(self):
        saving = self._saving
        wait(self)
        if saving is not None:
            written.append(saving)

    def batches(*arguments):
        for step, arrays in enumerate(prefetch(*arguments), start=1):
            if step == 3:
                signal.raise_signal(signal.SIGTERM)
            yield None if step == 3 else arrays

    monkeypatch.setattr(loop, "prefetch", batches)
    monkeypatch.setattr(Checkpoints, "wait", waited)
    monkeypatch.setattr(
        checkpoint, "committed", lambda x: bool(written) and committed(x)
    )
    code = train(text, workdir, checkpoint__every=2)
    said = capfd.readouterr().err
    assert code == 128 + signal.SIGTERM, said
    assert "interrupted: saved checkpoint 2" in said
    monkeypatch.undo()
    assert steps(workdir) == [2]


@pytest.mark.always
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(
    number, text, workdir, monkeypatch, capfd
):
    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        at_step(patched, 3, lambda: signal.raise_signal(number))
        assert train(text, workdir) == 128 + number
    said = capfd.readouterr().err
    assert "interrupted: saved checkpoint 4" in said and "Traceback" not in said
    assert signal.getsignal(number) is before
    assert steps(workdir) == [4]
    assert train(text, workdir) == 0
    assert steps(workdir) == [4, 6]


def test_a_second_signal_stops_at_once(text, workdir, monkeypatch, capfd):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 3, twice)
    monkeypatch.setattr(signals, "GRACE", SECONDS)  # otherwise this process may end
    assert train(text, workdir, checkpoint__every=2) == 130
    assert "interrupted" in capfd.readouterr().err
    assert steps(workdir) == [2]


def signalled(monkeypatch, room, name, *, after=False):
    """Send SIGTERM when a function is called, or when it returns."""
    task = getattr(room, name)

    def run(*arguments, **options):
        if not after:
            signal.raise_signal(signal.SIGTERM)
        result = task(*arguments, **options)
        if after:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(room, name, run)


@pytest.mark.parametrize(
    ("room", "name"), [(preflight, "open_examples"), (compile, "compiled_step")]
)
def test_a_signal_before_the_first_step_leaves_a_new_workdir_as_it_was(
    room, name, text, workdir, monkeypatch, capfd
):
    signalled(monkeypatch, room, name)
    assert train(text, workdir) == 143
    said = capfd.readouterr().err
    assert said.endswith(
        "interrupted: no new step was made, the same command starts again\n"
    )
    assert "Traceback" not in said and not workdir.exists()


def test_a_signal_while_a_run_resumes_leaves_its_checkpoints(
    text, workdir, monkeypatch, capfd
):
    assert train(text, workdir, steps=2) == 0
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    with monkeypatch.context() as patched:
        signalled(patched, Checkpoints, "restore", after=True)
        assert train(text, workdir, steps=3) == 143
    assert "interrupted: no new step was made" in capfd.readouterr().err
    after = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    assert after == before
    assert train(text, workdir, steps=3) == 0
    assert steps(workdir) == [2, 3]


# A long call in which no signal is handled, like a compilation.
DEAF = """
import hashlib
from symjax.distributed.exit_codes import run_and_exit
from symjax.distributed.signals import Interrupts

def run():
    with Interrupts():
        print("deaf", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

run_and_exit(run)
"""


def test_a_second_signal_stops_also_what_hears_none():
    program = [sys.executable, "-c", DEAF]
    with subprocess.Popen(
        program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None and running.stdout.readline() == "deaf\n"
            running.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(1)
            running.send_signal(signal.SIGINT)
            said = running.communicate(timeout=SECONDS)[1]
        finally:
            running.kill()
    assert running.returncode == 130
    # The first signal is handled if it comes before the long call begins.
    assert said.endswith("interrupted: nothing more was saved\n")


def test_a_start_that_is_interrupted_leaves_nothing(text, workdir, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compile, "compiled_step", interrupted)
    assert train(text, workdir) == 130
    assert not workdir.exists()


def poison(monkeypatch, number):
    """Make the weights of a step NaN, although its loss is finite."""
    compiled_step = compile.compiled_step

    def poisoned(program, shape):
        step = compiled_step(program, shape)

        def run(state, *rest):
            last = int(state.step) + 1 == number
            state, metrics = step(state, *rest)
            if last:
                spoilt = jax.tree.map(lambda x: x * jnp.nan, state.params)
                state = state._replace(params=spoilt)
            return state, metrics

        return run

    monkeypatch.setattr(compile, "compiled_step", poisoned)


def test_a_loss_that_is_no_number_stops_and_names_the_step(
    text, workdir, monkeypatch, capsys
):
    poison(monkeypatch, 4)
    assert train(text, workdir, checkpoint__every=3, log__every=1) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "train/loss is nan at step 5" in said
    assert "the last checkpoint is 3" in said
    assert steps(workdir) == [3]
    assert rows(workdir)[-1]["step"] == 5 and rows(workdir)[-1]["train/loss"] is None


@pytest.mark.parametrize("every", [2, 500], ids=["evaluated", "not evaluated"])
def test_spoilt_weights_are_never_saved(every, text, workdir, monkeypatch, capsys):
    poison(monkeypatch, 4)
    changed = {"checkpoint__every": 2, "evaluate__every": every}
    assert train(text, workdir, **changed) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "held-out loss is nan at step 4; the last checkpoint is 2" in said
    assert steps(workdir) == [2]


def test_spikes_are_skipped_and_counted(text, workdir, capsys):
    """After twenty steps, gradient norms above their mean count as spikes."""
    keys = {"optimizer__spike": 1.0, "optimizer__nonfinite": "skip", "log__every": 1}
    keys |= {"optimizer__decay_steps": 40, "optimizer__learning_rate": 0.0}
    assert train(text, workdir, steps=40, **keys) == 0
    said = [
        line for line in capsys.readouterr().err.splitlines() if " skipped: " in line
    ]
    counts = [row["skipped_steps"] for row in rows(workdir) if "train/loss" in row]
    assert 0 < len(said) == counts[-1] < 20
    assert not any(counts[:20]) and sorted(counts) == counts
    first = next(step for step, count in enumerate(counts, 1) if count)
    assert said[0].startswith(f"step {first} skipped: gradient_norm is ")
    assert train(text, workdir, steps=42, **keys) == 0  # the count continues
    last = [row["skipped_steps"] for row in rows(workdir) if "train/loss" in row]
    assert len(last) >= 42 and last[-1] >= counts[-1]


def test_the_rate_that_is_logged_is_the_one_that_is_used(text, workdir):
    """After twenty steps all steps are skipped, so the schedule does not advance."""
    keys = {"optimizer__spike": 1e-3, "optimizer__nonfinite": "skip", "log__every": 1}
    keys |= {"optimizer__schedule": "linear_schedule", "optimizer__learning_rate": 0.1}
    assert train(text, workdir, steps=60, optimizer__final=0, **keys) == 1
    rates = [row["learning_rate"] for row in rows(workdir)]
    wanted = [0.1 * (59 - taken) / 59 for taken in [*range(20), *[20] * 20]]
    assert rates == pytest.approx(wanted, rel=1e-5)


def test_other_steps_that_change_the_learning_rate_are_said(text, workdir, capsys):
    fixed = {"optimizer__schedule": "wsd", "optimizer__warmup": 1}
    for more, said in ((4, 0), (8, 1)):
        assert train(text, workdir, steps=more, **fixed) == 0
        lines = capsys.readouterr().err.splitlines()
        assert sum(line.startswith("learning rate of step") for line in lines) == said
    assert any("0.004 with steps 8, was 0.0004 with steps 4" in line for line in lines)


@pytest.fixture
def older(monkeypatch):
    """Store checkpoints as before optimizer.version existed."""
    save = Checkpoints.save

    def stored(self, step, trees, meta):
        del meta["config"]["optimizer"]["version"]
        save(self, step, trees, meta)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", stored)
        yield patched


def test_an_older_run_continues_by_the_rules_it_began_with(
    older, text, workdir, capsys
):
    keys = {"optimizer__ema": 0.5, "optimizer__decay_steps": 8, "log__every": 1}
    keys |= {"optimizer__warmup": 4}
    assert train(text, workdir, steps=2, optimizer__version=1, **keys) == 0
    older.undo()
    capsys.readouterr()
    assert train(text, workdir, steps=6, **keys) == 0
    said = capsys.readouterr().err
    assert "resumed at step 2" in said and "optimizer.version 1: " in said
    found = [x["learning_rate"] for x in rows(workdir) if "learning_rate" in x]
    rate = config.Optimizer(warmup=4, decay_steps=8, version=1, learning_rate=0.004)
    wanted = [float(schedule(rate, 6)(taken)) for taken in range(6)]
    assert wanted[0] == 0 and found == pytest.approx(wanted, rel=1e-5)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        assert checkpoints.read_meta()["config"]["optimizer"]["version"] == 1
    load(workdir, ema=True)
    assert train(text, workdir, "--allow", "optimizer.version", steps=8, **keys) == 2
    assert "another optimizer (optimizer.version: 1 → 2)" in capsys.readouterr().err


@pytest.mark.slow
def test_an_older_run_takes_the_new_rules_where_that_is_allowed(
    older, text, workdir, capsys
):
    assert train(text, workdir, steps=2, optimizer__version=1) == 0
    older.undo()
    assert train(text, workdir, "--allow", "optimizer.version", steps=4) == 0
    said = capsys.readouterr().err
    assert "changed from step 2: optimizer.version: 1 → 2" in said
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        assert checkpoints.read_meta()["config"]["optimizer"]["version"] == 2


def test_it_is_said_too_where_another_key_was_allowed_to_change(text, workdir, capsys):
    assert train(text, workdir, steps=4) == 0
    changes = {"steps": 9, "optimizer__weight_decay": 0.3}
    assert train(text, workdir, "--allow", "optimizer.weight_decay", **changes) == 0
    said = capsys.readouterr().err
    assert "changed from step 4: optimizer.weight_decay" in said
    assert "with steps 9, was " in said


def test_a_lock_that_cannot_be_had_is_not_removed(text, workdir, capsys):
    (workdir / "lock").mkdir(parents=True)
    assert train(text, workdir, steps=2) == 0
    assert "lock cannot be locked" in capsys.readouterr().err
    assert (workdir / "lock").is_dir()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer__spike": 0.1}, "stopped: gradient_norm is "),
        (
            {"optimizer__spike": 1e-3, "optimizer__nonfinite": "skip"},
            "stopped: 20 steps in a row skipped: gradient_norm is ",
        ),
    ],
    ids=["stop", "hopeless"],
)
def test_spikes_end_a_run_that_is_told_so(changes, line, text, workdir, capsys):
    assert train(text, workdir, steps=60, checkpoint__every=10, **changes) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(line) and "the last checkpoint is " in said


def test_an_absurd_learning_rate_is_stopped(text, workdir, capsys):
    rate = {"optimizer__learning_rate": 1e9, "optimizer__clip": 0}
    flat = {"optimizer__schedule": "constant_schedule", "optimizer__name": "sgd"}
    assert train(text, workdir, **rate, **flat) == 1
    said = capsys.readouterr().err
    assert "none was saved" in said and "Traceback" not in said


def test_a_disk_that_is_full_ends_in_one_line(text, workdir, monkeypatch, capsys):
    def full(self, step, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", full)
    assert train(text, workdir) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: checkpoint 6 cannot be written")
    assert "No space left" in said
    assert (workdir / "metrics.jsonl").exists()


def test_what_a_run_shows_is_readable_in_a_file(text, workdir, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(progress, "SHARE", 0.0)
    assert train(text, workdir) == 0
    said = capsys.readouterr()
    assert said.out == "" and "\r" not in said.err and "\x1b" not in said.err
    lines = said.err.splitlines()
    assert lines[0] == "compiling the training step"
    assert "parameters" in lines[1] and str(workdir) in lines[1]
    for number, line in enumerate(lines[2:8], 1):
        assert line.startswith(f"step {number}/6  loss ")
        assert "tokens/s" in line and line.endswith(" left")
    assert lines[8] == "compiling the evaluation"
    assert lines[9].startswith("step 6: held-out loss ")
    assert all(name in lines[9] for name in ("unigram", "bigram", "trigram"))
    assert lines[10] == "compiling the sample"
    assert lines[11].startswith("step 6: sample '")
    assert "python eval.py --workdir" in lines[12]
    names = "best held-out loss", "goodput", "checkpoints", "metrics"
    for name, line in zip(names, lines[13:], strict=True):
        assert line.startswith(name)
    best = min(x["heldout/loss"] for x in rows(workdir) if "heldout/loss" in x)
    assert f"  {best:.4f} nats/byte at step 6, on 2 batches" in lines[13]
    assert re.search(r"  \d+% of \d+:\d\d were steps$", lines[14])


def test_utilisation_is_shown_where_the_chip_is_known(
    text, workdir, capsys, monkeypatch
):
    chip = chips.chip_of("NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(chips, "chip_of", lambda kind: chip if kind == "cpu" else None)
    assert train(text, workdir, steps=2, log__every=1, mesh__data=2) == 0
    assert re.search(
        r"tokens/s \([\d,]+ a device, MFU \d+\.\d%\)", capsys.readouterr().err
    )
    for row in (x for x in rows(workdir) if "train/loss" in x):
        assert row["tokens_per_second_per_device"] == row["tokens_per_second"] / 2
        flops = row["tokens_per_second"] * 6 * 28_376  # plus the FLOPs of attention
        assert 0.5 < row["mfu"] * 2 * chip.flops / flops < 1.5


@pytest.mark.parametrize("steps", ["2:3", "2:9"])  # the run ends before step 9
def test_a_trace_of_the_steps_that_were_asked_for(text, workdir, capsys, steps):
    assert train(text, workdir, steps=3, log__profile=steps) == 0
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert f"trace               {workdir}/profile\n" in capsys.readouterr().err
    refused = {
        "2": "FIRST:LAST, got '2'",
        "3:2": "count from 1, and in",
        "7:8": "log.profile '7:8' begins after the last step, 6\n",
        f"1:{'9' * 5000}": "FIRST:LAST, got '1:9999",
    }
    for given, said in refused.items():
        assert train(text, workdir / "other", log__profile=given) == 2
        line = capsys.readouterr().err
        assert said in line and len(line) < 200 and not (workdir / "other").exists()
    assert train(text, workdir, steps=4, log__profile="2:3") == 0
    assert "no trace: log.profile 2:3 is over\n" in capsys.readouterr().err


def test_the_sample_begins_with_the_heldout_text(text, workdir, capsys):
    assert train(text, workdir, steps=1) == 0
    heldout = runs.TEXT[len(runs.TEXT) * 9 // 10 :]
    [line] = [x for x in capsys.readouterr().err.splitlines() if ": sample " in x]
    assert f"sample {heldout[:16]!r}"[:-1] in line


def test_a_line_in_a_file_comes_less_often_the_longer_a_run_lasts(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    shown = progress.Progress(100_000, 0)
    for step in range(1, 36_001):
        now[0] += 1.0
        shown.update(step, 1.0, 10.0, 5.0)
    assert 100 < len(capsys.readouterr().err.splitlines()) < 500


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7325, "2:02:05")],
)
def test_time_left_is_hours_minutes_and_seconds(seconds, said):
    assert progress.duration(seconds) == said


def test_goodput_is_the_share_of_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(100)
    now[0] = 2.0  # data, compiling
    clock.begin()
    now[0] = 5.0
    with clock.stopped():
        now[0] = 9.0
    now[0] = 10.0
    assert clock.goodput() == (0.4, 10.0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("cpu", None),
    ],
)
def test_chips_are_known_by_what_jax_calls_them(kind, name):
    found = chips.chip_of(kind)
    assert (found and found.name) == name


def test_the_clock_leaves_pauses_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(100)
    now[0] = 2.0
    clock.step()
    assert clock.speed() == 50
    with clock.stopped():
        now[0] = 60.0
    now[0] = 62.0
    clock.step()
    assert clock.speed() == 50
    clock.restart()
    now[0] = 62.001
    assert clock.speed() == 50  # two reports at one time
    now[0] = 63.0
    clock.step()
    assert clock.speed() == 100


def test_a_step_waits_for_its_batch_on_average_this_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(100)
    for seconds in (3.0, 1.0):
        with clock.waiting():
            now[0] += seconds
        clock.step()
    assert clock.data_seconds() == 2
    clock.restart()
    assert clock.data_seconds() == 0


def test_batches_are_made_one_ahead_and_each_once():
    begun, going = [], threading.Event()

    def make(step):
        begun.append(step)
        if step == 4:
            raise ValueError("damaged")
        if step == 3:
            assert going.wait(60)
        return -step

    with ThreadPoolExecutor(1) as pool:
        batches = prefetch(pool, make, 2, 5)
        assert next(batches) == -2
        going.set()  # the third batch is made while the second is used
        assert next(batches) == -3
        with pytest.raises(ValueError, match="damaged"):
            next(batches)
        assert begun == [2, 3, 4]
        assert [*prefetch(pool, lambda step: step, 4, 5)] == [4, 5]
