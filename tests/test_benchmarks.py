"""Benchmark scripts run without an accelerator, and find wrong results."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from runs import ROOT, write_text

from symjax import attention
from symjax.distributed.exit_codes import exit_of
from symjax.estimate import targets


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


@pytest.fixture
def device(benchmarks, monkeypatch):
    import device

    monkeypatch.setattr(sys, "path", [*sys.path])  # `device` changes it
    monkeypatch.setenv("PYTHONPATH", "")
    return device


@pytest.fixture
def compiled():
    import compiled

    return compiled


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_wrong_numbers_are_faults():
    """A wrong output, a wrong gradient, and NaN."""
    from device_correctness import Case, errors

    def attend(factor, shift=0.0):
        return lambda query, value: attention.symmetric(factor * query, value) + shift

    shapes, exact = ((2, 9, 2, 8), (2, 9, 2, 4)), attend(1)
    for wrong in (attend(1.1), attend(1, 0.1), attend(float("nan"))):
        row = errors(Case(wrong, shapes, exact))
        assert "float32" in row["fault"] and "bfloat16" in row["fault"], row
    row = errors(Case(exact, shapes))
    assert "fault" not in row
    assert row["float32_gradient"] < 1e-6 < row["bfloat16_gradient"]


@pytest.mark.parametrize(
    ("part", "subject", "tokens", "figures"),
    (
        ("machine", "copy", 0, ("gb_per_second",)),
        ("correctness", "retention", 0, ("float32_gradient", "bfloat16_forward")),
        ("attention", "softmax", 4096, ("ms", "trace_s", "lower_s", "compile_s")),
        ("attention", "cosine", 4096, ("ms", "times_softmax")),
        ("crossover", "delta", 8192, ("ms", "times_softmax")),
        ("steps", "diff_sym 125m", 0, ("tokens_per_second", "compile_s")),
        ("steps", "gpt 125m, documents apart", 0, ("tokens_per_second",)),
        ("decode", "delta", 512, ("tokens_per_second", "ready_s")),
        ("decode", "diff", 512, ("tokens_per_second", "ready_s")),
    ),
)
def test_every_part_measures_on_a_cpu(part, subject, tokens, figures):
    from device_measure import measure
    from device_rows import SMALL, Row

    found = {}
    for more in measure(Row(part, subject, tokens), SMALL, 60.0):
        found |= more
    assert "fault" not in found, found
    assert all(found[figure] > 0 for figure in figures), found
    if subject == "softmax":  # missing libraries are named
        assert "missing" in found["rivals"]["cudnn"]
    if subject == "diff":
        assert {"missing", "speed"} & set(found["rivals"]["generate of DiffLlama"])


def test_the_study_runs_processes_and_resumes(monkeypatch, tmp_path):
    import device_study
    import trainings
    from device_rows import SMALL, Row

    monkeypatch.setattr(device_study, "COLUMNS", ("gpt", "diff_sym"))
    monkeypatch.setattr(trainings, "SAVING", 10)
    text, out = str(write_text(tmp_path)), tmp_path / "study"
    sizes = SMALL._replace(text=text, out=str(out))
    row = Row("study", "3l")
    assert device_study.study(row, sizes, 5)["fault"] == "0 of 2 runs are complete"
    found = device_study.study(row, sizes, 600)
    assert set(found) == {"gpt-3l_heldout", "diff_sym-3l_heldout"}
    metrics = [*out.glob("*/metrics.jsonl")]
    before = [x.stat().st_mtime_ns for x in metrics]
    assert len(metrics) == 2 and device_study.study(row, sizes, 600) == found
    assert [x.stat().st_mtime_ns for x in metrics] == before
    slower = device_study.study(Row("study", "3l at 3e-4"), sizes, 600)
    assert set(slower) == set(found) and slower != found
    assert len([*out.glob("3e-4/*/metrics.jsonl")]) == 2


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return the processes that `trainings` starts: train.py of `tmp_path`."""
    import trainings

    started = []

    class Program(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self)

    monkeypatch.setattr(trainings, "ROOT", tmp_path)
    changed = {**vars(subprocess), "Popen": Program}
    monkeypatch.setattr(trainings, "subprocess", SimpleNamespace(**changed))
    return started


RUNS = {Path("a"): ["--config.steps=1"], Path("b"): ["--config.steps=1"]}


