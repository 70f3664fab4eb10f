"""Data sets by name: local folders, and a hub that refuses, hangs or goes silent."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import pytest
import runs

from symjax import config
from symjax.data import corpus
from symjax.data.sources import hub, table

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from symjax import config
from symjax.data.corpus import open_corpus
try:
    open_corpus(config.Data("hub", name="someone/something"), Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""


def wanted(folder, **keys):
    return config.Data(source="hub", name=str(folder), **keys)


def documents(texts):
    splits = ("train", "heldout")
    return {split: ["".join(x) for x in texts.read(split)] for split in splits}


def rows(name: str, count: int) -> list[str]:
    return [f"{name} row {number}\n" for number in range(count)]


@pytest.fixture
def parquet(tmp_path):
    folder = tmp_path / "parquet"
    folder.mkdir()
    for split, count in (("train", 9), ("validation", 3), ("test", 2)):
        content = {"text": rows(split, count), "label": list(range(count))}
        datasets.Dataset.from_dict(content).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture
def subsets(tmp_path):
    folder = tmp_path / "subsets"
    for subset in ("easy", "hard"):
        (folder / subset).mkdir(parents=True)
        lines = [json.dumps({"story": text}) for text in rows(subset, 30)]
        (folder / subset / "train.jsonl").write_text("\n".join(lines))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files: easy/*.jsonl\n"
        "- config_name: hard\n  data_files: hard/*.jsonl\n---\n"
    )
    return folder


def test_a_validation_split_is_held_out(parquet):
    loaded, facts = hub.load(wanted(parquet))
    assert documents(loaded) == {
        "train": rows("train", 9),
        "heldout": rows("validation", 3),
    }
    assert facts["splits"] == ["train", "validation"]


def test_a_test_split_is_held_out_where_there_is_no_validation(parquet):
    (parquet / "validation.parquet").unlink()
    loaded, _ = hub.load(wanted(parquet))
    assert documents(loaded)["heldout"] == rows("test", 2)


def test_rows_are_held_out_by_hash_where_there_is_one_split(subsets):
    loaded, facts = hub.load(wanted(subsets, subset="hard", column="story"))
    got = documents(loaded)
    assert sorted(got["train"] + got["heldout"]) == sorted(rows("hard", 30))
    assert got["train"] and got["heldout"]
    assert facts["subset"] == "hard"
    lines = [json.dumps({"story": text}) for text in reversed(rows("hard", 30))]
    (subsets / "hard" / "train.jsonl").write_text("\n".join(lines))
    os.utime(subsets / "hard" / "train.jsonl", (1, 1))  # the cache compares it
    again = documents(hub.load(wanted(subsets, subset="hard", column="story"))[0])
    assert again["heldout"] == got["heldout"][::-1]  # their order changes nothing


def test_text_files_are_whole_rows(tmp_path):
    texts = [f"file {number}\n\n  a\u2028b é no newline" for number in range(5)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    got = documents(hub.load(wanted(tmp_path))[0])
    assert sorted(got["train"] + got["heldout"]) == sorted(texts)


def test_a_folder_of_several_formats_is_refused_by_name(parquet):
    (parquet / "more.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"several formats \(1 json, 3 parquet\), of"):
        hub.load(wanted(parquet))
    (parquet / "more.jsonl").rename(parquet / "metadata.jsonl")
    (parquet / ".hidden.csv").write_text("text\n")
    assert documents(hub.load(wanted(parquet))[0])["train"] == rows("train", 9)


def test_a_card_that_chooses_no_files_does_not_hide_them(parquet):
    (parquet / "more.ndjson").write_text('{"text": "one"}\n')
    card = parquet / "README.md"
    card.write_text("---\nlicense: mit\n---\nRows of both kinds.\n")
    with pytest.raises(ValueError, match=r"several formats \(1 json, 3 parquet\), of"):
        hub.load(wanted(parquet))
    card.write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: train.parquet\n---\n"
    )
    got = documents(hub.load(wanted(parquet))[0])
    assert sorted(got["train"] + got["heldout"]) == rows("train", 9)


def test_files_beside_those_named_after_splits_are_not_left_out(parquet):
    (parquet / "train.parquet").rename(parquet / "more.parquet")
    message = "1 of 3 files would not be read, such as 'more.parquet', beside"
    with pytest.raises(ValueError, match=message):
        hub.load(wanted(parquet))
    for split in ("validation", "test"):
        (parquet / f"{split}.parquet").unlink()
    got = documents(hub.load(wanted(parquet))[0])
    assert sorted(got["train"] + got["heldout"]) == rows("train", 9)


def test_rows_without_text_are_left_out(tmp_path):
    content = {"text": ["one two three", None, "", "four five six"]}
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "train.parquet")
    got = documents(hub.load(wanted(tmp_path))[0])
    assert sorted(got["train"] + got["heldout"]) == ["four five six", "one two three"]


def test_a_corpus_of_a_folder_says_where_it_is_from(parquet, tmp_path):
    options = wanted(parquet, tokenizer="char")
    opened = corpus.open_corpus(options, tmp_path / "data")
    text = "".join("\0" + row for row in rows("train", 9))
    assert opened.tokenizer.decode(opened.train) == text
    expected = {"source": "hub", "name": str(parquet), "column": "text"}
    assert opened.fingerprint.items() >= expected.items()
    assert opened.fingerprint["datasets"] == datasets.__version__
    assert opened.fingerprint["revision"]
    with pytest.raises(ValueError, match="data.name has .* tokens of training text"):
        opened.check_length(300)
    for path in parquet.iterdir():
        path.unlink()
    parquet.rmdir()
    again = corpus.open_corpus(options, tmp_path / "data")
    assert again.fingerprint == opened.fingerprint


def refused(folder, **keys) -> str:
    with pytest.raises(ValueError) as error:
        table.load(wanted(folder, **keys))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refusals_name_what_there_is(parquet, subsets, tmp_path):
    message = refused(parquet, column="body")
    assert "data.column 'body' is unknown: choose from text, label" in message
    message = refused(parquet, column="label")
    assert "data.column 'label' holds no text, but Value('int64')" in message
    assert "data.subset 'x' is unknown: choose from default" in refused(
        parquet, subset="x"
    )
    message = refused(subsets, subset="medium")
    assert "data.subset 'medium' is unknown: choose from easy, hard" in message
    assert "data.subset is needed: choose from easy, hard" in refused(subsets)
    (parquet / "train.parquet").unlink()
    assert "has no split 'train', only validation, test" in refused(parquet)
    assert "is empty: give a data set of the hub such as" in refused("")
    assert "is not a folder: give a data set" in refused(tmp_path / "no")
    assert "is a file: give a data set" in refused(parquet / "test.parquet")
    (tmp_path / "bare").mkdir()
    assert "cannot be loaded" in refused(tmp_path / "bare")
    (parquet / "train.parquet").write_bytes(b"PAR1 and no more")
    message = refused(parquet)
    assert "train.parquet' cannot be read: ArrowInvalid: " in message


def test_keys_of_another_source_are_refused(parquet):
    with pytest.raises(ValueError, match="data.path 'a' is read by data.source=text o"):
        table.load(wanted(parquet, path="a"))
    message = "data.column 'a' is read by data.source=hub only: set data.source=hub, or"
    with pytest.raises(ValueError, match=f"{message} leave data.column text"):
        table.load(config.Data(column="a"))


@contextlib.contextmanager
def silent_server():
    """Return a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept())

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
    for connection, _ in held:
        connection.close()


