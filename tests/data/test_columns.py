"""The requested column is read, whatever other columns hold.

Packing and streams read alike.
"""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets.arrow_writer import ArrowWriter

from symjax import config
from symjax.data.sources import builders, hub, json_tables, labelled_sources

TEXTS = ["one two\nthree", "NA", "é\u2028 nul\0l", "null", "[3]", "17"] * 3


def wanted(folder, **keys):
    return config.Data(source="hub", name=str(folder), **keys)


def packed(options) -> list[str]:
    return ["".join(document) for document in hub.load(options)[0].documents()]


def streamed(options) -> list[str]:
    rows, _ = hub.open_streams(options, "")
    return [text for text, _ in hub.streamed_texts(options, rows[0])]


READERS = pytest.mark.parametrize("read", [packed, streamed])


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("_", ".", 1)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@READERS
def test_csv_has_no_missing_values(tmp_path, read):
    names = "None NA null nan N/A true #N/A n/a 12 0.5 NULL -nan text".split()
    write(tmp_path, a_csv="text\n" + "\n".join(names) + "\n")
    assert read(wanted(tmp_path)) == names


@READERS
def test_a_csv_column_is_text_whatever_it_looks_like(tmp_path, read):
    numbers = [f"00{number}" for number in range(11_000)]  # a chunk has 10,000 rows
    write(tmp_path, a_csv="\n".join(["id,text", *(f"1,{x}" for x in numbers), "x,y"]))
    assert read(wanted(tmp_path)) == [*numbers, "y"]


def test_labels_that_look_like_missing_values_are_labels(tmp_path):
    rows = [f"text {x},{'NA US FR'.split()[x % 3]}" for x in range(45)]
    write(tmp_path, a_csv="\n".join(["text,label", *rows]))
    found = labelled_sources.load(wanted(tmp_path, label="label"))
    assert found.names == ["FR", "NA", "US"] and len(found.labels) == 45


def test_numbers_as_labels_are_in_their_order(tmp_path):
    rows = [(f"text {x}", x % 12) for x in range(48)]
    write(tmp_path, a_csv="text,label\n" + "\n".join(f"{x},{y}" for x, y in rows))
    csv = labelled_sources.load(wanted(tmp_path, label="label"))
    (tmp_path / "a.csv").unlink()
    write(tmp_path, a_jsonl=lines(*({"text": x, "label": y} for x, y in rows)))
    found = labelled_sources.load(wanted(tmp_path, label="label"))
    assert found.names == csv.names == list(map(str, range(12)))
    assert found.labels == csv.labels == [y for _, y in rows]


ROWS = [{"text": text} for text in TEXTS]
LONG = "x" * 2000
UNASKED = {
    "null, then a struct in another file": [
        lines(*({**row, "meta": None} for row in ROWS)),
        lines({"text": "z", "meta": {"a": 1}}),
    ],
    "null for 9,000 rows, then a text": [
        lines(*[{"text": LONG, "meta": None}] * 9000, {"text": "z", "meta": "b"})
    ],
    "a column more in another file": [
        lines(*ROWS),
        lines({"text": "z", "url": "u"}),
    ],
    "another type in another file": [
        lines({"text": "y", "id": 1}),
        lines({"text": "z", "id": "x1"}),
    ],
    "another type in another row": [
        lines({"text": "y", "id": 1}, {"text": "z", "id": [{}]}, {"id": 1, "text": "w"})
    ],
    "a key twice, a half of a pair, a large number": [
        '{"meta": 1, "text": "y", "meta": [1]}\n'
        '{"meta": "\\ud83d", "text": "z"}\n{"meta": 1e999, "text": "z"}\n'
        + '{"meta": %s, "text": "z"}\n'
        % ("9" * 5000)
    ],
}


@READERS
@pytest.mark.parametrize("what", UNASKED)
def test_columns_that_are_not_asked_for_change_nothing(tmp_path, what, read):
    for number, content in enumerate(UNASKED[what]):
        (tmp_path / f"{number}.jsonl").write_text(content)
    whole = "".join(UNASKED[what]).replace("9" * 5000, "9")
    texts = [json.loads(x)["text"] for x in whole.splitlines()]
    assert read(wanted(tmp_path)) == texts


@READERS
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_typed_files_may_differ_in_other_columns(tmp_path, ending, read):
    for number, more in enumerate([{"id": [1, 2]}, {"id": ["a", "b"], "u": [0, 1]}]):
        rows = datasets.Dataset.from_dict({"text": ["y", "z"], **more})
        path = tmp_path / f"{number}.{ending}"
        if ending == "parquet":
            rows.to_parquet(path)
        else:
            with ArrowWriter(path=str(path)) as writer:
                writer.write_table(rows.data.table)
                writer.finalize()
    assert read(wanted(tmp_path)) == ["y", "z"] * 2