def test_a_run_that_fails_stops_the_others_and_passes_its_exit_code_on(
    programs, tmp_path
):
    from trainings import train_together

    lines = (
        "import sys, time",
        'time.sleep(0 if "a" in sys.argv else 60)',
        "sys.exit(3)",
    )
    (tmp_path / "train.py").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="a: train.py ended with exit code 3") as found:
        train_together(RUNS, 2)
    assert exit_of(found.value).exit_code == 3
    assert [x.returncode for x in programs] == [3, -signal.SIGTERM]


def test_an_interruption_stops_the_runs_by_one_signal(programs, tmp_path, monkeypatch):
    """A second one, from the terminal, would keep train.py from saving."""
    import trainings

    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    groups = []

    def interrupt(_):
        groups.extend(os.getpgid(x.pid) for x in programs)
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=interrupt, monotonic=time.monotonic)
    monkeypatch.setattr(trainings, "time", clock)
    with pytest.raises(KeyboardInterrupt):
        trainings.train_together(RUNS, 2)
    assert len(groups) == 2 and os.getpgid(0) not in groups
    assert [x.returncode for x in programs] == [-signal.SIGTERM] * 2


def test_lists_of_numbers_lose_their_spaces():
    from arguments import numbers

    assert numbers("0, 1 ,12") == "0,1,12"
    for word in ("0,", "one", "-1", ""):
        with pytest.raises(ArgumentTypeError, match="whole numbers between commas"):
            numbers(word)


def test_the_rows_have_names_of_their_parts():
    import device_models
    import device_peers
    import device_rows
    from device_correctness import cases

    rows = device_rows.ROWS
    assert len({x.name for x in rows}) == len(rows)
    models = device_models.models("350m", device_rows.SMALL)
    checked = set(cases(70))
    known = {
        "attention": device_peers.ours(1, 8, 2, 4),
        "crossover": device_peers.ours(1, 8, 2, 4),
        "correctness": checked,
        "decode": models,
    }
    for part, names in known.items():
        assert {x.subject for x in rows if x.part == part} <= set(names)
    assert {x.subject for x in rows if x.part == "correctness"} == checked
    trained = {x.subject.partition(" ")[0] for x in rows if x.part == "steps"}
    assert trained == set(models) and {x.part for x in rows} == set(device_rows.PARTS)


@pytest.mark.parametrize("library", ("cudnn", "torch", "jla", "fla"))
def test_a_library_serves_the_rivals_of_its_names(library):
    import device_peers

    needed = {"torch": "torch", "jla": "jla", "fla": "fla.ops"}
    if library in needed:
        pytest.importorskip(needed[library], exc_type=ImportError)
    load, names = device_peers.LIBRARIES[library]
    assert set(load()) == set(names) <= set(device_peers.ours(1, 8, 2, 4))


@pytest.mark.slow
def test_the_rows_of_the_file_are_measured_in_their_order(tmp_path):
    """One minute on a CPU; the next call does not measure the same rows again."""
    from device_rows import ROWS

    file = tmp_path / "rows.json"
    command = "benchmarks/device.py", "--small", "--seconds", "60", "--json", str(file)
    counts = []
    for _ in range(2):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        counts.append(len([x for x in read(file) if "again" not in x]))
    names = [x["name"] for x in read(file) if "again" not in x]
    assert 1 < counts[0] < counts[1] == len(set(names))
    assert names[0] == ROWS[0].name


@pytest.mark.always
def test_a_second_call_continues(device, monkeypatch, tmp_path, capfd):
    file = tmp_path / "rows.json"
    names = [("machine", "copy"), ("attention", "softmax", 4096), ("machine", "no")]
    rows = [device.Row(*x) for x in names]
    monkeypatch.setattr(device, "ROWS", rows)
    given = ["--small", "--seconds", "60", "--json", str(file)]
    assert device.main(given) == 1
    first = read(file)
    assert [x["name"] for x in first] == [x.name for x in rows]
    assert ["fault" in x for x in first] == [False, False, True]
    assert "KeyError: 'no'" in capfd.readouterr().out
    assert device.main(given) == 1
    assert [x["name"] for x in read(file)[3:]] == [rows[2].name]
    assert "1 rows, 2 more are in the file already" in capfd.readouterr().out


