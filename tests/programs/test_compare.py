"""Comparisons of configurations: equal budgets, resumable, means checked by hand."""

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import ROOT, SMALL, write_text

from symjax import config, validation
from symjax.distributed.exit_codes import run_and_exit
from symjax.evaluation.loading import load
from symjax.evaluation.measures.language import losses
from symjax.programs import compare
from symjax.programs.comparison import matched, measured, runs, tables
from symjax.programs.comparison.measured import Evaluated
from symjax.programs.comparison.tables import Fairness
from symjax.programs.comparison.tuned import Choice, split

pytestmark = pytest.mark.usefixtures("cache", "quiet")


def call(*words):
    try:
        run_and_exit(lambda: compare.main([str(word) for word in words]))
    except SystemExit as end:
        return int(end.code or 0)


def words(folder, names, **changes):
    keys = SMALL | {"data.path": write_text(folder), "checkpoint.every": 2}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    files = ",".join(f"{ROOT}/configs/{name}.py:tiny" for name in names)
    given = [f"--config.{name}={value}" for name, value in keys.items()]
    return ["--configs", files, "--out", folder / "out", *given]


def test_two_configurations_over_two_seeds_make_a_table(tmp_path, capsys):
    given = words(tmp_path, ["gpt", "diff"], model__positions="rope")
    assert call(*given, "--seeds", "0,1", "--batches", "1") == 0
    said = capsys.readouterr().out
    out = tmp_path / "out"
    table = (out / "compare.csv").read_text().splitlines()
    assert table[0].startswith(
        "configuration,seeds,parameters,held-out (nats/byte),std over seeds,"
    )
    rows = [line.split(",") for line in table[1:]]
    assert [row[:2] for row in rows] == [["gpt-tiny", "2"], ["diff-tiny", "2"]]
    found = [
        compare.evaluate(out / f"diff-tiny-seed{seed}", 1).losses["heldout"]["loss"]
        for seed in (0, 1)
    ]
    assert float(rows[1][3]) == pytest.approx(statistics.mean(found))
    assert (
        float(rows[1][4]) == pytest.approx(statistics.stdev(found))
        and found[0] != found[1]
    )
    assert f"{float(rows[1][3]):.4f}" in said
    lines = (out / "compare.md").read_text().splitlines()
    assert any(line.startswith("| gpt-tiny | 2 |") for line in lines)
    assert any(line.startswith("| diff-tiny | 0 | ") for line in lines)
    for figure in ("heldout", "differences"):
        assert (out / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    check_table_and_curves_agree(out, rows, 1)
    check_runs_that_exist(out, rows, capsys)
    before = {p: p.stat().st_mtime_ns for p in out.glob("*-seed*/**/*")}
    assert call(*given, "--seeds", "0,1", "--batches", "1") == 0
    assert {p: p.stat().st_mtime_ns for p in out.glob("*-seed*/**/*")} == before


def check_table_and_curves_agree(out, rows, batches):
    found = json.loads((out / "compare.json").read_text())["compare"]
    assert found["unit"] == "nats/byte" and found["batches"] == batches
    assert found["spread"] == "standard deviation over seeds, by n − 1"
    for row in rows:
        curve = found["curves"][row[0]]
        assert curve["step"][-1] == 6 and curve["mean"][-1] == float(row[3])
        least, largest = (x[-1] for x in curve["band"])
        assert (largest - least) / 2 == pytest.approx(float(row[4]))


def check_runs_that_exist(out, rows, capsys):
    """Compare runs that exist, by relative paths: two seeds make one row.

    If training has not evaluated on the asked batches, checkpoints give the curve.
    """
    folders = [f"{name}-tiny-seed{n}" for name in ("gpt", "diff") for n in (0, 1)]
    folders = [os.path.relpath(out / folder) for folder in folders]
    given = ["--workdirs", ",".join(folders), "--out", out / "again"]
    capsys.readouterr()
    assert call(*given, "--batches", "1") == 0
    assert "gpt-tiny: held-out loss" in capsys.readouterr().out.splitlines()[0]
    table = (out / "again" / "compare.csv").read_text().splitlines()
    assert [line.split(",") for line in table[1:]] == rows
    check_table_and_curves_agree(out / "again", rows, 1)
    assert call(*given, "--batches", "3") == 0
    table = (out / "again" / "compare.csv").read_text().splitlines()
    rows = [line.split(",") for line in table[1:]]
    check_table_and_curves_agree(out / "again", rows, 3)
    found = json.loads((out / "again" / "compare.json").read_text())["compare"]
    for name in ("gpt-tiny", "diff-tiny"):
        before = [loss_at(out / f"{name}-seed{n}", 4) for n in (0, 1)]
        assert found["curves"][name]["step"] == [4, 6]
        wanted = statistics.mean(before)
        assert found["curves"][name]["mean"][0] == pytest.approx(wanted)


def loss_at(workdir, step):
    return losses(load(workdir, step), 3)["heldout"]["loss"]


def meta(sha="a" * 64, kind="decoder", seed=0, step=1, **language):
    options = config.Config(steps=1, seed=seed, model=config.Model(kind=kind))
    return {
        "config": validation.to_dict(options),
        "data": {"sha256": sha},
        "examples": {"language": language},
        "step": step,
    }


@pytest.mark.parametrize(
    "other", [meta("b" * 64), meta(kind="encoder"), meta(kind="decoder", merges=3)]
)
def test_runs_with_other_targets_are_not_compared(other, monkeypatch):
    metas = {Path("a"): meta(), Path("b"): other}
    monkeypatch.setattr(runs, "_read_meta", metas.__getitem__)
    with pytest.raises(ValueError, match=r"a and b are judged by different targets \("):
        runs.group_runs(list(metas))


def test_runs_of_one_name_are_told_apart(monkeypatch):
    metas = {
        Path("x/gpt-seed0"): meta(),
        Path("x/gpt-seed1"): meta(seed=1),
        Path("y/gpt-seed0"): meta(kind="universal"),
        Path("z/copy"): meta(seed=1),
        Path("z/early"): meta(seed=2, step=0),
    }
    monkeypatch.setattr(runs, "_read_meta", metas.__getitem__)
    assert runs.group_runs(list(metas)) == {
        "gpt": [Path("x/gpt-seed0"), Path("x/gpt-seed1")],
        "y/gpt-seed0": [Path("y/gpt-seed0")],
        "copy": [Path("z/copy")],  # the same seed as in the first row
        "early": [Path("z/early")],
    }


def test_runs_that_begin_with_runs_of_their_seeds_are_one_row(monkeypatch):
    metas = {}
    for seed, begins in ((0, "x/soft-seed0"), (1, "x/soft-seed1"), (2, "x/soft-seed0")):
        metas[Path(f"linear-seed{seed}")] = found = meta(seed=seed)
        found["config"]["init_from"] = begins
    monkeypatch.setattr(runs, "_read_meta", metas.__getitem__)
    assert runs.group_runs(list(metas)) == {
        "linear": [Path("linear-seed0"), Path("linear-seed1")],
        "linear-seed2": [Path("linear-seed2")],  # begins with a run of another seed
    }


def test_a_run_is_compared_once(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_read_meta", lambda _: meta())
    (tmp_path / "link").symlink_to("a")
    for twice in ("a", "link"):
        paths = [tmp_path / name for name in ("a", "b", twice)]
        with pytest.raises(ValueError, match=f"--workdirs: .*{twice} is given twice"):
            runs.group_runs(paths)


def test_joined_and_separate_documents_are_not_compared():
    one = Evaluated(1, {}, [], None, [])
    with pytest.raises(ValueError, match="a joins documents and b keeps them apart"):
        measured.check_documents({"b": [one._replace(separate=True)], "a": [one]})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], f"no workdir '{Path('none').absolute()}': train.py makes one"),
        (["--seeds", "0"], "--seeds is for runs to train: --workdirs compares runs"),
        (["--vary", "steps=1"], "--vary is for runs to train"),
        (["--match", "flops"], "--match is for runs to train"),
        (["--tune", "steps=1"], "--tune is for runs to train"),
        (["--config.steps=1"], "--config.steps=1 is for runs to train"),
        (["--configs", "a"], "not allowed with argument"),
    ],
)
def test_bad_words_beside_workdirs_are_one_line(more, said, tmp_path, capsys):
    given = ["--workdirs", "none", "--out", tmp_path / "out"]
    assert call(*given, *more) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_varied_keys_make_a_configuration_of_each_pair_of_values(tmp_path):
    varied = [["model.attention.mechanism=softmax", "model.attention.mechanism=linear"]]
    varied += [["model.dropout=0.1", "model.dropout=0.25"]]
    files = [f"{ROOT}/configs/gpt.py:tiny"]
    plan = runs.parse_runs(files, varied, [], [3, 4], [], tmp_path)
    found = {name: values[""] for name, values in plan.items()}
    assert list(found) == [
        "gpt-tiny-mechanism=softmax-dropout=0.1",
        "gpt-tiny-mechanism=softmax-dropout=0.25",
        "gpt-tiny-mechanism=linear-dropout=0.1",
        "gpt-tiny-mechanism=linear-dropout=0.25",
    ]
    last = found["gpt-tiny-mechanism=linear-dropout=0.25"][1]
    chosen = last.config
    assert (chosen.model.attention.mechanism, chosen.model.dropout) == ("linear", 0.25)
    assert chosen.seed == 4
    assert last.workdir == tmp_path / "gpt-tiny-mechanism=linear-dropout=0.25-seed4"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__width": 16}, "another configuration (model.width: 32 → 16)"),
        ({"steps": 2}, "holds a run of 1 steps, not 2"),
    ],
)
def test_runs_of_other_options_are_not_taken_for_these(
    changes, said, tmp_path, capsys, monkeypatch
):
    given = words(tmp_path, ["gpt"], steps=1)
    monkeypatch.setattr(compare, "evaluate", lambda *_, **__: run(1.0, 1.0, 0))
    assert call(*given) == 0
    before = (tmp_path / "out" / "compare.csv").read_bytes()
    assert call(*words(tmp_path, ["gpt"], **{"steps": 1} | changes)) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "out" / "compare.csv").read_bytes() == before


