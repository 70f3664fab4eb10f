"""Streams: rows do not depend on the packer, which may fail, die and continue."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from symjax import config
from symjax.data import corpus
from symjax.data.batches import shard_starts, windows_in
from symjax.data.examples import text_examples
from symjax.data.sources import hub, table
from symjax.data.store import packer, stream
from symjax.data.store.cache import folder_name, root
from symjax.data.store.manifest import MANIFEST, read_manifest

SHARD, LENGTH, TOKENS = 3000, 32, 20_000
TEXTS = [f"document {i}: " + f"{i * i % 97} sheep, " * (3 + i % 40) for i in range(400)]


def write_rows(folder, texts, name="train"):
    lines = "\n".join(json.dumps({"text": text, "n": 1}) for text in texts)
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text(lines)


@pytest.fixture
def options(tmp_path):
    write_rows(tmp_path / "rows", TEXTS)
    return config.Data(
        "hub",
        name=str(tmp_path / "rows"),
        streaming=True,
        tokens=TOKENS,
        cache=str(tmp_path / "cache"),
    )


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(stream, "SHARD", SHARD)
    monkeypatch.setattr(hub, "PAUSES", (0.01, 0.01))


def order_of(options, place=None):
    revisions = table.revisions(options)
    place = place or root(options) / folder_name(options, revisions)
    place.parent.mkdir(parents=True, exist_ok=True)
    return packer.PackRequest(options, place, revisions, SHARD)


def files_in(place):
    return {x.name: x.read_bytes() for x in place.iterdir() if x.name[0] != "."}


def rows_of(opened, numbers, seed=3):
    return text_examples(opened).read_training(np.asarray(numbers), LENGTH, seed)


def equal(one, other):
    for a, b in zip((*one[0], one[1]), (*other[0], other[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_stream_is_its_documents_up_to_so_many_tokens(options, tmp_path):
    opened = corpus.open_corpus(options, tmp_path / "data")
    assert opened.size == f"{TOKENS:,} training tokens of a stream"
    stands = opened.stream.wait_for(10**9)
    assert TOKENS <= stands < TOKENS + 2000 and len(opened.train) == stands
    text = opened.tokenizer.decode(np.concatenate([opened.heldout[:], opened.train[:]]))
    assert text.split("\0") == ["", *TEXTS[: text.count("\0")]]
    share = len(opened.heldout) / TOKENS
    assert packer.HELD_SHARE <= share < packer.HELD_SHARE + 0.05
    ends = opened.ends["train"]
    assert ends[len(ends) - 1 :][0] == stands
    again = corpus.open_corpus(options, tmp_path / "again")
    assert again.stream is None and again.fingerprint["train"]["tokens"] == stands
    assert again.fingerprint["sha256"] == opened.fingerprint["sha256"]
    equal(rows_of(again, range(200)), rows_of(opened, range(200)))


def test_a_split_by_name_is_held_out_and_its_copies_are_not_trained_on(
    options, tmp_path
):
    write_rows(tmp_path / "rows", TEXTS[5:7], "validation")
    options = config.Data(**vars(options) | {"documents": "joined"})
    opened = corpus.open_corpus(options, tmp_path / "data")
    opened.stream.wait_for(10**9)
    assert opened.tokenizer.decode(opened.heldout[:]).split("\0") == ["", *TEXTS[5:7]]
    begin, *trained = opened.tokenizer.decode(opened.train[:]).split("\0")
    assert begin == ""
    kept = [text for text in TEXTS if text not in TEXTS[5:7]]
    assert trained == kept[: len(trained)] and not opened.ends


def test_each_epoch_has_each_window_of_each_shard_in_turn():
    tokens = np.arange(3 * SHARD + 700)
    each, tail = windows_in(SHARD, LENGTH), windows_in(700, LENGTH)
    epoch = 3 * each + tail
    found = shard_starts(tokens, np.arange(2 * epoch), LENGTH, 7, SHARD)
    for starts in np.split(found, 2):
        shards = np.split(starts, [each, 2 * each, 3 * each])
        for index, own in enumerate(shards):
            assert (own // SHARD == index).all()
            assert (own % SHARD + LENGTH < (SHARD if index < 3 else 700)).all()
            cut = np.sort(own)
            assert (np.diff(cut) == LENGTH).all() and (own != cut).any()
    assert (found[:epoch] != found[epoch:]).any()
    some = shard_starts(tokens, np.arange(5, epoch, 40), LENGTH, 7, SHARD)
    np.testing.assert_array_equal(some, found[5:epoch:40])


def test_rows_do_not_depend_on_how_much_stands(options, tmp_path):
    """Nor do rows of documents whose end was not packed when they were read."""
    packer.pack(order_of(options))
    whole = corpus.open_corpus(options, tmp_path / "data")
    each, size = windows_in(SHARD, LENGTH), len(whole.train)
    for shards in (1, 2, size // SHARD):
        cut = int(np.searchsorted(whole.ends["train"][:], shards * SHARD))
        part = corpus.Corpus(
            **vars(whole)
            | {
                "train": whole.train[: whole.ends["train"][cut : cut + 1][0]],
                "ends": {**whole.ends, "train": whole.ends["train"][:cut]},
            }
        )
        numbers = np.arange((shards - 1) * each, shards * each)
        equal(rows_of(part, numbers), rows_of(whole, numbers))


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_packer_killed_anywhere_goes_on_to_the_same_files(
    options, tmp_path, monkeypatch, tokenizer
):
    if tokenizer == "bpe":
        changes = {"tokenizer": "bpe", "vocabulary": 300, "tokens": TOKENS // 2}
        options = config.Data(**vars(options) | changes)
    undisturbed = order_of(options, tmp_path / "undisturbed" / folder_name(options))
    packer.pack(undisturbed)
    wanted = files_in(undisturbed.place)
    order, add = order_of(options), packer.SplitWriter.add
    most = {"byte": 28, "bpe": 80}[tokenizer]  # documents, more than a shard has
    kills = iter([0, 3] + [most] * 9)
    while not (order.place / MANIFEST).exists():
        left = iter(range(next(kills)))

        def dies(self, document, left=left):
            add(self, document)
            if next(left, None) is None:
                self._tokens.sync()  # pages of the kernel outlive the process
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(packer.SplitWriter, "add", dies)
            packer.pack(order)
    assert len(list(kills)) < 8 and files_in(order.place) == wanted


def test_a_stream_that_breaks_goes_on_where_it_was(options, monkeypatch, capsys):
    [rows], _ = hub.open_streams(options, "")
    iterate, breaks = type(rows).__iter__, iter([7, 30, 31])

    def broken(self):
        at = next(breaks, None)
        for index, row in enumerate(iterate(self)):
            if index == at:
                raise ConnectionResetError("gone")
            yield row

    monkeypatch.setattr(type(rows), "__iter__", broken)
    assert [text for text, _ in hub.streamed_texts(options, rows)] == TEXTS
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "lost its connection (ConnectionResetError): continuing" in said[0]


TABLES = {
    "of rows without types": (None, 0),
    "in a table of 7 rows": ({"shard_idx": 1, "shard_example_idx": 14}, 5),
    "in the first table": ({"shard_idx": 1, "shard_example_idx": 0}, 19),
}


@pytest.mark.parametrize("written", TABLES)
def test_a_state_of_an_older_version_goes_on_after_its_row(options, written):
    """Tables had other sizes, and some rows had no types."""
    write_rows(Path(options.name), TEXTS[200:], "train-2")
    previous, since = TABLES[written]
    [rows], _ = hub.open_streams(options, "")
    kind = "ArrowExamplesIterable"
    state = {
        "examples_iterable": {
            "examples_iterable": {
                "shard_idx": 1,
                "shard_example_idx": 19,
                "type": kind,
            },
            "previous_state": previous and {**previous, "type": kind},
            "batch_idx": 419,
            "num_chunks_since_previous_state": since,
            "cropped_chunk_length": 0,
            "type": f"Rebatched{kind}",
        },
        "epoch": 0,
    }
    texts = [text for text, _ in hub.streamed_texts(options, rows)]
    assert [text for text, _ in hub.streamed_texts(options, rows, state)] == texts[219:]


def test_a_stream_that_stays_broken_is_one_line(options, monkeypatch):
    [rows], _ = hub.open_streams(options, "")

    def broken(self):
        raise ConnectionResetError("gone")

    monkeypatch.setattr(type(rows), "__iter__", broken)
    with pytest.raises(ValueError, match="data.name .* cannot be loaded: no answer"):
        list(hub.streamed_texts(options, rows))


@pytest.mark.parametrize(
    ("column", "said"),
    [("body", "is unknown: choose from text, n"), ("n", "holds no text, but int")],
)
def test_what_the_packer_refuses_is_the_line_of_the_run(
    options, tmp_path, column, said
):
    options = config.Data(**vars(options) | {"column": column})
    with pytest.raises(ValueError, match=f"^data.column '{column}' {said}"):
        corpus.open_corpus(options, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 0}, "data.streaming True and data.tokens 0: set both"),
        ({"streaming": False}, "data.streaming False and data.tokens 20000"),
        (
            {"tokenizer": "char"},
            "data.tokenizer char takes its alphabet from the whole",
        ),
        ({"label": "n"}, "data.streaming reads one text"),
        ({"source": "stdlib", "name": ""}, "hub only.* leave data.streaming False"),
    ],
)
def test_keys_that_do_not_fit_a_stream_are_refused(options, changes, said):
    with pytest.raises(ValueError, match=said):
        table.check_keys(config.Data(**vars(options) | changes))


def test_the_packer_ends_with_the_one_that_started_it(options, tmp_path):
    """After kill −9 no packer is left, and the next one continues."""
    program = (
        "import sys, time; from symjax.data.store import stream\n"
        "from symjax.data.store.packer import request_from_json\n"
        "held = stream.Stream(request_from_json(sys.argv[1]))\n"
        "print(held._process.pid, flush=True); time.sleep(600)"
    )
    order = order_of(options)
    order.place.parent.mkdir(exist_ok=True)
    with packer.locked(order.place):  # so that it waits
        run = subprocess.Popen(
            [sys.executable, "-c", program, order.as_json()],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(corpus.__file__).parents[2])},
            text=True,
        )
        child = int(run.stdout.readline())
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
        for _ in range(600):
            if not _runs(child):
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"process {child} has outlived its run")


def _runs(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_another_beginning_is_refused_where_the_cache_was_cleared(options, tmp_path):
    opened = corpus.open_corpus(options, tmp_path / "data")
    opened.stream.wait_for(10**9)
    opened.stream.close()
    shutil.rmtree(options.cache)
    again = corpus.open_corpus(options, tmp_path / "data")
    equal(rows_of(again, range(90)), rows_of(opened, range(90)))
    write_rows(tmp_path / "rows", TEXTS[1:])
    again.stream.close()
    shutil.rmtree(options.cache)
    with pytest.raises(ValueError, match="data.name .* does not begin as it did when"):
        corpus.open_corpus(options, tmp_path / "data")
    assert read_manifest(tmp_path / "data")["name"] == opened.train.path.parent.name