def ask(port: int, folder: Path, **environment: str) -> str:
    """Return what a process prints that asks a hub for a data set."""
    plain = {
        name: value
        for name, value in runs.environment().items()
        if not name.startswith("HF_")
    }
    variables = plain | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(folder / "cache"),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "data")],
        cwd=REPOSITORY,
        env=variables,
        capture_output=True,
        text=True,
        timeout=runs.SECONDS,
    )
    assert not done.stderr
    assert not (folder / "data").exists()
    return done.stdout


def test_a_hub_that_refuses_is_one_line_with_the_way_out(tmp_path):
    line = ask(1, tmp_path)
    assert line.count("\n") == 1
    assert (
        "no answer from http://127.0.0.1:1 (" in line and "Connection refused)" in line
    )
    assert "HF_HUB_OFFLINE=1 uses the local cache, or give a local folder of" in line


def test_a_hub_that_never_answers_is_one_line_with_the_way_out(tmp_path):
    with silent_server() as port:
        line = ask(port, tmp_path)
    assert line.count("\n") == 1
    assert f"no answer from http://127.0.0.1:{port} (" in line and "timed out)" in line
    assert "HF_HUB_OFFLINE=1 uses the local cache, or give a local folder of" in line


def test_an_empty_cache_without_a_hub_is_one_line(tmp_path):
    line = ask(1, tmp_path, HF_HUB_OFFLINE="1")
    assert line.count("\n") == 1
    assert "'someone/something' is not in the local cache: unset HF_HUB_OFFLINE" in line


def test_a_card_that_counts_the_rows_of_all_splits_is_no_hindrance(parquet):
    """Counts of splits that are not used cannot be compared."""
    counts = "".join(
        f"  - name: {split}\n    num_examples: {count}\n    num_bytes: 0\n"
        for split, count in (("train", 9), ("validation", 3), ("test", 2))
    )
    types = "  features:\n  - name: text\n    dtype: string\n"
    types += "  - name: label\n    dtype: int64\n"
    card = f"---\ndataset_info:\n{types}  splits:\n{counts}---\n"
    (parquet / "README.md").write_text(card)
    assert documents(hub.load(wanted(parquet))[0])["train"] == rows("train", 9)
    (parquet / "README.md").write_text(card.replace("examples: 9", "examples: 8"))
    assert "NonMatchingSplitsSizes" in refused(parquet)
