"""A checkpoint generates and scores a given text without the data of its run."""

import hashlib
import json
import math
import shutil

import pytest
from hand_made import spaced
from runs import TEXT, call, compile_cache, train, write_text

from symjax.data.given import given_examples
from symjax.data.tokens import ByteTokenizer

KEYS = {"data__tokenizer": "bpe", "data__vocabulary": 300, "evaluate__batches": 99}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "jax"):
        place = tmp_path_factory.mktemp("given")
        assert train(write_text(place), place / "run", **KEYS) == 0
        yield place / "run"


@pytest.fixture
def moved(trained, tmp_path):
    """Return a copy of the checkpoints alone."""
    shutil.copytree(trained / "checkpoints", tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def judge(workdir, *more):
    return call("eval", ["--workdir", str(workdir), *more])


def test_both_units_are_logged(trained):
    rows = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    *_, last = (row for row in rows if "heldout/loss" in row)
    found = json.loads((trained / "data" / "corpus.json").read_text())
    targets = found["judged"]  # all held-out tokens but the first
    bytes_per_token = targets["bytes"] / targets["tokens"]
    assert bytes_per_token > 2
    wanted = last["heldout/loss"] / math.log(2) / bytes_per_token
    assert last["heldout/bits_per_byte"] == pytest.approx(wanted)


def test_a_sample_needs_no_data(moved, capsys):
    words = ["--tasks", "sample,lambda", "--tokens", "5"]
    assert judge(moved, "--prompt", "7 sheep", *words) == 0
    assert "sample:\n7 sheep" in capsys.readouterr().out


def test_the_held_out_text_given_by_hand_has_the_held_out_loss(
    trained, moved, tmp_path, capsys
):
    text, found = tmp_path / "held.txt", {}
    text.write_text(TEXT[len(TEXT) * 9 // 10 :])
    for name, place, more in (
        ("own", trained, []),
        ("given", moved, ["--text", str(text)]),
        ("beside", trained, ["--text", str(text)]),
    ):
        path = tmp_path / f"{name}.json"
        words = ["--tasks", "loss,position", "--json", str(path), *more]
        assert judge(place, *words) == 0
        found[name] = json.loads(path.read_text())["heldout"]
    # The text of the run has one more token, the end of its document.
    assert found["given"]["loss"] == pytest.approx(found["own"]["loss"], rel=1e-2)
    assert found["given"] == found["beside"]
    assert found["given"]["ngrams"] == {} and found["own"]["ngrams"]
    assert "bits_per_byte" in capsys.readouterr().out


def test_a_page_shows_the_data_of_the_run_and_the_given_text_apart(
    trained, moved, tmp_path
):
    text, page = tmp_path / "held.txt", tmp_path / "page.html"
    text.write_text(TEXT[:5000])
    own = json.loads((trained / "data" / "corpus.json").read_text())["fingerprint"]
    words = ["--tasks", "lambda", "--report", str(page)]
    for place, more, given in (
        (trained, ["--text", str(text)], True),
        (moved, ["--text", str(text)], True),
        (moved, [], False),
    ):
        assert judge(place, *words, *more) == 0
        shown = page.read_text().split("<h2>data")[1].split("</table>")[0]
        for cells in (
            f"<td>training</td><td>{own['train']['tokens']:,} tokens<",
            f"<td>held out</td><td>{own['heldout']['tokens']:,} tokens<",
            f"<td>sha256</td><td>{own['sha256'][:16]}<",
        ):
            assert cells in shown
        sha256 = hashlib.sha256(text.read_bytes()).hexdigest()[:16]
        assert (f" tokens, sha256 {sha256}<" in shown) == given == ("--text" in shown)


def test_what_needs_the_data_says_so(moved, capsys):
    assert judge(moved, "--tasks", "loss") == 2
    said = capsys.readouterr().err
    assert "--text gives a text to evaluate" in said and said.count("\n") == 1


def test_a_text_that_cannot_be_judged_is_refused(moved, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    for content, said in (
        (None, "cannot be read"),
        ("", "--text has 0 tokens, at least 2 are needed"),
    ):
        if content is not None:
            empty.write_text(content)
        assert judge(moved, "--text", str(empty)) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokenizer", "text", "first"),
    [
        (ByteTokenizer(), "你好", 1),
        (spaced(), "the cat", 3),
        (spaced(), " the cat", 4),
    ],
    ids=["bytes", "an added space", "a space of the text"],
)
def test_the_bytes_of_a_first_token_without_a_context_are_not_counted(
    tokenizer, text, first
):
    count, size = len(tokenizer.encode(text)), len(text.encode())
    found = given_examples(tokenizer.describe(), text).text
    assert found is not None
    assert found.bytes_per_token == pytest.approx((size - first) / (count - 1))
    begun = given_examples(tokenizer.describe() | {"document_start": 1}, text).text
    assert begun is not None
    assert begun.bytes_per_token == pytest.approx(size / count)
