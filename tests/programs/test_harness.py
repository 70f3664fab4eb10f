"""lm_eval on a symjax model, offline: scores by its definitions, and answers."""

import json
import math

import numpy as np
import pytest
from hand_made import byte_fallback, hand_made
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from runs import TEXT, compile_cache, train, write_text

import symjax
from symjax.data import subwords
from symjax.data.tokens import ByteTokenizer
from symjax.distributed.exit_codes import run_and_exit
from symjax.evaluation import harness_model
from symjax.evaluation.harness_model import HarnessModel
from symjax.models.generate import _read
from symjax.programs import harness

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
    """Return a run, its model, and a folder of tasks with their data."""
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
                "written": loaded.generate(
                    question[-23:], 9, temperature=0, stop=["e"]
                ),
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
    """Return Σ −log p of a text after a context, from logits."""
    ids = loaded.encode(context + text)
    logits = np.asarray(loaded.logits(ids[:-1]), np.float64)
    chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    count = len(loaded.encode(text))
    return -chances[np.arange(len(ids) - 1), ids[1:]][-count:].sum()


def rolled(loaded, text):
    """Return Σ −log p of all bytes of a text but the first, in windows of 32 tokens."""
    tokens = loaded.encode(text).tolist()
    windows = get_rolling_token_windows(tokens[1:], tokens[0], 32, 1)
    pairs = map(make_disjoint_window, windows)
    texts = [[loaded.decode(ids) for ids in pair] for pair in pairs]
    return sum(loss_after(loaded, *pair) for pair in texts)


def request(*pair):
    return type("Request", (), {"args": pair})


@pytest.mark.slow
def test_scores_are_losses_in_the_windows_of_lm_eval(model, tmp_path, capsys):
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
    losses = [rolled(loaded, x["story"]) for x in rows]
    size = sum(len(row["story"].encode()) for row in rows)
    wanted = sum(losses) / size
    story = found["harness"]["story"]
    assert story["bits_per_byte,none"] == pytest.approx(wanted / math.log(2), abs=1e-6)
    assert story["byte_perplexity,none"] == pytest.approx(math.exp(wanted), rel=1e-6)
    assert found["harness"]["next"]["exact_match,none"] == 1


def test_a_continuation_is_judged_after_its_context(model):
    _, loaded, _ = model
    long = "9 " * 40 + "9"
    asked = [("7 sheep", ", 49 goats"), (long, " crows"), ("1", "23")]
    answers = HarnessModel(loaded).loglikelihood(
        [request(*pair) for pair in asked], disable_tqdm=True
    )
    for (context, text), (total, _) in zip(asked, answers, strict=True):
        context = context[-(33 - len(text)) :]
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


BPE = subwords.train_bpe(["the quick brown fox. " * 50], 280)
BYTES = ByteTokenizer()


def answers(loaded, *pairs):
    some = [Instance("generate_until", {}, pair, 0) for pair in pairs]
    return HarnessModel(loaded).generate_until(some, disable_tqdm=True)


@pytest.mark.parametrize(
    "name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"]
)
def test_an_answer_has_as_many_tokens_as_asked_by_any_name_for_it(name):
    quick = int(BPE.encode(" quick")[0])
    loaded = hand_made(BPE, {None: quick})
    (text,) = answers(loaded, ("the", {"until": ["\n\n"], name: 4}))
    assert text == BPE.decode([quick] * 4)


def test_empty_strings_end_no_answer():
    loaded = hand_made(BYTES, {None: ord("x")})
    for until in ([""], "", [], None, ["", "y"]):
        (text,) = answers(loaded, ("a", {"until": until, "max_gen_toks": 3}))
        assert text == "xxx"


def test_an_answer_ends_before_the_end_of_the_document():
    quick, end = int(BPE.encode(" quick")[0]), BPE.document_end
    wanted = {"until": ["\n"], "max_gen_toks": 5}
    loaded = hand_made(BPE, {None: quick, quick: end})
    assert answers(loaded, ("the", wanted)) == [BPE.decode([quick])]
    loaded = hand_made(BYTES, {None: 0, ord("a"): ord("b")})
    assert answers(loaded, ("a", wanted), ("x", wanted)) == ["b", ""]


def test_a_temperature_is_read_by_the_rules_of_lm_eval():
    loaded = hand_made(BYTES)

    def drawn(**wanted):
        wanted = {"until": [], "max_gen_toks": 6} | wanted
        return set(answers(loaded, *[("the quick", wanted)] * 3))

    greedy = drawn(temperature=0.0)
    assert len(greedy) == 1
    assert len(drawn(temperature=1.0)) == 3
    assert len(drawn(temperature=1.0, do_sample=True)) == 3
    for wanted in ({}, {"do_sample": False}, {"do_sample": True}):
        assert drawn(**wanted) == greedy
    assert drawn(temperature=1.0, do_sample=False) == greedy
    assert drawn(temperature=1.0, top_k=1) == greedy


def test_a_limit_of_draws_that_is_null_is_no_limit():
    wanted = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 9, "until": []}
    null, loaded = wanted | {"top_k": None, "top_p": None}, hand_made(BYTES)
    assert answers(loaded, ("ab", null)) == answers(loaded, ("ab", wanted))


