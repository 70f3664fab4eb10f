"""Packing and streams read every format, ending and compression alike."""

import bz2
import gzip
import json
import lzma
import sys
import zipfile

import datasets
import fsspec.compression
import pytest
from datasets.arrow_writer import ArrowWriter
from test_columns import READERS, packed, wanted

from symjax.data.sources import hub, labelled_sources, local_files

TEXTS = [f"text {number}, é\nnew line" for number in range(12)]


def arrow(path, rows):
    with ArrowWriter(path=str(path)) as writer:
        writer.write_table(rows.data.table)
        writer.finalize()


def content_of(ending: str, folder) -> bytes:
    """Return the bytes of a file with TEXTS in a format."""
    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    path = folder / "content"
    if ending == "json":
        rows.to_json(path, lines=False)
    elif ending in ("jsonl", "ndjson"):
        rows.to_json(path)
    elif ending == "csv":
        rows.to_csv(path)
    elif ending == "tsv":
        rows.to_csv(path, sep="\t")
    elif ending == "parquet":
        rows.to_parquet(path)
    elif ending == "arrow":
        arrow(path, rows)
    else:
        path.write_text(TEXTS[0])
    content = path.read_bytes()
    path.unlink()
    return content


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


def zipped(content: bytes, name: str, folder) -> bytes:
    with zipfile.ZipFile(folder / "zip", "w") as file:
        file.writestr(name, content)
    content = (folder / "zip").read_bytes()
    (folder / "zip").unlink()
    return content


PACKERS = {
    "": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
}
LINES = ("json", "jsonl", "ndjson", "csv", "tsv", "txt")
FILES = [
    *((ending, "") for ending in (*LINES, "parquet", "arrow")),
    *((ending, packer) for ending in ("jsonl", "csv", "txt") for packer in PACKERS),
]


@READERS
@pytest.mark.parametrize("capitals", [False, True])
@pytest.mark.parametrize(("ending", "packer"), FILES)
def test_every_file_gives_its_texts_in_order(tmp_path, ending, packer, capitals, read):
    name = f"a.{ending}.{packer}".strip(".")
    folder = tmp_path / "folder"
    folder.mkdir()
    content = PACKERS[packer](content_of(ending, tmp_path))
    (folder / (name.upper() if capitals else name)).write_bytes(content)
    texts = TEXTS
    if ending == "txt":  # a file is a row
        name, texts = name.replace("a.", "b."), TEXTS[:2]
        content = PACKERS[packer](TEXTS[1].encode())
        (folder / (name.upper() if capitals else name)).write_bytes(content)
    assert read(wanted(folder)) == texts


@READERS
def test_files_in_a_zip_are_read(tmp_path, read):
    folder = tmp_path / "folder"
    folder.mkdir()
    content = zipped(content_of("jsonl", tmp_path), "inside.jsonl", tmp_path)
    (folder / "a.zip").write_bytes(content)
    assert read(wanted(folder)) == TEXTS


@READERS
@pytest.mark.parametrize("ending", ["TXT", "Jsonl"])
def test_splits_are_known_by_files_with_endings_in_capitals(tmp_path, ending, read):
    for split in ("train", "validation"):
        text = split if ending == "TXT" else json.dumps({"text": split})
        (tmp_path / f"{split}.{ending}").write_text(text)
    options = wanted(tmp_path)
    assert read(options)[0] == "train"
    assert hub.load(options)[1]["splits"] == ["train", "validation"]


@READERS
def test_a_saved_data_set_is_read(tmp_path, read):
    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    assert read(wanted(tmp_path / "one")) == TEXTS


@READERS
def test_a_saved_data_set_of_splits_is_read(tmp_path, read):
    splits = {"train": TEXTS, "test": ["held out"], "other": ["not used"]}
    rows = {name: datasets.Dataset.from_dict({"text": x}) for name, x in splits.items()}
    datasets.DatasetDict(rows.items()).save_to_disk(tmp_path / "several")
    options = wanted(tmp_path / "several")
    assert read(options)[: len(TEXTS)] == TEXTS
    assert hub.load(options)[1]["splits"] == ["train", "test"]


def test_a_saved_data_set_has_labels(tmp_path):
    rows = {"text": TEXTS, "label": ["NA", "b"] * 6}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "one")
    found = labelled_sources.load(wanted(tmp_path / "one", label="label"))
    assert found.names == ["NA", "b"] and found.contents == TEXTS


@READERS
def test_a_damaged_saved_data_set_is_named(tmp_path, read):
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    path = tmp_path / "one" / "data-00001-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="data-00001-of-00002.arrow' cannot be read"):
        read(wanted(tmp_path / "one"))
    path.unlink()
    with pytest.raises(ValueError, match="data-00001-of-00002.arrow' is missing"):
        read(wanted(tmp_path / "one"))


@READERS
def test_a_missing_package_for_zstd_is_named(tmp_path, read, monkeypatch):
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ValueError, match="a.jsonl.zst' .*: pip install zstandard$"):
        read(wanted(tmp_path))
    with pytest.raises(ValueError, match="a.jsonl.zst' .*: pip install zstandard$"):
        local_files.text_files(tmp_path / "a.jsonl.zst")


@READERS
@pytest.mark.parametrize("ending", ["jsonl", "csv", "txt"])
def test_zstd_files_of_several_frames_are_whole_or_refused(tmp_path, ending, read):
    folder = tmp_path / "folder"
    folder.mkdir()
    content = content_of(ending, tmp_path)
    for number in range(2):
        own = content.replace(b"text 0", f"text {number}0".encode())
        frames = zstd(own[:40]) + zstd(own[40:])
        (folder / f"{number}.{ending}.zst").write_bytes(frames)
    assert len(read(wanted(folder))) == (2 if ending == "txt" else 2 * len(TEXTS))
    (folder / f"1.{ending}.zst").write_bytes(frames[:-3])
    with pytest.raises(ValueError, match="zst' cannot be read: EOFError: Compressed"):
        read(wanted(folder))