@pytest.mark.parametrize("kind", ["text", "parquet", "csv", "json"])
def test_what_is_prepared_offline_is_found_by_its_columns(kind):
    """`datasets` finds prepared data by the options it was prepared with."""
    one, other = ({"column": name} for name in ("text", "body"))
    options = builders.builder_options(kind, one)
    made = datasets.load_dataset_builder(
        kind, data_files={"train": [__file__]}, **options
    )
    assert "features" not in options and made.config_kwargs.items() >= options.items()
    assert (options != builders.builder_options(kind, other)) == (kind != "text")


@READERS
def test_a_damaged_split_that_is_not_used_changes_nothing(tmp_path, read):
    write(tmp_path, train_jsonl=lines(*ROWS), test_jsonl="{")
    write(tmp_path, validation_jsonl=lines({"text": "held out"}))
    assert read(wanted(tmp_path))[: len(TEXTS)] == TEXTS


def pretty(rows) -> str:
    return "\n".join(json.dumps(row, indent=1) for row in rows)


SHAPES = {
    "lines": lines(*ROWS),
    "blank lines": "\n" + lines(*ROWS).replace("\n", "\r\n \r\n"),
    "no end": lines(*ROWS).strip(),
    "a mark": "\ufeff" + lines(*ROWS),
    "objects of several lines": pretty(ROWS),
    "a list": json.dumps(ROWS, indent=1),
    "a list of texts": json.dumps(TEXTS),
    "a list after a mark": "\ufeff[" + json.dumps(ROWS)[1:],
    "two a line": lines(*ROWS).replace("\n", ""),
    "a line, then objects of several lines": lines(ROWS[0]) + pretty(ROWS[1:]),
}


@READERS
@pytest.mark.parametrize("shape", SHAPES)
def test_json_of_any_shape_is_the_same_rows(tmp_path, shape, read):
    write(tmp_path, a_json=SHAPES[shape])
    assert read(wanted(tmp_path)) == TEXTS


GOOD = lines(*ROWS)
DAMAGED = {
    "cut off": (
        "jsonl",
        GOOD + '{"text": "cut off he',
        "line 19, column 10: Unterminated string",
    ),
    "cut in the first line": (
        "jsonl",
        '{"text": "cut',
        "line 1, column 10: Unterminated string",
    ),
    "cut in an object": ("json", pretty(ROWS)[:-3], "line 53, column 10: Unterminated"),
    "half of a pair": (
        "jsonl",
        GOOD + '{"text": "half \\ud83d here"}\n',
        "line 19 has half of a surrogate pair in 'text'",
    ),
    "a key twice": (
        "jsonl",
        GOOD + '{"text": "a", "text": "b"}\n' + GOOD,
        "line 19 has the key 'text' twice",
    ),
    "no object": ("jsonl", GOOD + "17\n", "line 19 is no object, but int"),
    "no text": ("jsonl", GOOD + '{"text": 17}\n', "but int, in line 19"),
    "bytes of Latin-1": (
        "jsonl",
        GOOD.encode() + b'{"text": "caf\xe9"}\n',
        "line 19 is not UTF-8 (byte 0xe9)",
    ),
    "bytes of Latin-1 in CSV": (
        "csv",
        b"text\n" + b"plain\n" * 9 + b"caf\xe9\n",
        "line 11 is not UTF-8 (byte 0xe9)",
    ),
    "bytes of Latin-1 in text": ("txt", b"one\ncaf\xe9\n", "line 2 is not UTF-8"),
    "UTF-16": ("jsonl", GOOD.encode("utf-16"), "it is UTF-16: convert it to UTF-8"),
    "UTF-16 in CSV": ("csv", "text\nabc\n".encode("utf-16"), "it is UTF-16: convert"),
    "UTF-16 in text": ("txt", "abc\n".encode("utf-16"), "it is UTF-16: convert"),
    "a delimiter more a line": ("csv", "text,n\na,1,\nb,2,\n", "but the header does"),
    "a line break in a text": (
        "jsonl",
        GOOD + '{"text": "a\nb"}',
        "line 19, column 12",
    ),
    "a row too long": ("csv", "text,n\na,1\nb,2,3,4\n", "line 3: 4 fields, where 2"),
    "a row too long after a text of several lines": (
        "csv",
        'text,n\n"a\nb\n""c",1\n\nb,2,3\n',
        "line 6: 3 fields, where 2 are expected",
    ),
    "more fields than columns": (
        "csv",
        "text\nHello, world\nplain\n",
        "its lines have more fields than the header",
    ),
    "an open quote": ("csv", 'text\na\n"b\n', "line 3: a quote opens that is not"),
    "an open quote after a text of several lines": (
        "csv",
        'text\r\n"a\r\nb"\r\n"c\r\n',
        "line 4: a quote opens that is not closed",
    ),
    "half of gzip": (
        "jsonl.gz",
        gzip.compress(GOOD.encode() * 999)[:-200],
        "end-of-stream marker",
    ),
    "no gzip": ("jsonl.gz", b"plain", "BadGzipFile"),
    "no parquet": ("parquet", b"PAR1 and no more", "ArrowInvalid"),
    "no bytes of parquet": ("parquet", b"", "ArrowInvalid"),
}


