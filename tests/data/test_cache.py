"""Packed corpora are shared, complete or absent, packed once, and again if deleted."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from symjax import config
from symjax.data import corpus
from symjax.data.sources import table
from symjax.data.store import cache, folder
from symjax.data.store.manifest import MANIFEST, read_manifest, sealed

TEXT = "To be, or not to be: that is the question.\n" * 20


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "source.txt"
    path.write_text(TEXT)
    return config.Data("text", str(path), cache=str(tmp_path / "cache"))


def everything(opened):
    return bytes(np.concatenate([opened.train, opened.heldout])).decode()


def corpora(options):
    """Return the folders of corpora in a cache, without locks."""
    kept = Path(options.cache).iterdir()
    return sorted(path for path in kept if path.suffix != ".lock")


def test_runs_share_what_was_packed_once(options, tmp_path, monkeypatch):
    first = corpus.open_corpus(options, tmp_path / "a" / "data")
    monkeypatch.setattr(table, "load", None)
    second = corpus.open_corpus(options, tmp_path / "b" / "data")
    assert first.train.path == second.train.path
    assert [p.name for p in (tmp_path / "a" / "data").iterdir()] == [MANIFEST]
    [place] = corpora(options)
    assert place == first.train.path.parent and place.name.startswith("text-")


def test_it_is_in_the_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root(config.Data()) == tmp_path / "symjax" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root(config.Data()) == Path.home() / ".cache" / "symjax" / "data"
    assert cache.root(config.Data(cache="~/x")) == Path.home() / "x"
    with pytest.raises(ValueError, match="data.cache 'gs://a/b' is not on this m"):
        cache.root(config.Data(cache="gs://a/b"))


def test_a_cache_that_cannot_be_written_is_named(options, tmp_path):
    place = str(tmp_path / "source.txt" / "cache")
    changed = config.Data(**vars(options) | {"cache": place})
    with pytest.raises(ValueError, match="data.cache .* cannot be written: Not a dir"):
        corpus.open_corpus(changed, tmp_path / "data")


@pytest.mark.parametrize("key", ["tokenizer", "documents", "path", "text"])
def test_what_changes_the_tokens_changes_the_name(options, tmp_path, key):
    before = cache.folder_name(options)
    assert cache.folder_name(config.Data(**vars(options) | {"cache": "x"})) == before
    other = tmp_path / "other.txt"
    other.write_text(TEXT)
    value = {"tokenizer": "char", "documents": "joined", "path": str(other)}
    if key == "text":
        Path(options.path).write_text(TEXT + "!")
    else:
        options = config.Data(**vars(options) | {key: value[key]})
    assert cache.folder_name(options) != before


def test_another_tokenizer_in_a_file_of_one_name_is_another_corpus(options, tmp_path):
    path = tmp_path / "tokenizer.json"
    names = set()
    for content in "ab":
        path.write_text(content)
        chosen = config.Data(**vars(options) | {"tokenizer": str(path)})
        names.add(cache.folder_name(chosen))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert len(names | {cache.folder_name(chosen)}) == 3


def test_an_interrupted_build_leaves_nothing_and_is_repeated(
    options, tmp_path, monkeypatch
):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", interrupt)
        corpus.open_corpus(options, tmp_path / "data")
    assert not corpora(options) and not (tmp_path / "data").exists()
    opened = corpus.open_corpus(options, tmp_path / "data")
    assert everything(opened) == TEXT


def test_what_killed_builds_left_is_removed_but_not_what_is_being_written(
    options, tmp_path
):
    place = tmp_path / "cache"
    for name in ("text-dead", "text-alive"):
        (place / f".unfinished-{name}").mkdir(parents=True)
    with cache.locked(place / "text-alive"):
        corpus.open_corpus(options, tmp_path / "data")
    left = [path.name for path in corpora(options)]
    assert left[0] == ".unfinished-text-alive" and len(left) == 2


@pytest.mark.slow
def test_a_build_killed_at_any_line_is_repeated(tmp_path):
    program = Path(__file__).with_name("killed_builds.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


def pack_slowly(options, directory, packed):
    """Open a corpus in a process of its own that prints a line when it packs."""
    load = table.load

    def slow(options):
        with packed.open("a") as file:
            file.write("packed\n")
        time.sleep(0.5)
        return load(options)

    table.load = slow
    corpus.open_corpus(options, directory)


def test_of_two_that_pack_at_once_one_packs(options, tmp_path):
    packed = tmp_path / "packed"
    context = multiprocessing.get_context("spawn")
    at_once = [
        context.Process(target=pack_slowly, args=(options, tmp_path / name, packed))
        for name in "ab"
    ]
    for process in at_once:
        process.start()
    for process in at_once:
        process.join()
        assert process.exitcode == 0
    assert packed.read_text() == "packed\n"
    for name in "ab":
        assert everything(corpus.open_corpus(options, tmp_path / name)) == TEXT


def test_the_one_that_waits_says_so(options, tmp_path, capsys):
    place = cache.root(options) / cache.folder_name(options)
    place.parent.mkdir()
    done = []

    def wait():
        with cache.locked(place):
            done.append(True)

    with cache.locked(place):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.3)
        assert not done
    waiting.join()
    said = capsys.readouterr().err
    assert said == f"waiting: another process packs {place}\n" and done


def test_a_corpus_that_was_cleared_is_packed_again(options, tmp_path):
    first = corpus.open_corpus(options, tmp_path / "data")
    shutil.rmtree(options.cache)
    os.utime(options.path, (1, 1))  # of another name, and the same tokens
    second = corpus.open_corpus(options, tmp_path / "data")
    assert everything(second) == TEXT and second.fingerprint == first.fingerprint
    assert first.train.path != second.train.path


@pytest.mark.parametrize("kind", ["text", "source", "tokens"])
def test_one_that_cannot_be_packed_again_is_refused(options, tmp_path, kind):
    corpus.open_corpus(options, tmp_path / "data")
    shutil.rmtree(options.cache)
    said = "and data.path .* has changed since: use another --workdir"
    if kind == "text":
        Path(options.path).write_text(TEXT + "!")
    elif kind == "source":
        Path(options.path).unlink()
        said = "and cannot be packed again: data.path .* does not exist"
    else:  # as if another library version split words differently
        manifest = read_manifest(tmp_path / "data")
        manifest["files"]["train.npy"]["sha256"] = "0"
        (tmp_path / "data" / MANIFEST).write_text(sealed(manifest))
    place = folder.arrays_in(options, tmp_path / "data")
    with pytest.raises(ValueError, match=f"^{place}, which .*, is gone, {said}"):
        corpus.open_corpus(options, tmp_path / "data")


def test_damage_is_repaired_where_nothing_was_trained(options, tmp_path):
    path = corpus.open_corpus(options, tmp_path / "data").train.path
    path.write_bytes(path.read_bytes()[:-1])
    for place in ("data", "new"):
        with pytest.raises(ValueError, match="is damaged"):
            corpus.open_corpus(options, tmp_path / place)
    opened = corpus.open_corpus(options, tmp_path / "new", replace=True)
    assert everything(opened) == TEXT
    assert everything(corpus.open_corpus(options, tmp_path / "data")) == TEXT


def test_a_folder_that_has_its_own_arrays_needs_neither_cache_nor_source(
    options, tmp_path
):
    opened = corpus.open_corpus(options, tmp_path / "data")
    old = shutil.move(opened.train.path.parent, tmp_path / "old")
    manifest = json.loads((old / MANIFEST).read_text())
    del manifest["name"], manifest["seal"]  # as they were before there was a cache
    (old / MANIFEST).write_text(sealed(manifest))
    Path(options.path).unlink()
    shutil.rmtree(options.cache)
    again = corpus.open_corpus(options, old)
    assert again.train.path == old / "train.npy" and everything(again) == TEXT
    folder.verify(options, old)
    assert not Path(options.cache).exists()
