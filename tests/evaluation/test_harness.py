"""lm_eval on a model of ours, offline: its scores are our own losses."""

import json
import math

import numpy as np
import pytest
from runs import TEXT, compile_cache, train, write_text

import symjax
from symjax.evaluation import harness
from symjax.evaluation.harness_model import HarnessModel
from symjax.training.exit_codes import run_and_exit

TASKS = {
    "crows": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "story": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{story}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
    "next": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{written}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 9},
        "metric_list": [{"metric": "exact_match"}],
    },
}
QUESTIONS = [TEXT[40 * i : 40 * i + 7 + 18 * i] for i in range(3)]
CHOICES = ["sheep", "goats, 2 crows", "fox."]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run, its model, and a folder of tasks with their data."""
    place = tmp_path_factory.mktemp("harness")
    with compile_cache(tmp_path_factory.getbasetemp() / "jax"):
        assert train(write_text(place), place / "run", steps=20) == 0
        loaded = symjax.load(place / "run")
        rows = [
            {
                "question": question,
                "choices": CHOICES,
                "answer": i % 3,
                "story": TEXT[50 * i : 50 * i + 100],
                "written": loaded.generate(question, 9, temperature=0, stop=["e"]),
            }
            for i, question in enumerate(QUESTIONS)
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (place / "tasks").mkdir()
        (place / "tasks" / "rows.jsonl").write_text(lines)
        for name, task in TASKS.items():
            files = {"test": str(place / "tasks" / "rows.jsonl")}
            task = {
                "task": name,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": files},
                "test_split": "test",
                "target_delimiter": "",
                **task,
            }
            (place / "tasks" / f"{name}.yaml").write_text(json.dumps(task))
        yield place, loaded, rows


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as end:
        run_and_exit(lambda: harness.main([str(x) for x in arguments]))
    return int(end.value.code or 0)


def loss_after(loaded, context, text):
    """Σ −log p of a text after a context, from the logits."""
    ids = loaded.encode(context + text)
    logits = np.asarray(loaded.logits(ids[:-1]), np.float64)
    chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    count = len(loaded.encode(text))
    return -chances[np.arange(len(ids) - 1), ids[1:]][-count:].sum()


def request(*pair):
    return type("Request", (), {"args": pair})


@pytest.mark.always
def test_scores_are_our_own_losses(model, tmp_path, capsys):
    place, loaded, rows = model
    words = ["--workdir", place / "run", "--include", place / "tasks"]
    words += ["--tasks", "crows,story,next", "--json", tmp_path / "found.json"]
    assert call(*words) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["step"] == 20
    right = [
        np.argmin([loss_after(loaded, row["question"], x) for x in CHOICES])
        == row["answer"]
        for row in rows
    ]
    assert found["harness"]["crows"]["acc,none"] == pytest.approx(np.mean(right))
    first = loaded.encode("\0")
    losses = [loaded.losses(np.append(first, loaded.encode(x["story"]))) for x in rows]
    size = sum(len(row["story"].encode()) for row in rows)
    wanted = np.concatenate(losses).astype(np.float64).sum() / size
    story = found["harness"]["story"]
    assert story["bits_per_byte,none"] == pytest.approx(wanted / math.log(2), abs=1e-6)
    assert story["byte_perplexity,none"] == pytest.approx(math.exp(wanted), rel=1e-6)
    assert found["harness"]["next"]["exact_match,none"] == 1


def test_a_continuation_is_judged_after_its_context(model):
    _, loaded, _ = model
    long = "9 " * 40 + "9"
    asked = [("7 sheep", ", 49 goats"), ("", "8"), (long, " crows"), ("1", "23")]
    answers = HarnessModel(loaded).loglikelihood(
        [request(*pair) for pair in asked], disable_tqdm=True
    )
    for (context, text), (total, _) in zip(asked, answers, strict=True):
        context = (context or "\0")[-(33 - len(text)) :]
        wanted = loss_after(loaded, context, text)
        assert total == pytest.approx(-wanted, rel=1e-5)
    greedy = loaded.generate("7 sheep", 4, temperature=0)
    requests = [request("7 sheep", text) for text in (greedy, greedy[:3] + "\0")]
    found = HarnessModel(loaded).loglikelihood(requests, disable_tqdm=True)
    assert [likeliest for _, likeliest in found] == [True, False]


def test_a_continuation_beyond_the_length_is_read_in_windows(model):
    _, loaded, _ = model
    context, text = "7 sheep", TEXT[:80]
    ((total, greedy),) = HarnessModel(loaded).loglikelihood(
        [request(context, text)], disable_tqdm=True
    )
    wanted = 0.0
    for end in (32, 64, 80):
        piece = text[end - (end % 32 or 32) : end]
        before = (context + text[:end])[-33 : -len(piece)]
        wanted += loss_after(loaded, before, piece)
    assert total == pytest.approx(-wanted, rel=1e-5) and not greedy


def test_sampled_answers_are_draws_of_their_own_and_the_same_again(model):
    _, loaded, _ = model
    wanted = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 9, "until": []}
    some = [request("7 sheep", wanted)] * 3
    answers = HarnessModel(loaded).generate_until(some, disable_tqdm=True)
    assert len(set(answers)) == 3
    assert HarnessModel(loaded).generate_until(some, disable_tqdm=True) == answers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "wibble"], "--tasks 'wibble' is unknown to lm_eval"),
        (["--tasks", ","], "names none"),
        (["--tasks", "crows", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "crows", "--shots", "-1"], "--shots must be at least 0, got -1"),
        (["--tasks", "crows", "--step", "3"], "no checkpoint 3 in"),
        (["--tasks", "crows", "--ema"], "trained with optimizer.ema 0"),
        (["--tasks", "crows", "--json", "."], "is a folder"),
        (
            ["--tasks", "crows", "--include", "nowhere"],
            "nowhere is no folder",
        ),
        ([], "--tasks"),
    ],
    ids=str,
)
def test_a_bad_argument_is_one_line(model, words, said, capsys, monkeypatch):
    place, _, _ = model
    monkeypatch.setattr(harness, "_tasks", only_ours(harness._tasks))
    words = ["--include", place / "tasks", *words]
    assert call("--workdir", place / "run", *words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("flag", [["--step", "20"], ["--best"], ["--ema"]], ids=str)
def test_flags_of_runs_are_refused_for_a_folder(flag, model, tmp_path, capsys):
    symjax.save_pretrained(model[1], tmp_path)
    assert call("--workdir", tmp_path, "--tasks", "crows", *flag) == 2
    said = f"error: {flag[0]} is of runs: {tmp_path} is a folder of save_pretrained\n"
    assert capsys.readouterr().err == said


def only_ours(tasks):
    """Without the thousands of tasks of the harness, which take half a minute."""
    from lm_eval.tasks import TaskManager

    def manager(include_path, include_defaults):
        return TaskManager(include_path=include_path, include_defaults=False)

    def found(names, include):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lm_eval.tasks.TaskManager", manager)
            return tasks(names, include)

    return found


def test_without_lm_eval_the_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(harness.sys.modules, "lm_eval", None)
    assert call("--workdir", "x", "--tasks", "y") == 2
    assert "pip install lm_eval" in capsys.readouterr().err