def test_a_seed_given_twice_is_one_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "train_missing", lambda _: None)
    monkeypatch.setattr(compare, "evaluate", lambda *_, **__: run(1.0, 1.0, 0))
    assert call(*words(tmp_path, ["gpt"]), "--seeds", "1, 01,2") == 0
    [_, row] = (tmp_path / "out" / "compare.csv").read_text().splitlines()
    assert row.startswith("gpt-tiny,2,")


def test_without_matplotlib_nothing_is_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(*words(tmp_path, ["gpt"])) == 2
    assert "figures need matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def run(loss, train, lam):
    row = {"layer": 0, "lambda_1": lam, "lambda_2": 1.0, "lambda_initial": 0.2}
    row["lambda"] = lam - 0.8
    parts = {"heldout": {"loss": loss}, "train": {"loss": train, "loss_eval_mode": 0.5}}
    return Evaluated(7, parts, [row] if lam else [], 100.0, [(5, loss + 1), (9, loss)])


def compared(evaluated, **conditions):
    return tables.compare(evaluated, Fairness("a", **conditions))


def test_means_and_spread_are_those_of_the_seeds():
    two = run(3.0, 6.0, 0)._replace(seed=1)
    found = compared({"a": [run(1.0, 2.0, 0), two], "b": [run(2.0, 1.0, 1.5)]})
    table, differences, lambdas = found.tables
    assert table.rows[0] == ("a", 2, 7, 2.0, 2.0**0.5, 4.0, 0.5, 100)
    assert table.rows[1] == ("b", 1, 7, 2.0, None, 1.0, 0.5, 100)
    assert lambdas.rows == [("b", 0, 1.5, 1.0, 0.2, pytest.approx(0.7))]
    assert differences.rows == [("b", "held-out (nats/token)", 1.0, None, None, 1)]
    assert found.figures[0].series["a"] == ([5.0, 9.0], [3.0, 2.0])


