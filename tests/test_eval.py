"""eval.py computes all numbers of a checkpoint from the workdir alone."""

import errno
import json
import math
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from runs import TEXT, call, packed, train, write_text

from symjax import storage
from symjax.evaluation import results, tasks
from symjax.evaluation.loading import load
from symjax.evaluation.report import to_json
from symjax.evaluation.results import Result
from symjax.evaluation.tasks import TASKS, parse_names

pytestmark = pytest.mark.usefixtures("cache", "quiet")


@pytest.fixture(scope="module")
def original(tmp_path_factory, cache):
    place = tmp_path_factory.mktemp("eval")
    text = write_text(place)
    keys = {"steps": 4, "checkpoint__every": 2, "model__positions": "learned"}
    assert train(text, place / "run", **keys) == 0
    text.unlink()  # the source is not needed any more
    return place / "run"


@pytest.fixture
def workdir(original, tmp_path, monkeypatch):
    """Return a copy of the run, with a packed text of its own."""
    shutil.copytree(original, tmp_path / "run")
    place = packed(original)
    shutil.copytree(place, tmp_path / "symjax" / "data" / place.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "run"


def test_long_work_is_said_on_stderr(original, capsys, monkeypatch):
    monkeypatch.setattr(results, "QUIET", 0.0)
    assert judge(original, "--tasks", "loss") == 0
    said = capsys.readouterr()
    assert said.err == "loss: compiling and measuring\n"
    assert "compiling" not in said.out


def judge(workdir, *more):
    return call("eval", ["--workdir", str(workdir), "--batches", "2", *more])


def test_every_number_is_printed(original, capsys):
    assert judge(original, "--tokens", "9") == 0
    said = capsys.readouterr()
    assert said.err == ""
    for words in (
        "step 4, ",
        "held-out loss  ",
        "held-out perplexity  ",
        "held-out bits per byte  ",
        "unigram table  ",
        "bigram table  ",
        "trigram table  ",
        "training text, training mode  ",
        "training text, evaluation mode  ",
        "layer      λ₁      λ₂  λ_init       λ",
    ):
        assert words in said.out
    prompt = TEXT[len(TEXT) * 9 // 10 :][:16]
    assert f"prompt {prompt!r}, sample:\n{prompt}" in said.out


def test_the_json_is_the_same_bytes_each_time(original, tmp_path, capsys):
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    for path in paths:
        assert judge(original, "--json", str(path), "--seed", str(len(path.name))) == 0
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    found = json.loads(first)
    assert found["step"] == 4
    assert found["heldout"].keys() > {"loss", "perplexity", "bits_per_byte", "ngrams"}
    assert found["train"].keys() == {"loss", "loss_eval_mode"}
    assert [row["layer"] for row in found["lambda"]] == [0]
    assert str(tmp_path) not in first.decode() and str(original) not in first.decode()
    assert f"{found['heldout']['loss']:.4f}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]


def test_tables_figures_and_a_page_are_written(original, tmp_path, capsys):
    out, page = tmp_path / "out", tmp_path / "page.html"
    words = ["--tasks", "lambda", "--out", str(out), "--report", str(page)]
    assert judge(original, *words) == 0
    rows = (out / "lambda.csv").read_text().splitlines()
    assert rows[0] == "layer,λ₁,λ₂,λ_init,λ" and len(rows) == 2
    text = page.read_text()
    assert text.index("<h2>configuration") < text.index("<h2>data") < 5000
    for cells in (
        ("model.attention.differential", "v1", "none"),
        ("model.width", "32", "256"),
        ("source", "text"),
        ("vocabulary", "256"),
    ):
        assert "".join(f"<td>{x}</td>" for x in cells) in text
    value = f"{float(rows[1].split(',')[4]):.4f}"
    assert f"<td>{value}</td>" in text and value in capsys.readouterr().out
    assert not re.search(r"(src|href)=.?http", text)
    before = page.read_bytes()
    assert judge(original, *words) == 0 and page.read_bytes() == before


def test_without_matplotlib_nothing_is_half_written(
    original, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for flag in ("--out", "--report"):
        assert judge(original, "--tasks", "lambda", flag, str(tmp_path / "new")) == 2
        said = capsys.readouterr()
        assert "figures need matplotlib" in said.err and not said.out
    assert not (tmp_path / "new").exists()


def test_json_has_no_numbers_that_are_not_finite():
    found = Result({"a": [math.inf, {"b": math.nan}, 1.5, 2]}, [])
    assert json.loads(to_json({}, {"x": found})) == {"a": [None, {"b": None}, 1.5, 2]}


def test_tasks_with_nothing_to_show_stand_line_by_line(original, tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ["--tasks", "mqar,copy,lambda,listops", "--report", str(page)]
    assert judge(original, *words) == 0
    first, second, empty, *rest = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("mqar: none") and second.startswith("copy: none")
    assert empty == "" and rest[-2] == "" and rest[-1].startswith("listops: none")
    last = page.read_text().rindex("<pre>")
    assert page.read_text()[last:].startswith(f"<pre>{first}\n{second}\nlistops:")


def test_the_tasks_are_listed(capsys):
    assert call("eval", ["--list"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == list(TASKS)


def test_a_step_is_chosen(original, tmp_path, capsys):
    losses = []
    for step in ("2", "4"):
        path = tmp_path / step
        assert judge(original, "--step", step, "--json", str(path)) == 0
        found = json.loads(path.read_text())
        assert found["step"] == int(step)
        losses.append(found["heldout"]["loss"])
    assert losses[0] != losses[1]


def test_a_prompt_is_continued(original, capsys):
    assert judge(original, "--prompt", "7 sheep", "--tokens", "5") == 0
    assert "\nprompt '7 sheep', sample:\n7 sheep" in capsys.readouterr().out


def test_every_number_stands_behind_its_name(original, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert judge(original, "--json", str(path)) == 0
    said = capsys.readouterr().out
    found = json.loads(path.read_text())
    for name, value in (
        ("held-out loss", found["heldout"]["loss"]),
        ("held-out bits per byte", found["heldout"]["bits_per_byte"]),
        ("training text, training mode", found["train"]["loss"]),
        ("training text, evaluation mode", found["train"]["loss_eval_mode"]),
        ("trigram table", found["heldout"]["ngrams"]["trigram"]),
    ):
        line = next(x for x in said.splitlines() if x.strip().startswith(name))
        assert f"{value:.4f}" in line


def test_a_part_of_the_text_gets_no_verdict(original, capsys):
    assert judge(original, "--batches", "1") == 0
    said = capsys.readouterr().out
    assert "on 1 of " in said
    assert "beaten" not in said


def test_nothing_in_the_workdir_is_touched(workdir):
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    assert judge(workdir) == 0
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--step", "3"], "no checkpoint 3 in"),
        (["--step", "3"], "only 2, 4"),
        (["--step", "x"], "--step"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "7", "--tasks", "loss"], "--tasks loss leaves out"),
        (["--prompt", "", "--tasks", "maps"], "--prompt is empty"),
        (["--prompt", "x" * 40], "fills the model's 32 learned positions"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--temperature", "nan"], "--temperature must be 0 or more, got nan"),
        (["--temperature", "-1"], "--temperature must be 0 or more, got -1"),
        (["--lengths", "512,x"], "--lengths must be from 1 to 1048576, got 'x'"),
        (["--lengths", ","], "--lengths must be from 1 to 1048576, got ','"),
        (["--lengths", "64", "--tasks", "loss"], "--lengths is for the task speed"),
        (["--window", "0"], "--window must be at least 1, got 0"),
        (["--window", "64", "--tasks", "loss"], "--window is for noise, self_share"),
        (["--rope_scaling", "ntk"], "--rope_scaling 'ntk' is unknown: choose from lin"),
        (["--rope_scaling", ","], "--rope_scaling ',' is unknown: choose from lin"),
        (
            ["--rope_scaling", "yarn", "--tasks", "loss"],
            "--rope_scaling is for the task length, which --tasks loss leaves out",
        ),
        (["--seed", "-1"], "--seed must be in"),
        (["--seed", "99999999999999999999"], "--seed must be in"),
        (["--json", "/wibble/x.json"], "no folder /wibble"),
        (["--json", "."], "is a folder"),
        (["--report", "."], "is a folder"),
        (["--json", "/dev/null"], "is a device or a pipe: name a file"),
        (["--out", "/dev/null/x"], "--out /dev/null/x cannot be written"),
        (["--tasks", "loss,lamda"], "'lamda' is unknown: choose from all, loss, "),
        (["--tasks", ","], "is unknown: choose from all"),
        (["wibble"], "wibble"),
        (["--wibble"], "--wibble"),
    ],
    ids=str,
)
def test_a_bad_argument_is_one_line(more, said, original, capsys):
    assert judge(original, *more) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--json", "--report", "--out"])
def test_a_folder_without_room_for_files_is_named_before_the_long_work(
    flag, original, tmp_path, capsys, monkeypatch
):
    def refused(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refused)
    path = tmp_path / "x"
    assert judge(original, flag, str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    said = f"{flag} {path} cannot be written: Permission denied\n"
    assert captured.err.endswith(said)


def test_all_among_other_tasks_is_all_of_them():
    assert parse_names("loss,all") == parse_names("all") == tuple(TASKS)
    assert parse_names(" rank, loss ,rank") == ("rank", "loss")


def remove_data(workdir):
    shutil.rmtree(workdir / "data")


def spoil_data(workdir):
    path = packed(workdir) / "heldout.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def clear_cache(workdir):
    shutil.rmtree(packed(workdir))


def spoil_manifest(workdir):
    (workdir / "data" / "corpus.json").write_text("{")


def spoil_checkpoints(workdir):
    for path in workdir.glob("checkpoints/*/params/**/d/*"):
        path.write_bytes(b"\0" * path.stat().st_size)


def remove_checkpoints(workdir):
    shutil.rmtree(workdir / "checkpoints")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, "no workdir"),
        (remove_checkpoints, "no checkpoint in"),
        (remove_data, "has no corpus.json"),
        (clear_cache, "and cannot be packed again: data.path"),
        (spoil_data, "is damaged (its sha256 has changed)"),
        (spoil_manifest, "is damaged (not the JSON of a corpus)"),
        (spoil_checkpoints, "no checkpoint is whole"),
    ],
)
def test_a_workdir_that_is_not_whole_is_one_line(spoil, said, workdir, capsys):
    spoil(workdir)
    left = sorted(workdir.rglob("*"))
    assert judge(workdir) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err and captured.err.count("\n") == 1
    assert sorted(workdir.rglob("*")) == left


def test_without_a_workdir_the_word_is_asked_for(capsys):
    assert call("eval", []) == 2
    assert "--workdir" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    assert call("eval", ["--help"]) == 0
    said = capsys.readouterr().out
    for option in ("workdir", "step", "json", "batches", "prompt", "tokens", "seed"):
        assert f"--{option}" in said


def test_what_was_measured_is_written_if_a_later_task_is_interrupted(
    original, tmp_path, monkeypatch, capsys
):
    path, measure = tmp_path / "found.json", tasks.measure

    def interrupted(name, *more):
        if name == "noise":
            raise KeyboardInterrupt
        return measure(name, *more)

    monkeypatch.setattr(tasks, "measure", interrupted)
    assert judge(original, "--tasks", "lambda,noise", "--json", str(path)) != 0
    assert json.loads(path.read_text()).keys() >= {"step", "lambda"}
    capsys.readouterr()


def test_the_mean_of_the_weights_is_judged_where_a_run_kept_it(
    original, tmp_path, capsys
):
    text = write_text(tmp_path)
    keys = {"steps": 1, "optimizer__ema": 0.25, "optimizer__warmup": 0}
    keys |= {"optimizer__schedule": "constant_schedule"}
    assert train(text, tmp_path / "run", **keys) == 0
    first = load(tmp_path / "run")
    assert train(text, tmp_path / "run", **keys | {"steps": 2}) == 0
    run, mean = (load(tmp_path / "run", ema=ema) for ema in (False, True))
    assert (first.step, run.step) == (1, 2)
    moved = 0.0
    for one, start, end in zip(  # the weights after both steps
        *map(jax.tree.leaves, (mean.params, first.params, run.params)), strict=True
    ):
        np.testing.assert_allclose(one, 0.2 * start + 0.8 * end, atol=1e-7)
        moved = max(moved, abs(np.asarray(end - start)).max())
    assert moved > 1e-6
    assert judge(tmp_path / "run", "--tasks", "lambda", "--ema") == 0
    assert judge(original, "--tasks", "lambda", "--ema") == 2
    assert "it was trained with optimizer.ema 0" in capsys.readouterr().err
