"""A corpus is exact, and damage is named. Tests of the cache are in test_cache.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from symjax import config
from symjax.data import corpus
from symjax.data.sources import local_files, table
from symjax.data.store import cache, folder, packed
from symjax.data.store.manifest import read_manifest, sealed
from symjax.data.store.packed import PackedArray

REPOSITORY = Path(__file__).resolve().parents[2]
SHAKESPEARE = REPOSITORY.parent / "shared/data/tinyshakespeare.txt"
TEXT = "To be, or not to be:\r\nthat is the question. é\u2028\n" * 20


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "source.txt"
    path.write_bytes(TEXT.encode())
    cache = str(tmp_path / "cache")
    return config.Data(source="text", path=str(path), tokenizer="byte", cache=cache)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "data"


@pytest.fixture(scope="module")
def stdlib_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stdlib")


@pytest.fixture(scope="module")
def stdlib(stdlib_folder):
    return corpus.open_corpus(config.Data(), stdlib_folder)


def replaced(options, **changes):
    return config.Data(**(vars(options) | changes))


def arrays(options, directory):
    """Return the folder of the arrays of a corpus."""
    return corpus.open_corpus(options, directory).train.path.parent


def everything(opened):
    return opened.tokenizer.decode(np.concatenate([opened.train, opened.heldout]))


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_a_single_file_is_exactly_its_text(options, directory, tokenizer):
    opened = corpus.open_corpus(replaced(options, tokenizer=tokenizer), directory)
    assert everything(opened) == TEXT
    assert isinstance(opened.train, PackedArray)
    assert opened.train.dtype == np.uint8
    sizes = [opened.fingerprint[split]["bytes"] for split in folder.SPLITS]
    assert sum(sizes) == len(TEXT.encode())
    first = len(opened.tokenizer.decode(opened.heldout[:1]).encode())
    targets = len(opened.heldout) - 1  # nothing predicts the first token
    assert opened.bytes_per_token == (sizes[1] - first) / targets
    assert (opened.bytes_per_token == 1) == (tokenizer == "byte")


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_a_nul_stands_before_every_document(tmp_path, directory, tokenizer):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n")
    options = config.Data("text", str(tmp_path / "*.txt"), tokenizer=tokenizer)
    opened = corpus.open_corpus(options, directory)
    expected = local_files.text_files(options.path)
    for split in folder.SPLITS:
        text = opened.tokenizer.decode(getattr(opened, split))
        texts = ["".join(x) for x in expected.read(split)]
        assert text.split("\0") == ["", *texts]
        assert opened.fingerprint[split]["documents"] == expected.count(split)


def test_an_existing_corpus_needs_no_source(options, directory):
    first = corpus.open_corpus(options, directory)
    Path(options.path).unlink()
    again = corpus.open_corpus(options, directory)
    assert everything(again) == TEXT
    assert again.tokenizer == first.tokenizer
    assert again.fingerprint == first.fingerprint
    assert again.references == first.references
    assert set(again.references) == {"unigram", "bigram", "trigram"}


def test_the_same_text_packs_to_the_same_files(options, tmp_path):
    folders = []
    for name in "ab":
        chosen = replaced(options, cache=str(tmp_path / name))
        folders.append(arrays(chosen, tmp_path / name / "run"))
    for name in ("train.npy", "heldout.npy", "corpus.json"):
        assert len({(place / name).read_bytes() for place in folders}) == 1
        assert len(list(folders[0].iterdir())) == 3


def test_other_options_are_refused_by_name(options, directory):
    corpus.open_corpus(options, directory)
    with pytest.raises(ValueError, match=r"\(data.tokenizer: 'byte' → 'char'\)") as got:
        corpus.open_corpus(replaced(options, tokenizer="char"), directory)
    assert "data.path" not in str(got.value)
    with pytest.raises(ValueError, match="data.source: 'text' → 'stdlib', data.path: "):
        corpus.open_corpus(config.Data(), directory)


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train.npy", "heldout.npy"])
@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_cut, "bytes were written|bytes, [0-9]+ were written"),
        (damage_flip, "its sha256 has changed"),
        (Path.unlink, "missing"),
    ],
)
def test_a_damaged_file_is_named(options, directory, name, damage, message):
    damage(arrays(options, directory) / name)
    with pytest.raises(ValueError, match=rf"{name}' is damaged \(.*({message})"):
        corpus.open_corpus(options, directory)


def test_all_of_a_folder_is_compared_if_it_is_asked_for(
    options, directory, monkeypatch
):
    for module in (cache, packed):
        monkeypatch.setattr(module, "SAMPLED_FROM", 1)
    monkeypatch.setattr(packed, "BLOCK", 1)
    place = arrays(options, directory)
    assert "sample" in read_manifest(directory)["files"]["train.npy"]
    folder.verify(options, directory)
    content = bytearray((place / "heldout.npy").read_bytes())
    content[-2] ^= 1
    (place / "heldout.npy").write_bytes(content)
    corpus.open_corpus(options, directory)  # the sample does not have that byte
    with pytest.raises(ValueError, match="heldout.npy' is damaged"):
        folder.verify(options, directory)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"options": {}}', "\xff"])
def test_a_damaged_manifest_is_named(options, directory, content):
    corpus.open_corpus(options, directory)
    (directory / "corpus.json").write_bytes(content.encode("latin1"))
    with pytest.raises(ValueError, match="corpus.json' is damaged"):
        corpus.open_corpus(options, directory)


def test_any_flipped_bit_of_the_manifest_is_noticed(options, directory):
    """Its tokenizer, n-gram lines and byte counts are data as much as tokens are."""
    corpus.open_corpus(options, directory)
    path = directory / "corpus.json"
    content, whole = path.read_bytes(), read_manifest(directory)
    for place in range(0, 8 * len(content), 37):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            found = read_manifest(directory)
        except ValueError as error:
            assert "corpus.json' is damaged" in str(error)
        else:  # white space
            assert found == whole


def test_an_option_the_manifest_does_not_know_has_its_default(options, directory):
    corpus.open_corpus(options, directory)
    path = directory / "corpus.json"
    manifest = json.loads(path.read_text())
    del manifest["options"]["tokenizer"]  # as if it had been added since
    del manifest["seal"]
    path.write_text(sealed(manifest))
    corpus.open_corpus(options, directory)
    with pytest.raises(ValueError, match="data.tokenizer: 'byte' → 'char'"):
        corpus.open_corpus(replaced(options, tokenizer="char"), directory)


def test_a_large_alphabet_takes_wider_tokens(tmp_path, directory):
    path = tmp_path / "a.txt"
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 400))) * 3
    path.write_text(text, encoding="utf-8")
    opened = corpus.open_corpus(
        config.Data("text", str(path), tokenizer="char"), directory
    )
    assert opened.train.dtype == np.uint16
    assert everything(opened) == text
    assert opened.bytes_per_token == 3


def test_a_text_too_short_for_the_model_is_refused(options, directory):
    opened = corpus.open_corpus(options, directory)
    opened.check_length(len(opened.heldout) - 1)
    with pytest.raises(
        ValueError, match="data.path has .* tokens of held-out text, mo"
    ):
        opened.check_length(len(opened.heldout))
    with pytest.raises(
        ValueError, match="data.path has .* tokens of training text, mo"
    ):
        opened.check_length(len(opened.train))


def test_the_standard_library_has_the_lines_of_python(stdlib):
    figures = [stdlib.references[name] for name in ("unigram", "bigram", "trigram")]
    # 3.20, 2.46, 1.85 on Python 3.11; the text differs between versions.
    np.testing.assert_allclose(figures, [3.20, 2.46, 1.85], atol=0.1)
    assert stdlib.tokenizer.vocabulary == 256
    assert stdlib.fingerprint["python"].startswith(f"3.{sys.version_info.minor}.")
    stdlib.check_length(1024)


def test_opening_imports_neither_jax_nor_datasets(stdlib, stdlib_folder):
    directory = str(stdlib_folder)
    program = f"""