def test_table_figure_and_json_name_the_batches_the_unit_and_the_spread():
    some = {"batches": 10, "all_batches": 267, "unit": "byte"}
    seeds = [run(x, 2.0, 0)._replace(**some) for x in (1.0, 3.0)]
    found = compared({"a": seeds, "b": seeds[:1]})
    assert "held-out losses on 10 of 267 held-out batches" in found.text[0]
    assert "standard deviation over seeds, by n − 1" in found.text[1]
    assert found.tables[0].columns[3:5] == ["held-out (nats/byte)", "std over seeds"]
    figure, dots = found.figures
    assert dots.x_label == "held-out loss − that of a, nats/byte"
    assert dots.rows == {"b": ((-2.0,), -2.0, None, None)}
    assert figure.y_label == "nats/byte, on 10 of 267 held-out batches"
    assert "band of one standard deviation" in figure.title
    root = 2.0**0.5
    assert figure.bands == {"a": ([3 - root, 2 - root], [3 + root, 2 + root])}
    values = found.values["compare"]
    assert values["spread"].startswith("standard deviation") and values["batches"] == 10


def test_parts_of_what_is_held_out_are_compared_where_they_are_the_same():
    one = run(1.0, 2.0, 0)._replace(batches=10, all_batches=20)
    other = one._replace(all_batches=40)
    with pytest.raises(ValueError, match="a is evaluated on 10 of 20 .* b on 10 of 40"):
        measured.check_batches({"a": [one], "b": [other]})
    whole = {"a": [one._replace(batches=20)], "b": [other._replace(batches=40)]}
    measured.check_batches(whole)
    assert "all held-out batches" in compared(whole).figures[0].y_label