def test_a_row_without_a_rival_is_measured_again_with_other_libraries(device, tmp_path):
    file, row = tmp_path / "rows.json", device.Row("attention", "softmax", 4096)
    common = {"device": "cpu", "small": True}
    first = device.Records(file, common, libraries={})
    first.add(row, {"seconds": 1.0, "rivals": {"fla": {"missing": "no fla"}}})
    assert device.Records(file, common, libraries={}).complete(row)
    later = device.Records(file, common, libraries={"torch": "2.11"})
    assert not later.complete(row)
    later.add(row, {"seconds": 1.0, "rivals": {"fla": {"ms": 1.0}}})
    assert device.Records(file, common, libraries={}).complete(row)


@pytest.mark.parametrize("reason", ["OutOfTime: not ready after 30 s", "not finished"])
def test_a_row_whose_rival_was_late_is_measured_again_once(device, tmp_path, reason):
    file, row = tmp_path / "rows.json", device.Row("attention", "linear", 4096)
    late = {"seconds": 1.0, "rivals": {"fla": {"missing": reason}}}
    device.Records(file, {}).add(row, {"seconds": 1.0, "again": True})  # cut off
    device.Records(file, {}).add(row, late)
    again = device.Records(file, {})
    assert not again.complete(row)
    again.add(row, late)
    assert device.Records(file, {}).complete(row)


def test_rows_of_a_study_belong_to_its_steps(device, tmp_path):
    file, row = tmp_path / "rows.json", device.Row("study", "3l")
    device.Records(file, {"small": True}, {"steps": 2}).add(row, {"seconds": 1.0})
    for steps in (2, 3):
        records = device.Records(file, {"small": True}, {"steps": steps})
        assert records.complete(row) == (steps == 2)


def test_lines_that_are_no_rows_are_left_out(device, tmp_path, capsys):
    file, rows = tmp_path / "rows.json", [device.Row("machine", x) for x in "ab"]
    device.Records(file, {}).add(rows[0], {"seconds": 1.0})
    others = b'[1, 2]\n\xff\n{"part": "machine"}\n{"name": "b", "pa'
    file.write_bytes(file.read_bytes() + others)
    device.Records(file, {}).add(rows[1], {"seconds": 1.0})
    assert capsys.readouterr().err.count("is no row; left out") == 4
    assert all(device.Records(file, {}).complete(x) for x in rows)