@READERS
def test_csv_and_tsv_in_one_folder_are_refused(tmp_path, read):
    (tmp_path / "a.csv").write_text("text\na\n")
    (tmp_path / "b.tsv").write_text("text\na\n")
    with pytest.raises(ValueError, match=r"several formats \(1 csv, 1 tsv\)"):
        read(wanted(tmp_path))


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("ending", ["txt", "TXT", "md"])
def test_compressed_texts_are_texts(tmp_path, packer, ending):
    for number in range(3):
        content = PACKERS[packer](f"text {number}\r\n".encode())
        (tmp_path / f"{number}.{ending}.{packer}".strip(".")).write_bytes(content)
    got = [
        "".join(document) for document in local_files.text_files(tmp_path).documents()
    ]
    assert got == [f"text {number}\r\n" for number in range(3)]


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tgz", "a.jsonl.gz", "a.gz"])
def test_a_folder_of_texts_refuses_what_is_no_text(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=f"{name}', which is .* and no plain text"):
        local_files.text_files(tmp_path)


MARK = "\ufeff".encode()


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(MARK + b"0123456789")
    [train, heldout] = local_files.text_files(tmp_path / "a.txt").documents()
    assert "".join(train) + "".join(heldout) == "0123456789"


@READERS
@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("csv", "text,n\nab,1\n"),
        ("csv", '"text",n\nab,1\n'),
        ("tsv", "text\tn\nab\t1\n"),
        ("txt", "ab"),
        ("json", '[{"text": "ab"}]'),
        ("jsonl", '{"text": "ab"}\n'),
    ],
)
def test_a_byte_order_mark_of_any_format_is_no_text(tmp_path, ending, content, read):
    for number in range(2):
        path = tmp_path / f"{number}.{ending}"
        path.write_bytes(MARK + content.replace("ab", f"ab{number}").encode())
    assert read(wanted(tmp_path)) == ["ab0", "ab1"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_wide_encodings_of_texts_are_named(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("abc".encode(encoding))
    with pytest.raises(ValueError, match=f"a.txt' is {encoding.upper()}: convert it"):
        local_files.text_files(tmp_path / "a.txt")


@pytest.mark.parametrize("packer", ["gz", "bz2", "xz", "zst"])
def test_damaged_compressed_texts_are_named(tmp_path, packer):
    content = PACKERS[packer](bytes(range(97, 123)) * 999)
    for kept in (content[: len(content) // 2], b"plain"):
        (tmp_path / f"a.txt.{packer}").write_bytes(kept)
        with pytest.raises(ValueError, match=f"a.txt.{packer}' cannot be read"):
            local_files.text_files(tmp_path / f"a.txt.{packer}")


@READERS
@pytest.mark.parametrize("name", ["TEST.JSONL", "Test.jsonl", "data/Eval-1.jsonl"])
def test_held_out_files_in_capitals_are_not_trained_on(tmp_path, name, read):
    content = content_of("jsonl", tmp_path)
    for file in ("TRAIN.JSONL", name):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"'{name}' would be trained on"):
        read(wanted(tmp_path))
    (tmp_path / "TRAIN.JSONL").unlink()
    assert sorted(read(wanted(tmp_path))) == sorted(TEXTS)


def test_words_that_hold_the_name_of_a_split_are_no_splits(tmp_path):
    for name in ("Latest.jsonl", "Contest.jsonl", "Devices.jsonl"):
        (tmp_path / name).write_bytes(content_of("jsonl", tmp_path))
    assert len(packed(wanted(tmp_path))) == 3 * len(TEXTS)


@READERS
def test_a_damaged_card_is_named(tmp_path, read):
    (tmp_path / "a.jsonl").write_bytes(content_of("jsonl", tmp_path))
    for content in (b"---\nconfigs: [:\n---\n", b"caf\xe9"):
        (tmp_path / "README.md").write_bytes(content)
        with pytest.raises(ValueError, match="README.md' cannot be read") as error:
            read(wanted(tmp_path))
        assert "\n" not in str(error.value)


@READERS
def test_files_that_cannot_be_found_are_a_short_line(tmp_path, read):
    card = "---\nconfigs:\n- config_name: one\n  data_files: gone.jsonl\n---\n"
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(ValueError, match="Unable to find '.*gone.jsonl'") as error:
        read(wanted(tmp_path))
    assert len(str(error.value)) < 400
    (tmp_path / "README.md").unlink()
    with pytest.raises(ValueError, match="has no files that can be read: give a local"):
        read(wanted(tmp_path))


@READERS
def test_saved_rows_without_what_describes_them_are_one_line(tmp_path, read):
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.select([]).save_to_disk(tmp_path / "empty")
    with pytest.raises(ValueError, match="has no rows in split 'train'"):
        read(wanted(tmp_path / "empty"))
    for name in ("state.json", "dataset_info.json"):
        rows.save_to_disk(tmp_path / name)
        (tmp_path / name / name).write_text('{"features": 3')
        with pytest.raises(ValueError, match=f"{name}' cannot be read: JSONDec"):
            read(wanted(tmp_path / name))
    (tmp_path / "state.json" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="state.json' cannot be read: KeyError"):
        read(wanted(tmp_path / "state.json"))
