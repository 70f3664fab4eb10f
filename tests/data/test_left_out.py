"""Nothing is left out of a data set without a line that counts and names it."""

import json
import os

import datasets
import numpy as np
import pytest
from PIL import Image

from symjax import config
from symjax.data.sources import hub, labelled_sources, local_files
from symjax.data.store import packer, stream
from symjax.data.store.cache import folder_name, root

ROWS = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(20)]


def wanted(folder, **keys):
    return config.Data(source="hub", name=str(folder), **keys)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def said(capsys) -> list[str]:
    """Return the lines about skipped data, without the name of the source."""
    lines = capsys.readouterr().err.splitlines()
    return [x.partition(": not read: ")[2] for x in lines if ": not read: " in x]


def test_rows_without_text_are_counted_once(tmp_path, capsys):
    rows = [*ROWS, {"text": None}, {"text": ""}, {"label": "a"}]
    write(tmp_path / "a.jsonl", rows)
    loaded, _ = hub.load(wanted(tmp_path))
    for split in ("train", "heldout"):
        assert all("".join(text) for text in loaded.read(split))
    assert said(capsys) == ["rows without text in 'text': 3, such as row 21 of 'train'"]


def test_rows_of_two_splits_without_text_are_counted_together(tmp_path, capsys):
    write(tmp_path / "train.jsonl", [*ROWS, {"text": ""}])
    write(tmp_path / "validation.jsonl", [{"text": None}, *ROWS])
    hub.load(wanted(tmp_path))
    assert said(capsys) == ["rows without text in 'text': 2, such as row 21 of 'train'"]


def test_splits_that_are_not_used_are_named(tmp_path, capsys):
    for split in ("train", "validation", "test"):
        write(tmp_path / f"{split}.jsonl", ROWS)
    hub.load(wanted(tmp_path))
    assert said(capsys) == ["splits: 1, such as 'test'"]


