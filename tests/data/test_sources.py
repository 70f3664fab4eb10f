"""Sources give the exact text, and no document is both trained on and held out."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from symjax import config
from symjax.data.sources import local_files, splits, table

LINES = (
    "first line\r\nsecond\rthird\n\n  \u2028é\0\ufeff\U0001f600 no newline at the end"
)


@pytest.fixture
def many(tmp_path):
    for number in range(40):
        name = tmp_path / f"folder{number % 3}" / f"{number}.txt"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(f"document {number}\r\n".encode() * 10)
    return tmp_path


def documents(texts):
    splits = ("train", "heldout")
    return {split: ["".join(x) for x in texts.read(split)] for split in splits}


def test_a_single_file_is_exact_and_holds_out_its_last_tenth(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes((LINES * 7).encode())
    got = documents(local_files.text_files(path))
    [train], [heldout] = got["train"], got["heldout"]
    assert train + heldout == LINES * 7
    assert len(train) == len(LINES * 7) * 9 // 10


def test_every_document_of_a_glob_is_on_one_side(many):
    got = documents(local_files.text_files(many / "**" / "*.txt"))
    everything = {path.read_bytes().decode() for path in many.glob("**/*.txt")}
    assert set(got["train"]) | set(got["heldout"]) == everything
    assert not set(got["train"]) & set(got["heldout"])
    assert len(got["train"]) + len(got["heldout"]) == len(everything)
    assert got["train"] and got["heldout"]


def test_the_split_does_not_depend_on_order_or_place(many, tmp_path):
    first = documents(local_files.text_files(many / "**" / "*.txt"))
    paths = sorted(many.glob("**/*.txt"), reverse=True)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for number, path in enumerate(paths):
        (moved / f"{number}.text").write_bytes(path.read_bytes())
    second = documents(local_files.text_files(moved / "*.text"))
    assert {key: set(value) for key, value in first.items()} == {
        key: set(value) for key, value in second.items()
    }


@pytest.mark.parametrize("count", range(2, 9))
def test_a_few_files_leave_no_split_empty(tmp_path, count):
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(f"file {number} of {count}, " * 30)
    got = documents(local_files.text_files(",".join(map(str, tmp_path.glob("*.txt")))))
    assert got["train"] and got["heldout"]
    assert len(got["train"]) + len(got["heldout"]) == count


def test_bad_luck_of_the_hash_does_not_hold_out_most_of_the_text():
    keys = np.array([0, 1 << 32, 15 << 60], np.uint64)  # two are held out by hash
    found = splits.held_out(keys, np.array([80, 80, 10]))
    assert found.tolist() == [False, False, True]
    keys = np.array([0, 1 << 32, 2 << 32], np.uint64)  # all of them
    found = splits.held_out(keys, np.array([80, 9, 30]))
    assert found.tolist() == [False, True, False]


def test_copies_of_a_file_are_on_one_side(tmp_path):
    for number in range(30):
        for copy in "ab":
            (tmp_path / f"{number}{copy}.txt").write_text(f"text {number}")
    got = documents(local_files.text_files(tmp_path / "*.txt"))
    assert not set(got["train"]) & set(got["heldout"])


def test_a_file_met_twice_counts_once(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    (tmp_path / "link.txt").symlink_to(path)
    got = documents(local_files.text_files(f"{path}, {tmp_path / '*.txt'}"))
    assert got == {"train": ["012345678"], "heldout": ["9"]}


def test_names_with_commas_and_brackets_are_files_first(tmp_path):
    path = tmp_path / "a, [1].txt"
    path.write_text("0123456789")
    assert documents(local_files.text_files(path))["heldout"] == ["9"]


def test_folders_may_have_commas_in_their_names(tmp_path):
    folder = tmp_path / "a, b"
    folder.mkdir()
    (folder / "text").write_text("0123456789")
    assert documents(local_files.text_files(folder))["heldout"] == ["9"]


def test_files_that_hold_no_text_are_empty_files(tmp_path):
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "nothing.txt.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "full.txt").write_text("0123456789")
    got = documents(local_files.text_files(tmp_path))
    assert got == {"train": ["012345678"], "heldout": ["9"]}
    assert "mark.txt' holds no text" in refused(tmp_path / "mark.txt")
    assert "matches only empty files" in refused(tmp_path / "[mn]*")


def test_empty_files_of_a_glob_are_left_out(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("0123456789")
    got = documents(local_files.text_files(tmp_path / "*.txt"))
    assert got == {"train": ["012345678"], "heldout": ["9"]}


def test_the_standard_library_is_split_by_file():
    got = documents(local_files.stdlib())
    sizes = {split: sum(map(len, texts)) for split, texts in got.items()}
    assert sum(sizes.values()) > 2_000_000
    assert 0.02 < sizes["heldout"] / sum(sizes.values()) < 0.12
    assert not (set(got["train"]) & set(got["heldout"])) - {""}


def refused(path) -> str:
    with pytest.raises(ValueError) as error:
        local_files.text_files(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refusals_name_the_thing(tmp_path, monkeypatch):
    empty, binary, full = (tmp_path / name for name in ("empty", "binary", "full"))
    empty.touch()
    binary.write_bytes(b"abc\xff\xfe")
    full.write_text("text")
    assert f"{str(tmp_path / 'no')!r} does not exist" in refused(tmp_path / "no")
    assert "'no*.x' matches no file" in refused(f"{full},no*.x")
    assert f"{str(empty)!r} is an empty file" in refused(empty)
    assert "matches only empty files" in refused(tmp_path / "e*")
    assert "is not UTF-8" in refused(tmp_path)  # of a folder all is read
    assert "empty entry: give a file, a glob" in refused("")
    assert "empty entry" in refused(f"{full},,")
    message = refused(binary)
    assert f"{str(binary)!r} is not UTF-8 (byte 0xff at offset 3)" in message
    (tmp_path / "copy").write_text("text")
    assert "copies of one" in refused(f"{full},{tmp_path / 'copy'}")

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert f"{str(full)!r} cannot be read (Permission denied)" in refused(full)


def test_options_are_checked():
    with pytest.raises(ValueError, match="'books' is unknown: choose from stdlib, te"):
        table.load(config.Data(source="books"))
    with pytest.raises(ValueError, match="'a.txt' is read by data.source=text only"):
        table.load(config.Data(path="a.txt"))


def test_a_python_without_sources_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="no Python source files in .*: set data.sour"):
        local_files.stdlib()


def test_a_folder_is_read_whole_or_refused(many, tmp_path):
    by_glob = documents(local_files.text_files(f"{many}/**/*.txt"))
    assert documents(local_files.text_files(many)) == by_glob
    (many / ".hidden").mkdir()
    (many / ".hidden" / "a.txt").write_bytes(b"\xff")
    (many / ".also").write_bytes(b"\xff")
    assert documents(local_files.text_files(many)) == by_glob
    for name, kind in (("a.jsonl", "json"), ("b.parquet", "parquet"), ("c.gz", "comp")):
        (many / name).write_text("{}")
        with pytest.raises(ValueError, match=f"has '.*{name}', which is {kind}"):
            local_files.text_files(many)
        (many / name).unlink()
    empty = tmp_path / "nothing"
    empty.mkdir()
    with pytest.raises(ValueError, match="matches no file"):
        local_files.text_files(empty)
