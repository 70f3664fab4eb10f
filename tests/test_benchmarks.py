"""What measures devices runs where there is none, and finds what is wrong."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from runs import ROOT, write_text

from symjax import attention

PARTS = ("machine", "correctness", "attention", "steps", "decode", "study")


@pytest.fixture
def device(monkeypatch):
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    import device

    return device


@pytest.fixture
def compiled(device):
    import compiled

    return compiled


def test_wrong_numbers_are_faults(device):
    """An output, a gradient, and what is not a number."""
    from device_correctness import Case, errors

    def attend(factor, shift=0.0):
        return lambda query, value: attention.symmetric(factor * query, value) + shift

    shapes, exact = ((2, 9, 2, 8), (2, 9, 2, 4)), attend(1)
    for wrong in (attend(1.1), attend(1, 0.1), attend(float("nan"))):
        rows = errors(Case(wrong, shapes, exact))
        assert all("fault" in row for row in rows.values()), rows
    rows = errors(Case(exact, shapes))
    assert not any("fault" in row for row in rows.values()), rows
    assert rows["float32"]["gradient"] < 1e-6 < rows["bfloat16"]["gradient"]


@pytest.mark.parametrize(
    ("part", "only", "figure"),
    (
        ("machine", "", "tflops"),
        ("correctness", "retention", "gradient"),
        ("attention", "cosine", "ms"),
        ("steps", "diff_sym", "tokens_per_second"),
        ("decode", "decay", "tokens_per_second"),
        ("study", "diff_sym", "held-out"),
    ),
)
def test_every_part_measures_on_a_cpu(part, only, figure, device, tmp_path):
    file = tmp_path / "rows"
    given = ["--small", "--part", part, "--only", only, "--json", str(file)]
    out = tmp_path / "study"
    given += ["--text", str(write_text(tmp_path)), "--out", str(out)]
    assert device.main(given) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(row["part"] == part for row in rows)
    found = [row[figure] for row in rows if figure in row]
    assert found and all(x > 0 for x in found), rows
    if part == "attention":  # what is not here is said
        assert any("missing" in row for row in rows)
    if part == "study":  # trained once
        (metrics,) = out.glob("*/metrics.jsonl")
        before = metrics.stat().st_mtime_ns
        assert device.main(given) == 0 and metrics.stat().st_mtime_ns == before


def test_the_study_is_of_four_columns_and_two_depths(device, monkeypatch, tmp_path):
    runs = {}
    monkeypatch.setattr(device.compare, "train", runs.update)
    words = ["--text", str(write_text(tmp_path)), "--out", str(tmp_path)]
    assert device.main(["--part", "study", *words]) == 1  # no run to evaluate
    columns = ("gpt", "sym", "diff", "diff_sym")
    assert list(runs) == [f"{x}-{depth}l" for depth in (6, 8) for x in columns]
    for name, (run,) in runs.items():
        assert run.config.steps == 30_000 and run.config.model.depth == int(name[-2])


@pytest.mark.parametrize("part", (None, *PARTS))
def test_a_name_that_does_not_exist_is_no_success(part, device, monkeypatch, capsys):
    def run(command):
        return SimpleNamespace(returncode=device.main(command[2:]))

    monkeypatch.setattr(device.subprocess, "run", run)
    given = ["--small", "--only", "sofmax"] + (["--part", part] if part else [])
    assert device.main(given) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [x.partition(":")[0] for x in lines] == ([part] if part else list(PARTS))
    assert all(": no name contains 'sofmax': choose from " in x for x in lines)


@pytest.mark.parametrize(("code", "wanted"), ((0, 0), (1, 1), (-11, 139), (2, 2)))
def test_parts_with_nothing_to_run_hide_no_other(code, wanted, device, monkeypatch):
    def run(command):
        return SimpleNamespace(returncode=code if command[-1] == "steps" else 2)

    monkeypatch.setattr(device.subprocess, "run", run)
    assert device.main([]) == wanted


def test_the_study_needs_a_text(device, capsys):
    assert device.main(["--small", "--part", "study"]) == 2
    assert "--text FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        device.main(["--text", "nowhere.txt"])
    assert "nowhere.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, named",
    [
        ("--lengths 0", "no positive number"),
        ("--lengths 16 1.5", "'1.5' is no positive number"),
        ("--json {folder}", "is a folder"),
        ("--json {folder}/none/rows", "no folder"),
        ("--seeds abc", "--seeds must be ints with commas, got 'abc'"),
    ],
)
def test_wrong_arguments_are_one_line(device, words, named, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        device.main(words.format(folder=tmp_path).split())
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_the_table_of_the_document_has_names_of_the_command(device):
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| names of `correctness` |")
    rows = re.findall(r"^\| (.*?) \|", table.partition("\n\n")[0], re.M)
    names, known = re.findall("`(.*?)`", " ".join(rows)), device.cases(70)
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
def test_the_peak_is_that_of_the_chip(kind, flops, device, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert device.peak() == flops


def test_a_long_name_stands_apart_from_its_figures(device, monkeypatch, capsys):
    name = "x" * 70
    monkeypatch.setitem(device.PARTS, "steps", lambda *_: [{"name": name, "ms": 1.0}])
    assert device.main(["--part", "steps"]) == 0
    assert f"{name}  ms 1\n" in capsys.readouterr().out


def test_a_row_that_cannot_run_loses_no_other(device, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(device, "step_speed", broken)
    assert device.main(["--small", "--part", "steps"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("fault RuntimeError: out of memory" in line for line in lines) == 10


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
    assert "(1.00 of " in told and "compared with" not in told
    other = {"made by": {"target": "v6e-4", "jax": "0"}}
    file.write_text(json.dumps(other))
    assert compiled.main([*given, "--against", str(file)]) == 0
    told = capsys.readouterr().out
    assert "v6e-4" in told and "gpt:tiny (not in what" in told


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


@pytest.mark.slow
def test_packing_by_symjax_and_by_hand_gives_as_many_tokens(tmp_path):
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
    assert found[0][1] == found[1][1] and not list(tmp_path.iterdir())