@pytest.mark.parametrize(
    ("given", "more", "wanted", "trained"),
    [
        (None, [], None, 0),
        (7, [], 7, 7),
        (7, ["--config.evaluate.batches=3"], 7, 7),
        (None, ["--config.evaluate.batches", "3"], 3, 3),
        (None, ["--config.evaluate.batches=0"], None, 0),
    ],
)
def test_runs_evaluate_on_the_batches_of_the_table(given, more, wanted, trained):
    chosen = argparse.Namespace(batches=given)
    found = runs.agree_on_batches(chosen, more)
    assert found == [f"--config.evaluate.batches={trained}"]
    assert chosen.batches == wanted


def test_runs_of_other_lengths_without_their_lines_are_compared():
    short = run(1.0, 2.0, 0)._replace(speed=None, curve=[], tokens=10)
    long = run(3.0, 4.0, 0)._replace(tokens=20)
    found = compared({"a": [short], "b": [long]})
    table, *_ = found.tables
    assert table.columns[-2:] == ["tokens/s", "tokens"]
    assert [row[-2:] for row in table.rows] == [(None, 10), (100, 20)]
    assert found.figures[0].series["a"] == ([], [])


def test_the_accuracy_of_what_is_asked_is_a_column_of_its_own():
    seeds = [run(1.0, 2.0, 0), run(3.0, 6.0, 0)]
    for one, accuracy in zip(seeds, (0.25, 0.75), strict=True):
        one.losses["heldout"]["accuracy"] = accuracy
    table, *_ = compared({"a": seeds}).tables
    assert table.columns[-2:] == ["tokens/s", "accuracy"]
    assert table.rows[0][-1] == 0.5


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seeds", "x"], "--seeds must be ints with commas, got 'x'"),
        (["--seeds", ","], "--seeds is empty"),
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--config.wibble=1"], "config.wibble is unknown"),
        (["wibble"], "stray argument 'wibble'"),
        (["--vary", "steps"], "--vary must be KEY=VALUE,VALUE, got 'steps'"),
        (["--vary", "steps="], "--vary steps is empty"),
        (["--vary", "stepz=3"], "config.stepz is unknown"),
        (["--vary", "seed=1,2"], "seeds are given by --seeds"),
        (["--config.seed=1"], "seeds are given by --seeds"),
        (
            ["--vary", "model.width=8", "--vary", "model.width=16"],
            "config.model.width is given twice",
        ),
        (["--workdir", "elsewhere"], "--workdir is unknown"),
        (["--dry_run"], "--dry_run is unknown"),
        (["--tasks", "loss,wibble"], "--tasks 'wibble' is unknown: choose from all,"),
        (["--baseline", "sym"], "--baseline 'sym' is unknown: choose from gpt-tiny"),
        (["--match", "size"], "argument --match: invalid choice: 'size'"),
        (["--tune", "optimizer.eps"], "--tune must be KEY=VALUE,VALUE, got 'opti"),
        (["--tune", "steps=3", "--vary", "steps=3"], "config.steps is given twice"),
        (["--tune", "batch_size=2,4"], "gpt-tiny with batch_size=2 and gpt-tiny with"),
        (
            ["--match", "flops", "--vary", "model.feedforward=8,16"],
            "--match sets model.feedforward: leave it out of --vary and --tune",
        ),
        (["--configs", "configs/none.py"], "no configuration file"),
    ],
)
def test_bad_words_are_one_line(more, said, tmp_path, capsys):
    assert call(*words(tmp_path, ["gpt"]), *more) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"steps": 7},
            r"a and b differ in steps · batch_size · model.length \(9600 and",
        ),
        ({"data": config.Data(tokenizer="char")}, "a and b differ in data"),
    ],
)
def test_other_budgets_are_not_compared(changes, words):
    one = config.Config(steps=1)
    with pytest.raises(ValueError, match=words):
        runs.check_equal({"a": one, "b": replace(one, **changes)})
    runs.check_equal({"a": one, "b": replace(one, seed=5)})