@READERS
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_named_with_the_reason(tmp_path, what, read):
    ending, content, reason = DAMAGED[what]
    path = tmp_path / f"damaged.{ending}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        read(wanted(tmp_path))
    said = str(error.value)
    assert reason in said and repr(str(path)) in said and "\n" not in said


@READERS
def test_a_parquet_file_with_texts_that_are_no_utf8_is_named(tmp_path, read):
    latin = pyarrow.array([b"plain", b"caf\xe9"]).buffers()
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, latin)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet' cannot be read: .* UTF8 .* 1"):
        read(wanted(tmp_path))


@READERS
def test_parquet_files_without_rows_are_parts_of_a_data_set(tmp_path, read):
    table = pyarrow.table({"text": TEXTS})
    for name, rows in (("a", table[:0]), ("b", table), ("c", table[:0])):
        pyarrow.parquet.write_table(rows, tmp_path / f"{name}.parquet")
    assert read(wanted(tmp_path)) == TEXTS


@READERS
def test_texts_may_be_string_views(tmp_path, read):
    table = pyarrow.table({"text": pyarrow.array(TEXTS, pyarrow.string_view())})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    assert read(wanted(tmp_path)) == TEXTS


@READERS
def test_one_damaged_file_of_several_is_named(tmp_path, read):
    for number in range(5):
        write(tmp_path, **{f"{number}_jsonl": GOOD})
    (tmp_path / "3.jsonl").write_text(GOOD + "{\n")
    with pytest.raises(ValueError, match="3.jsonl', line 19, column 2: Expecting"):
        read(wanted(tmp_path))


@READERS
def test_one_cut_off_parquet_file_of_several_is_named(tmp_path, read):
    for number in range(3):
        path = tmp_path / f"{number}.parquet"
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(path)
    (tmp_path / "1.parquet").write_bytes(path.read_bytes()[:-90])
    with pytest.raises(ValueError, match="1.parquet' cannot be read: ArrowInvalid"):
        read(wanted(tmp_path))


@READERS
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "arrow", "txt"])
def test_an_unknown_column_is_named_with_those_there_are(tmp_path, ending, read):
    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": TEXTS})
    known = "text, n"
    if ending == "jsonl":
        write(tmp_path, a_jsonl=lines(*({**row, "n": 1} for row in ROWS)))
    elif ending == "csv":
        write(tmp_path, a_csv="text,n\na,1\n")
    elif ending == "txt":
        write(tmp_path, a_txt="abc")
        known = "text"
    elif ending == "parquet":
        rows.to_parquet(tmp_path / "a.parquet")
    else:
        with ArrowWriter(path=str(tmp_path / "a.arrow")) as file:
            file.write_table(rows.data.table)
            file.finalize()
    with pytest.raises(ValueError, match=f"data.column 'b' is unknown: .* {known}"):
        read(wanted(tmp_path, column="b"))


@READERS
def test_a_key_may_begin_after_many_rows_of_json(tmp_path, read, capsys):
    without = [{"n": 1}] * (2 * json_tables.ROWS_PER_TABLE + 1)
    write(tmp_path, a_jsonl=lines(*without, *ROWS), b_jsonl=lines(*without))
    assert sorted(read(wanted(tmp_path))) == sorted(x for x in TEXTS if x)
    if read is packed:
        said = capsys.readouterr().err
        assert f"rows without text in 'text': {2 * len(without):,}, such as" in said
    with pytest.raises(ValueError, match=r"'b' is unknown: .* n, in '.*a\.jsonl'"):
        read(wanted(tmp_path, column="b"))


def test_files_without_a_row_are_one_line(tmp_path):
    write(tmp_path, a_jsonl="", b_jsonl="\n")
    with pytest.raises(ValueError, match="data.name .* has no rows in split 'train'"):
        packed(wanted(tmp_path))