def test_wrong_folders_of_the_device_script_have_one_line(device, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("text")
    (tmp_path / "odd.whl").write_text("junk")
    (tmp_path / "empty").touch()
    for words in (
        ["--wheels", str(file)],
        ["--wheels", str(tmp_path)],
        ["--text", str(tmp_path)],
        ["--text", str(tmp_path / "empty")],
    ):
        with pytest.raises(SystemExit) as ended:
            device.main(words)
        assert ended.value.code == 2
        assert "error: argument" in capsys.readouterr().err.splitlines()[-1]
    words = ["--part", "study", "--text", str(file), "--out", str(file / "below")]
    assert device.main(words) == 2
    assert "cannot be a folder" in capsys.readouterr().err


class Worker:
    """A worker whose rows take ten seconds of a simulated clock."""

    def __init__(self, clock, faults=()):
        self.clock, self.faults, self.limits = clock, faults, []

    def measure(self, row, limit):
        self.limits.append(limit)
        self.clock.now += 10
        fault = {"fault": "no"} if row.subject in self.faults else {}
        return {"seconds": 10.0, "ms": 1.0, **fault}


@pytest.fixture
def clock(device, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_rows_that_do_not_fit_are_skipped_and_named(device, clock, capsys):
    rows = [device.Row("steps", f"model {x}") for x in range(5)]
    records = device.Records(None, {"small": False})
    worker = Worker(clock, faults=("model 0",))
    assert device.measure(rows, records, worker, 105.0) == 1
    assert len(records.rows) == 5  # estimated by the first row, not by 80 s
    told = capsys.readouterr().out.splitlines()
    assert [x.split()[:3] for x in told] == [
        ["steps:", "model", str(x)] for x in range(5)
    ]
    assert worker.limits == [105.0, 95.0, 85.0, 75.0, 65.0]
    clock.now = 0.0
    records = device.Records(None, {"small": False})
    assert device.measure(rows, records, worker, 79.0) == 0 and not records.rows
    clock.now = 0.0
    assert device.measure(rows, records, worker, 95.0) == 1
    assert list(records.rows) == [x.name for x in rows]
    assert "did not fit" in capsys.readouterr().out


def test_a_row_that_the_end_cuts_off_comes_last_in_the_next_call(device, clock, capsys):
    rows = [device.Row("machine", "copy"), device.Row("steps", "gpt 125m")]
    tried = []

    def measure(row, limit):
        tried.append(row)
        return {"seconds": limit, "fault": "no", "late": True}

    worker = SimpleNamespace(measure=measure)
    for end, cut_off in ((100.0, True), (1000.0, False)):
        records = device.Records(None, {"small": False})
        device.measure(rows, records, worker, end)
        assert not any(records.complete(row) for row in rows)
        assert ("did not fit" in capsys.readouterr().out) == cut_off
        assert ["fault" in x for x in records.rows.values()] == [not cut_off] * 2
    records = device.Records(None, {"small": False})
    records.add(rows[0], {"seconds": 1.0, "ms": 2.0, "again": True})
    tried.clear()
    device.measure(rows, records, worker, 100.0)
    assert tried == rows[::-1]
    assert records.rows[rows[0].name]["ms"] == 2.0  # figures are kept


def test_rows_of_other_sources_and_devices_are_measured_again(device, tmp_path):
    file, row = tmp_path / "rows.json", device.Row("steps", "gpt 125m")
    common = {"device": "one", "revision": "1", "small": False}
    device.Records(file, common).add(row, {"seconds": 1.0})
    assert device.Records(file, common).complete(row)
    for name, other in (("device", "two"), ("revision", "2"), ("small", True)):
        assert not device.Records(file, common | {name: other}).complete(row)
    before = device.revision()
    assert before == device.revision() and len(before) == 12


def test_what_has_a_fault_is_tried_after_all_others(device, clock):
    rows = [device.Row("steps", x) for x in ("one", "two", "three")]
    records = device.Records(None, {"small": False})
    records.add(rows[0], {"seconds": 1.0, "fault": "no"})
    device.measure(rows, records, Worker(clock), 1000.0)
    assert [x for x in records.rows][1:] == [rows[1].name, rows[2].name]
    assert records.complete(rows[0])


HANGS = """
import os, time
def serve(connection, sizes):
    connection.send("a device")
    while True:
        row, seconds = connection.recv()
        if row == "hangs":
            time.sleep(60)
        if row == "dies":
            os._exit(7)
        if row == "loses":
            connection.send(({"fault": "no"}, False))
            connection.send(({"lost": True}, True))
            continue
        connection.send(({"pid": os.getpid()}, row != "half"))
        if row == "half":
            time.sleep(60)
"""


def test_a_row_that_hangs_or_dies_costs_no_other(device, monkeypatch, tmp_path):
    import device_process

    (tmp_path / "hanging.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import hanging

    monkeypatch.setattr(device_process, "serve", hanging.serve)
    worker = device_process.Measuring(None)
    try:
        assert worker.device == "a device"
        pids = [worker.measure("fine", 20.0)["pid"] for _ in range(2)]
        assert pids[0] == pids[1]
        faults = {"hangs": "not finished after 1 s", "loses": "no"}
        faults["dies"] = "ended its process, exit code 7"
        for row, fault in faults.items():
            found = worker.measure(row, 20.0 if row != "hangs" else 1.0)
            assert found["fault"] == fault and ("late" in found) == (row == "hangs")
            pids.append(worker.measure("fine", 20.0)["pid"])
        found = worker.measure("half", 1.0)  # its own figures are kept
        assert found["pid"] == pids[-1] and "fault" not in found
        assert found["rivals"]["others"]["missing"] == "not finished after 1 s"
        assert len(set(pids)) == 4
    finally:
        worker.end()


def test_functions_of_others_are_interrupted():
    from device_jobs import OutOfTime, at_most

    began = time.monotonic()
    with pytest.raises(OutOfTime, match="not ready after"), at_most(0.1):
        while time.monotonic() < began + 20:
            pass
    assert time.monotonic() < began + 10
    with at_most(0.1):
        pass
    time.sleep(0.2)


def test_a_library_that_was_not_ready_in_time_is_not_waited_for_again(monkeypatch):
    import device_measure
    from device_jobs import OutOfTime
    from device_peers import Rival

    def slow(rival, backward):
        asked.append(rival.library)
        raise OutOfTime("not ready after 30 s")

    asked = []
    monkeypatch.setattr(device_measure, "job", slow)
    monkeypatch.setattr(device_measure, "_late", set())
    rival = Rival("fla", abs, ((1,),), 1, 1)
    with pytest.raises(OutOfTime):
        device_measure._prepared(rival, False)
    with pytest.raises(OutOfTime, match="fla was not ready in time in an earlier row"):
        device_measure._prepared(rival, False)
    assert asked == ["fla"]


def test_missing_wheels_are_installed_for_this_call(device, tmp_path):
    name = "symjax_nothing"
    with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "answer = 42")
        about = f"{name}-1.0.dist-info"
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        wheel.writestr(f"{about}/METADATA", head)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", tags)
        wheel.writestr(f"{about}/RECORD", "")
    wheels = device.parse(["--wheels", str(tmp_path)]).wheels
    before, target = [*sys.path], str(tmp_path / "installed")
    device.install(wheels, target)
    assert importlib.import_module(name).answer == 42
    assert len(sys.path) == len(before) + 1
    device.install(wheels, target)  # the wheel is installed
    assert len(sys.path) == len(before) + 1


def test_a_name_that_does_not_exist_is_no_success(device, capsys):
    for given in ([], ["--part", "steps"]):
        assert device.main(["--small", "--only", "sofmax", *given]) == 2
        told = capsys.readouterr().err
        assert "no name contains 'sofmax': choose from" in told
        assert "steps: gpt 125m" in told
        assert ("correctness: softmax, causal\n" in told) == (not given)


def test_the_study_needs_a_text(device, capsys):
    assert device.main(["--small", "--part", "study"]) == 2
    assert "--text FILE" in capsys.readouterr().err
    assert not any(x.part == "study" for x in device.chosen(device.parse([])))
    rows = device.chosen(device.parse(["--text", __file__]))
    subjects = [x.subject for x in rows if x.part == "study"]
    assert subjects[:3] == ["3l", "3l at 3e-4", "6l"]


def test_lengths_are_those_of_attention(device):
    rows = device.chosen(device.parse(["--lengths", "64", "128"]))
    assert {x.tokens for x in rows if x.part == "attention"} == {64, 128}
    assert {x.tokens for x in rows if x.part == "crossover"} == {8192, 16384, 32768}


@pytest.mark.parametrize(
    "words, named",
    [
        ("--lengths 0", "no positive number"),
        ("--lengths 16 1.5", "'1.5' is no positive number"),
        ("--seconds 0", "no positive number"),
        ("--json {folder}", "is a folder"),
        ("--json {folder}/none/rows", "no folder"),
        ("--seeds abc", "'abc' must be whole numbers between commas"),
        ("--text nowhere.txt", "nowhere.txt: there is no such file"),
        ("--wheels nowhere", "nowhere: there is no such file or folder"),
    ],
)
def test_wrong_arguments_are_one_line(device, words, named, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        device.main(words.format(folder=tmp_path).split())
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_the_table_of_the_document_has_names_of_the_command():
    from device_correctness import cases

    text = (ROOT / "docs" / "performance" / "measuring.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| names of `correctness` |")
    rows = re.findall(r"^\| (.*?) \|", table.partition("\n\n")[0], re.M)
    names, known = re.findall("`(.*?)`", " ".join(rows)), cases(70)
    assert len(names) > 20
    assert not [name for name in names if not any(name in x for x in known)]


@pytest.mark.parametrize(
    ("kind", "flops"),
    (
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("cpu", None),
    ),
)
def test_the_peak_is_that_of_the_chip(kind, flops, monkeypatch):
    import device_models

    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert device_models.peak() == flops


def test_a_row_is_printed_with_its_rivals(device):
    name, rivals = "x" * 70, {"theirs": {"speed": 1.5}, "others": {"missing": "no"}}
    first, *others = device.row_lines(name, {"ms": 1.0, "rivals": rivals})
    assert first == f"{name}  ms 1"
    assert [x.split() for x in others] == [
        ["theirs", "speed", "1.5"],
        ["others", "missing", "no"],
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the wheel libtpu"
)
def test_the_compiler_of_a_tpu_estimates_functions_and_steps(
    compiled, tmp_path, capsys
):
    file = tmp_path / "rows.json"
    assert compiled.main(["functions", "--only", "cosine", "--json", str(file)]) == 0
    before = json.loads(file.read_text())["cosine"]
    both, alone = (
        before[f"{x}: Mcycles, high"] for x in ("forward + backward", "forward")
    )
    assert both > alone >= before["forward: Mcycles, low"] > 0
    given = ["steps", "--target", "v5e-4", "--only", "gpt:tiny", "--json", str(file)]
    assert compiled.main(given) == 0
    step = json.loads(file.read_text())["gpt:tiny"]
    assert 0 < step["% of peak, high"] <= step["% of peak, low"] < 100
    capsys.readouterr()
    assert compiled.main([*given, "--against", str(file)]) == 0
    told = capsys.readouterr().out
    assert "(1.00 of " in told and "--against" not in told
    other = {"made by": {"target": "v6e-4", "jax": "0"}}
    file.write_text(json.dumps(other))
    assert compiled.main([*given, "--against", str(file)]) == 0
    told = capsys.readouterr().out
    assert "v6e-4" in told and "gpt:tiny (not in --against)" in told


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs jax's CUDA plugin",
)
def test_the_compiler_of_a_gpu_tells_the_bytes_of_functions(compiled, tmp_path):
    file = tmp_path / "rows.json"
    given = ["functions", "--target", "h200-1", "--only", "linear", "--json", str(file)]
    assert compiled.main(given) == 0
    row = json.loads(file.read_text())["linear"]
    both, alone = (row[f"{x}: GB"] for x in ("forward + backward", "forward"))
    least = 4 * 4096 * 16 * 128 * 2 / 1e9  # one operand
    assert both > alone >= 4 * least
    assert row["forward: GB, attention"] > 0.9 * alone


@pytest.mark.parametrize("target", ("v5e-5", "h200-8"))
def test_a_machine_without_estimates_is_refused(compiled, target, capsys):
    with pytest.raises(SystemExit, match="2"):
        compiled.main(["steps", "--target", target])
    error = capsys.readouterr().err
    assert "--target" in error and "Traceback" not in error


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the wheel libtpu"
)
@pytest.mark.parametrize(
    "words, named",
    [
        (
            "steps --target v5e-4 --only gpt:tiny,digits:tiny",
            "digits:tiny: model.patch",
        ),
        ("steps --target v5e-4 --only gpt:tine", "gpt:tine"),
        ("functions --json {folder}/none/rows.json", "no folder"),
        ("functions --json {folder}", "is a folder"),
        ("functions --against {folder}/rows.json", "no rows"),
        ("functions --against {folder}/words.json", "no rows"),
        ("functions --only sofmax", "sofmax"),
    ],
)
def test_what_is_wrong_is_named_before_anything_compiles(
    compiled, words, named, tmp_path, capsys
):
    (tmp_path / "rows.json").write_text("[1]")
    (tmp_path / "words.json").write_text('{"softmax": {"Mcycles": "x"}}')
    with pytest.raises(SystemExit, match="2"):
        compiled.main(words.format(folder=tmp_path).split())
    assert named in capsys.readouterr().err


def test_first_calls_for_an_unknown_machine_are_refused(capsys):
    import first_call

    with pytest.raises(SystemExit, match="2"):
        first_call.main(["--target", "h200-3"])
    *_, line = capsys.readouterr().err.splitlines()
    assert "'h200-3' is unknown" in line and "h200-N" in line


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the wheel libtpu"
)
def test_a_first_call_for_a_tpu_has_the_kernels_of_a_tpu(capsys):
    import first_call

    place = targets.find("v5e-4").one_device()
    with jax.set_mesh(place.mesh):
        graded, arrays = first_call.gradient("decay", place)
        program = graded.lower(*arrays).as_text()
    assert "tpu_custom_call" in program
    first_call.main(["--target", "v5e-4", "--lines", "--only", "decay"])
    machine, counted = capsys.readouterr().out.splitlines()
    assert machine.endswith(", v5e-4")
    assert counted.split() == ["decay", str(program.count("\n"))]