def test_rows_that_are_divided_have_one_length():
    one, other = (
        config.Config(steps=96 // n, model=config.Model(length=n)) for n in (32, 48)
    )
    runs.check_equal({"a": one, "b": other})
    with pytest.raises(ValueError, match="a and b differ in model.length, by which"):
        runs.check_equal({"a": one, "b": other}, tuned=True)


def test_differences_are_paired_by_seed_with_an_interval():
    losses = {"a": (1.0, 2.0, 4.0), "b": (1.5, 2.25, 4.75), "c": (0.0, 1.0)}
    evaluated = {
        name: [run(x, 1.0, 0)._replace(seed=n) for n, x in enumerate(seeds)]
        for name, seeds in losses.items()
    }
    found = compared(evaluated)
    table = found.tables[1]
    assert table.name == "differences" and [x[0] for x in table.rows] == ["b", "c"]
    half = 4.302652729749462 * 0.25 / 3**0.5  # t of two degrees of freedom, std 0.25
    wanted = ("held-out (nats/token)", 0.5, 0.5 - half, 0.5 + half, 3)
    assert table.rows[0][1] == wanted[0]
    assert table.rows[0][2:] == pytest.approx(wanted[1:])
    assert table.rows[1][2:] == (-1.0, -1.0, -1.0, 2)
    assert "configuration − a, paired by seed" in found.text[3]
    values = found.values["compare"]
    assert values["baseline"] == "a" and values["interval"].startswith("95 %")
    assert [tuple(x.values()) for x in values["differences"]] == table.rows


def test_tasks_are_columns_and_those_that_do_not_apply_are_dashes():
    a, b = (
        [
            run(1.0, 1.0, 0)._replace(seed=n, headlines={"slope": x}, remarks=remarks)
            for n, x in enumerate(slopes)
        ]
        for slopes, remarks in (((0.5, 0.75), ("λ: none",)), ((1.0, 1.25), ()))
    )
    b = [one._replace(headlines=one.headlines | {"λ": 0.25}) for one in b]
    found = compared({"a": a, "b": b})
    _, differences, table = found.tables
    assert table.columns == ["configuration", "slope", "± slope", "λ", "± λ"]
    spread = 0.25 / 2**0.5
    assert table.rows[0] == ["a", 0.625, pytest.approx(spread), None, None]
    assert table.rows[1] == ["b", 1.125, pytest.approx(spread), 0.25, 0.0]
    assert [row[1:3] for row in differences.rows][1:] == [("slope", 0.5)]
    assert found.text[-1] == "a: λ: none"


def test_the_output_says_what_was_matched_and_tuned():
    match = matched.Match("b", 128, 136, "parameters", 1010.0, 1000.0)
    choices = [Choice(x, "rate=2", {"rate=1": 3.0, "rate=2": 2.0}) for x in "ab"]
    one = run(1.0, 1.0, 0)._replace(batches=3, all_batches=3)
    found = compared({"a": [one], "b": [one]}, matches=[match], choices=choices)
    said = "\n".join(found.text)
    assert "b: model.feedforward 128 → 136, 1,010 parameters, +1.00% from the" in said
    assert "tuned: a: rate=2 (the largest tried); losses: rate=1 3.0000" in said
    assert "on all 3 held-out batches of the rows not used to tune" in found.text[0]
    assert found.tables[0].columns[-1] == "tuned"
    assert [row[-1] for row in found.tables[0].rows] == ["rate=2", "rate=2"]
    assert found.values["compare"]["matched"][0]["feedforward"] == 136
    assert found.values["compare"]["tuned"][1]["losses"] == {"rate=1": 3, "rate=2": 2}


def test_each_run_is_measured_and_printed_before_the_next_is_trained(
    tmp_path, capsys, monkeypatch
):
    order = []

    def train(command):
        order.append(capsys.readouterr().out)

    def evaluate(workdir, *_, part):
        assert not part
        return run(2.0 if "diff" in workdir.name else 1.0, 1.0, 0)

    monkeypatch.setattr(compare, "train_missing", train)
    monkeypatch.setattr(compare, "evaluate", evaluate)
    assert call(*words(tmp_path, ["gpt", "diff"]), "--seeds", "0,1") == 0
    assert order == [
        "",
        "gpt-tiny: held-out loss 1.0000 nats/token, 1 of 2 seeds\n",
        "diff-tiny: held-out loss 2.0000 nats/token, 1 of 2 seeds\n",
        "gpt-tiny: held-out loss 1.0000 ± 0.0000 nats/token, 2 of 2 seeds\n",
    ]


@pytest.mark.slow
def test_a_comparison_is_matched_tuned_and_measured_by_tasks(tmp_path, capsys):
    given = words(tmp_path, ["gpt", "diff"], model__positions="rope", steps=2)
    given += ["--match", "flops", "--tune", "optimizer.learning_rate=1e-9,4e-3"]
    given += ["--tasks", "lambda,entropy,maps", "--seeds", "0,1"]
    assert call(*given) == 0
    said, out = capsys.readouterr().out, tmp_path / "out"
    assert "--match: diff-tiny: model.feedforward 128 → " in said
    assert "--tune: gpt-tiny: learning_rate=4e-3 (the largest tried)" in said
    folders = {x.name for x in out.glob("*-seed*")}
    assert len(folders) == 6 and "gpt-tiny-learning_rate=1e-9-seed1" not in folders
    found = json.loads((out / "compare.json").read_text())["compare"]
    a, b = found["tasks"]
    assert a["λ"] == {"mean": None, "std": None} and b["λ"]["mean"] > 0
    for number in (0, 1):
        folder = out / "tasks" / f"diff-tiny-seed{number}"
        assert (folder / "entropy.csv").exists() and (folder / "map_0.png").exists()
        assert "lambda" in json.loads((folder / "tasks.json").read_text())
    judged = []
    for number in (0, 1):
        one = load(out / f"gpt-tiny-learning_rate=4e-3-seed{number}")
        one = one._replace(examples=split(one.examples, 32).judging)
        judged.append(losses(one, 2)["heldout"]["loss"])
    row = found["configurations"][0]
    assert row["held-out (nats/byte)"] == pytest.approx(statistics.mean(judged))
    before = {p: p.stat().st_mtime_ns for p in out.glob("*-seed*/**/*")}
    assert call(*given) == 0
    assert {p: p.stat().st_mtime_ns for p in out.glob("*-seed*/**/*")} == before