def test_a_stream_counts_rows_without_text_and_copies_of_held_out_ones(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(stream, "SHARD", 300)
    rows = [{"text": f"document {number} " * 9} for number in range(40)]
    rows = [*rows, {"text": None}, rows[0], {"text": "last"}]
    write(tmp_path / "rows" / "a.jsonl", rows)
    options = wanted(
        tmp_path / "rows",
        streaming=True,
        tokens=100_000,
        tokenizer="bpe",
        vocabulary=300,
        cache=str(tmp_path / "cache"),
    )
    monkeypatch.setattr(packer, "LARGEST_HELD_OUT", 300)
    place = root(options) / folder_name(options)
    place.parent.mkdir(parents=True)
    packer.pack(packer.PackRequest(options, place, [], 300))
    copies, without = sorted(said(capsys))
    assert copies.startswith("copies of held-out texts: 1, such as 'document 0")
    assert without.startswith("rows without text in 'text': 1, such as row ")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_rows_without_label_are_counted(tmp_path, capsys, ending):
    rows = [*ROWS, {"text": "x", "label": None}, {"text": None, "label": "a"}]
    table = datasets.Dataset.from_list(rows)
    if ending == "jsonl":
        write(tmp_path / "a.jsonl", rows)
    else:
        getattr(table, f"to_{ending}")(str(tmp_path / f"a.{ending}"))
    found = labelled_sources.load(wanted(tmp_path, label="label"))
    assert len(found.labels) == 20 and found.names == ["a", "b"]
    assert sorted(said(capsys)) == [
        "rows without content in 'text': 1, such as row 22 of 'train'",
        "rows without label in 'label': 1, such as row 21 of 'train'",
    ]


def test_entries_of_a_folder_of_rows_that_are_not_read_are_named(tmp_path, capsys):
    write(tmp_path / "deep" / "er" / "a.jsonl", ROWS)
    write(tmp_path / ".hidden.jsonl", ROWS)
    write(tmp_path / ".git" / "b.jsonl", ROWS)
    write(tmp_path / "__pycache__" / "b.jsonl", ROWS)
    write(tmp_path / "notes.md", ROWS)
    write(tmp_path / "b.log", ROWS)
    write(tmp_path / "README.md", [])
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "c.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    loaded, _ = hub.load(wanted(tmp_path))
    assert loaded.count("train") + loaded.count("heldout") == 20
    assert sorted(said(capsys)) == [
        "empty files: 1, such as 'b.jsonl'",
        "entries that are no files: 1, such as 'gone.jsonl'",
        "files of no known format: 2, such as 'b.log'",
        "folders without files: 1, such as 'c.jsonl'",
        "hidden files: 1, such as '.hidden.jsonl'",
        "hidden folders: 2, such as '.git'",
    ]


def test_files_that_a_card_does_not_choose_are_named(tmp_path, capsys):
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.jsonl", ROWS)
    card = "---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n---\n"
    (tmp_path / "README.md").write_text(card)
    hub.load(wanted(tmp_path))
    line = "files that README.md does not choose: 1, such as 'b.jsonl'"
    assert said(capsys) == [line]


def test_a_folder_that_is_read_whole_says_nothing(tmp_path, capsys):
    write(tmp_path / "deep" / "a.jsonl", ROWS)
    write(tmp_path / "b.jsonl", ROWS)
    hub.load(wanted(tmp_path))
    assert said(capsys) == []


def test_entries_of_a_folder_of_texts_that_are_not_read_are_named(tmp_path, capsys):
    folder = tmp_path / "texts"
    for name in ("a.txt", "B.TXT", "deep/c.md", ".hidden", ".git/d.txt"):
        write(folder / name, [{"name": name}])
    write(tmp_path / "other" / "e.txt", ROWS)
    (folder / "empty.txt").touch()
    (folder / "link").symlink_to(tmp_path / "other")
    os.mkfifo(folder / "pipe")
    loaded = local_files.text_files(folder)
    lines = {x.rpartition(", such as")[0] for x in said(capsys)}
    assert loaded.count("train") + loaded.count("heldout") == 3
    assert lines == {
        "hidden files: 1",
        "hidden folders: 1",
        "links to folders: 1",
        "entries that are no files: 1",
        "empty files: 1",
    }


def test_folders_that_cannot_be_listed_are_named(tmp_path, capsys, monkeypatch):
    write(tmp_path / "a.txt", ROWS)
    write(tmp_path / "closed" / "b.txt", ROWS)
    scandir, closed = os.scandir, str(tmp_path / "closed")

    def refused(path):
        if str(path) == closed:
            raise PermissionError(13, "Permission denied", closed)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    for load in (local_files.text_files, lambda folder: hub.load(wanted(folder))):
        load(tmp_path)
        line = f"folders that cannot be read: 1, such as {closed!r}"
        assert line in said(capsys)


def test_folders_that_a_glob_matches_are_named(tmp_path, capsys):
    write(tmp_path / "a.txt", ROWS)
    write(tmp_path / "deep" / "b.txt", ROWS)
    local_files.text_files(tmp_path / "*")
    assert said(capsys) == [f"folders: 1, such as {str(tmp_path / 'deep')!r}"]


def write_image(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((3, 4), number, np.uint8)).save(path)
    return path


def test_files_beside_images_and_saved_rows_are_named(tmp_path, capsys):
    for number in range(6):
        write_image(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", number)
    write(tmp_path / "images" / "a" / "notes.txt", ROWS)
    options = wanted(tmp_path / "images", column="image", label="label")
    assert len(labelled_sources.load(options).labels) == 6
    assert said(capsys) == ["files of another format: 1, such as 'a/notes.txt'"]
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    write(tmp_path / "saved" / "more.jsonl", ROWS)
    hub.load(wanted(tmp_path / "saved"))
    assert said(capsys) == ["files of another format: 1, such as 'more.jsonl'"]


def test_images_that_the_metadata_does_not_list_are_named(tmp_path, capsys):
    paths = [write_image(tmp_path / f"{number}.png", number) for number in range(7)]
    listed = [f"{path.name},{'ab'[n % 2]}\n" for n, path in enumerate(paths[:6])]
    (tmp_path / "metadata.csv").write_text("file_name,label\n" + "".join(listed))
    options = wanted(tmp_path, column="image", label="label")
    assert len(labelled_sources.load(options).labels) == 6
    [line] = said(capsys)
    assert line.startswith("images that the metadata does not list: 1, such as")
    assert line.endswith("6.png'")


def test_images_that_cannot_be_read_are_named(tmp_path, capsys):
    for number in range(6):
        path = write_image(tmp_path / "ab"[number % 2] / f"{number}.png", number)
    options = wanted(tmp_path, column="image", label="label")
    assert len(labelled_sources.load(options).labels) == 6
    assert said(capsys) == []
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="5.png', row 6 of 'train' is no image"):
        labelled_sources.load(options)