def test_options_of_generation_that_are_ignored_are_named_once(capsys):
    loaded = HarnessModel(hand_made(BYTES))
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "min_p": None, "seed": 0}
    read = {"until": ["x"], "max_new_tokens": 2, "temperature": 1.0, "top_k": 5}

    def said(**wanted):
        wanted = neutral | read | wanted
        loaded.generate_until([request("ab", wanted)] * 2)
        return [x for x in capsys.readouterr().err.splitlines() if "ignores" in x]

    assert not said(use_cache=False, top_p=0.9, do_sample=True)
    [line] = said(num_beams=4, min_p=0.1)
    assert line.endswith("of generation: num_beams=4, min_p=0.1")
    [line] = said(num_beams=4, repetition_penalty=1.3)
    assert line.endswith("of generation: repetition_penalty=1.3")
    assert not said(num_beams=2, min_p=0.2)


@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
def test_a_long_context_is_cut_on_the_left(positions, monkeypatch):
    given = []

    def watched(model, tokenizer, prompts, count, *_, **__):
        given.extend((len(ids), BYTES.decode(ids)[-3:], count) for ids in prompts)
        return [""] * len(prompts)

    monkeypatch.setattr(harness_model, "texts", watched)
    loaded = hand_made(BYTES, positions=positions, length=64)
    for count in (16, 60, 256):
        answers(loaded, ("x" * 497 + "end", {"max_gen_toks": count}))
    # The context keeps at least half of the length.
    assert given == [(48, "end", 16), (32, "end", 60), (32, "end", 256)]


def test_requests_of_many_lengths_are_answered_in_batches_and_in_their_order():
    loaded = hand_made(BYTES)
    contexts = ["x" * (1 + 5 * i % 20) + chr(65 + i) for i in range(24)]
    pairs = [
        (x, {"until": [], "max_gen_toks": 3 + i % 2}) for i, x in enumerate(contexts)
    ]
    alone = [
        loaded.generate(x, 3 + i % 2, temperature=0) for i, x in enumerate(contexts)
    ]
    before = _read._cache_size()
    assert answers(loaded, *pairs) == alone
    assert _read._cache_size() - before <= 2


def test_a_draw_does_not_depend_on_the_other_requests():
    loaded = hand_made(BYTES)
    warm = {"temperature": 1.0, "until": [], "max_gen_toks": 9}
    cold = {"until": [], "max_gen_toks": 9}
    (alone,) = answers(loaded, ("a", warm))
    for others in ([("bcd", warm)], [("bcd", cold), ("e" * 30, warm)]):
        assert answers(loaded, ("a", warm), *others)[0] == alone


FOLLOWS = {0: ord("Q"), ord("Q"): ord("a"), ord("a"): ord("b")}


def test_a_text_without_a_context_is_scored_after_what_stands_before_a_document():
    loaded = hand_made(BYTES, FOLLOWS, {"document_start": 0})
    asked = HarnessModel(loaded)
    pairs = [
        request("", "Qab"),
        request("", "aab"),
        request(" ", "Q"),
        request("", "Q"),
    ]
    found = asked.loglikelihood(pairs, disable_tqdm=True)
    assert found[0] == (pytest.approx(0, abs=1e-5), True)
    assert found[1][0] < -20 and not found[1][1]
    assert found[3][0] == pytest.approx(0, abs=1e-5)
    rolled = asked.loglikelihood_rolling([request("Qab"), request("aab"), request("")])
    assert rolled == [pytest.approx(x, abs=1e-5) for x in (0, found[1][0], 0)]
    assert answers(loaded, ("", {"max_gen_toks": 3})) == ["Qab"]


def test_where_nothing_stands_before_a_document_first_tokens_are_left_out(capsys):
    loaded = hand_made(BYTES, FOLLOWS)
    asked = HarnessModel(loaded)
    pairs = [request("", "Qab"), request("", "ab"), request("Q", "ab")]
    found = asked.loglikelihood(pairs, disable_tqdm=True)
    assert [x for x, _ in found] == [pytest.approx(0, abs=1e-5)] * 3
    (rolled,) = asked.loglikelihood_rolling([request("Qab")])
    assert rolled == -math.fsum(loaded.losses("Qab"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has not learned how a document begins" in said
    for call_it in (asked.loglikelihood, asked.loglikelihood_rolling):
        pair = request("", "Q") if call_it == asked.loglikelihood else request("Q")
        with pytest.raises(ValueError, match="'Q' has one token and no context"):
            call_it([pair], disable_tqdm=True)
    with pytest.raises(ValueError, match="a context is empty"):
        answers(loaded, ("", {"max_gen_toks": 3}))


def test_contexts_begin_with_bos_where_all_documents_did():
    tokens = byte_fallback()
    loaded = hand_made(tokens, None, {"document_start": 1, "bos": True})
    asked = HarnessModel(loaded)
    ids = tokens.encode("the cat sat").tolist()
    assert asked.tok_encode("the cat sat") == [1, *ids]
    assert asked.tok_encode("the cat sat", add_special_tokens=False) == ids
    losses = loaded.losses("the cat sat")
    count = len(tokens.encode("the cat"))
    pairs = [request("the cat", " sat"), request("", "the cat sat")]
    (after, _), (whole, _) = asked.loglikelihood(pairs, disable_tqdm=True)
    assert whole == pytest.approx(-losses.sum(), rel=1e-5)
    assert after == pytest.approx(-losses[count:].sum(), rel=1e-5)
    assert asked.loglikelihood_rolling([request("the cat sat")]) == [
        pytest.approx(whole, rel=1e-6)
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "wibble"], "--tasks 'wibble' is unknown to lm_eval"),
        (["--tasks", ","], "names no task"),
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
    said = f"error: {flag[0]} is for runs: {tmp_path} is a folder of save_pretrained\n"
    assert capsys.readouterr().err == said


def only_ours(tasks):
    """Leave out the thousands of tasks of the harness, which take half a minute."""
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