def test_products_as_on_a_gpu_are_rounded_also_after_those_of_a_cpu():
    """The CPU's program of the same function and shapes is not taken for them."""
    from precision import as_on_a_gpu, cosine

    def rounds(attend):
        arrays = [jnp.ones((1, 5, 2, 3), jnp.bfloat16)] * 3
        return "reduce_precision" in str(jax.make_jaxpr(attend)(None, *arrays))

    assert not rounds(cosine)
    assert rounds(as_on_a_gpu(cosine))


@pytest.mark.slow
def test_packing_by_symjax_and_by_hand_gives_as_many_tokens(tmp_path):
    """symjax has two more: one before the first document of either split."""
    words = ["--megabytes", "1", "--processes", "2", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.packing", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"^(symjax|by hand) .* s, ([0-9,]+) tokens$", done.stdout, re.M)
    assert [name for name, _ in found] == ["symjax", "by hand"]
    ours, by_hand = (int(tokens.replace(",", "")) for _, tokens in found)
    assert ours == by_hand + 2 and not list(tmp_path.iterdir())


def test_crossover_lengths_of_an_earlier_call_are_not_measured_again(
    monkeypatch, tmp_path, capsys
):
    from benchmarks import crossover

    measured = []

    def compare(options, length):
        measured.append((options.model.attention.mechanism, length))
        return [("prefill", length, 9.0, length / 200, 1.0, 1.0)]

    monkeypatch.setattr(crossover, "compare_with_softmax", compare)
    words = ["--out", str(tmp_path), "--models", "linear,delta"]
    crossover.main([*words, "--lengths", "400"])
    crossover.main([*words, "--lengths", "100,400"])
    assert measured == [(x, n) for n in (400, 100) for x in ("linear", "delta")]
    assert "prefill, delta: faster from 200 tokens" in capsys.readouterr().out
    assert (tmp_path / "prefill.png").exists()
    assert len((tmp_path / "crossover.csv").read_text().splitlines()) == 5


@pytest.mark.always
def test_every_model_of_the_answers_is_a_run(tmp_path):
    """train.py takes the words of each model of each question."""
    import answers

    from symjax.layers.validate import sizes
    from symjax.programs.commandline import parse

    text, workdir = write_text(tmp_path), ["--workdir", str(tmp_path / "run")]
    for parts in answers.QUESTIONS.values():
        for task, part in parts.items():
            for model in part.models.split():
                words = answers.words_of(task, model, text, tmp_path, "7")
                assert sizes(parse([*words, *workdir]).config.model)
                named = any(x.startswith("--config.data.path=") for x in words)
                assert named == ("--config.data.source=text" in words)


@pytest.mark.parametrize(
    "words, message",
    [
        (["unknown"], "unknown is unknown"),
        (["symmetry/sets"], "symmetry/sets is unknown"),
        (["symmetry", "--seed", "0"], "--seed is unknown"),
        (["symmetry/mqar", "--models", "soft"], "model 'soft' is unknown"),
        (["symmetry/text"], "task `text` needs --text FILE"),
        (["linear/deep"], "task `deep` needs --text FILE"),
        (["symmetry/mqar", "--models", "to_t2r"], "task `text` needs --text FILE"),
    ],
)
def test_wrong_words_of_the_answers_are_refused(words, message, capsys):
    import answers

    with pytest.raises((SystemExit, ValueError)) as found:
        answers.main(words)
    assert message in capsys.readouterr().err + str(found.value)


def test_a_conversion_first_trains_the_model_that_it_starts_from(tmp_path, monkeypatch):
    import answers

    text, trained, checked = write_text(tmp_path), [], []
    monkeypatch.setattr(
        answers, "train_together", lambda runs, together: trained.append(runs)
    )
    monkeypatch.setattr(answers, "check_run", lambda run: checked.append(run.workdir))
    monkeypatch.setattr(answers.compare, "main", lambda words: None)
    words = [
        "--models",
        "to_hedgehog,to_softmax",
        "--seeds",
        "3,5",
        "--text",
        str(text),
    ]
    answers.main(["estimate/convert", *words, "--out", str(tmp_path)])
    first, second = trained
    source = tmp_path / "text" / "performer-seed5"
    assert source in first and len(first) == len(second) == 4
    assert list(map(str, checked)) == list(map(str, (*first, *second)))
    words = second[tmp_path / "convert" / "to_softmax-seed5"]
    assert f"--config.init_from={source}" in words