import sys
from pathlib import Path
import numpy as np
from symjax import config
from symjax.data import corpus, batches, examples
opened = corpus.open_corpus(config.Data(), Path({directory!r}))
batches.training_windows(opened.train, np.arange(2), 9, 0)
sys.exit(bool({{"jax", "datasets"}} & set(sys.modules)))
"""
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0
    )


def test_a_source_that_has_changed_is_named(options, directory):
    path = Path(options.path)
    corpus.open_corpus(options, directory)
    assert folder.source_change(options, directory) == ""
    os.utime(path, (1, 1))
    assert folder.source_change(options, directory) == ""  # the same text, copied
    path.write_bytes(TEXT.replace("be", "do").encode())
    os.utime(path, (2, 2))  # the same size, maybe within a tick of the clock
    line = folder.source_change(options, directory)
    assert f"data.path {options.path!r} has changed since it was packed" in line
    assert "\n" not in line
    assert everything(corpus.open_corpus(options, directory)) == TEXT
    path.unlink()
    assert folder.source_change(options, directory) == ""


def test_a_new_file_of_a_glob_is_a_change(tmp_path, directory):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    options = config.Data("text", str(tmp_path / "*.txt"))
    corpus.open_corpus(options, directory)
    assert folder.source_change(options, directory) == ""
    (tmp_path / "4.txt").write_text("document 4")
    assert "has changed since it was packed" in folder.source_change(options, directory)


def test_a_source_that_changes_while_it_is_read_is_a_change(
    options, directory, monkeypatch
):
    load = table.load

    def slow(options):
        found = load(options)
        Path(options.path).write_text("another text" * 99)
        return found

    monkeypatch.setattr(table, "load", slow)
    corpus.open_corpus(options, directory)
    assert "has changed" in folder.source_change(options, directory)


def test_the_standard_library_has_not_changed(stdlib, stdlib_folder):
    assert folder.source_change(config.Data(), stdlib_folder) == ""


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tiny Shakespeare is not here")
def test_tiny_shakespeare_is_what_everybody_counts(directory):
    options = config.Data("text", str(SHAKESPEARE), tokenizer="char")
    opened = corpus.open_corpus(options, directory)
    assert opened.tokenizer.vocabulary == 65
    assert (len(opened.train), len(opened.heldout)) == (1_003_854, 111_540)
    assert everything(opened) == SHAKESPEARE.read_bytes().decode()
