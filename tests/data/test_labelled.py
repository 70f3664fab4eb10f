"""Labelled texts and images: split by label, cut into rows, kept in a folder."""

import sys
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest

from symjax import config
from symjax.data.examples import open_examples
from symjax.data.labelled import labelled_examples, open_labelled
from symjax.data.sources import labelled_sources, local_files, splits

SHAPE = (4, 16)
ENCODER = config.Model(kind="encoder", classes=2)
REVIEWS = [(f"film {i} was {w}", w) for i in range(40) for w in ("good", "bad")]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return open_labelled(config.Data(source="digits"), tmp_path_factory.mktemp("d"))


def write_rows(folder, split="train", rows=REVIEWS, names=None):
    texts, labels = zip(*rows, strict=True)
    table = datasets.Dataset.from_dict({"text": texts, "label": labels})
    if names:
        table = table.cast_column("label", datasets.ClassLabel(names=names))
    table.to_parquet(folder / f"{split}.parquet")


def hub(folder, **more):
    return config.Data(source="hub", name=str(folder), label="label", **more)


def rows_of(found, side="train", length=16):
    """Return every row of a split once, as (tokens without pads, label)."""
    everything = np.arange(len(found.pieces(side, length).labels))
    inputs, targets = found.rows(side, everything, length)
    return inputs, targets[:, 0]


def test_every_label_is_held_out_in_the_same_share_and_no_copy_is_on_both_sides():
    keys = [splits.sha256(str(i // 2)) for i in range(1000)]  # every one twice
    labels = [0 if i < 700 else 1 for i in range(1000)]
    held = splits.stratified(keys, labels)
    assert held == splits.stratified(keys, labels)
    assert Counter(y for y, here in zip(labels, held, strict=True) if here) == {
        0: 140,
        1: 60,
    }
    sides = dict(zip(keys, held, strict=True))
    assert all(sides[key] == here for key, here in zip(keys, held, strict=True))
    with pytest.raises(ValueError, match="label 1 has one example, or only copies"):
        splits.stratified(["a", "b", "c", "c"], [0, 0, 1, 1])


def test_digits_are_split_by_class_and_none_is_on_both_sides(digits):
    sides = [rows_of(digits, side) for side in ("train", "heldout")]
    assert sum(len(labels) for _, labels in sides) == 1797
    pixels = [{x.tobytes() for x in inputs} for inputs, _ in sides]
    assert not pixels[0] & pixels[1]
    (inputs, train), (_, heldout) = sides
    shares = np.bincount(heldout) / np.bincount(np.concatenate([train, heldout]))
    np.testing.assert_allclose(shares, 0.2, atol=0.01)
    assert inputs.shape[1:] == (8, 8, 1) and inputs.dtype == np.float32
    assert inputs.min() == 0 and inputs.max() == 1


def test_digits_are_those_of_scikit_learn(digits):
    from sklearn.datasets import load_digits

    found = {
        (image.tobytes(), int(label))
        for side in ("train", "heldout")
        for image, label in zip(*rows_of(digits, side), strict=True)
    }
    known = load_digits(return_X_y=True)
    assert found == {
        ((x / 16).astype(np.float32).tobytes(), int(y))
        for x, y in zip(*known, strict=True)
    }


def test_an_epoch_shows_every_row_once_and_processes_get_their_own(digits):
    steps = 1438 // 2  # of two rows
    seen, examples = Counter(), labelled_examples(digits, 16)
    for step in range(steps):
        inputs, _ = examples.batch_reader((2, 16), seed=3, step=step)(0, 2)
        seen.update(x.tobytes() for x in inputs)
    assert seen == Counter(x.tobytes() for x in rows_of(digits)[0])
    rows = examples.batch_reader(SHAPE, seed=3, step=800)
    for one, two, both in zip(rows(0, 1), rows(1, 4), rows(0, 4), strict=True):
        np.testing.assert_array_equal(np.concatenate([one, two]), both)
    other = examples.batch_reader(SHAPE, seed=4, step=800)(0, 4)
    assert (other[0] != rows(0, 4)[0]).any()


def test_what_is_held_out_is_judged_once(digits):
    total, examples = 0, labelled_examples(digits, 16)
    for rows in examples.heldout_batches((50, 16)):
        inputs, targets, weights = rows(0, 50)
        assert inputs.shape == (50, 8, 8, 1) and targets.shape == weights.shape
        total += weights.sum()
    assert total == 359 and examples.heldout_count((50, 16)) == 8


def test_packages_are_split_by_file(tmp_path):
    packages = local_files.packages()
    assert len(packages) == 8 and min(map(len, packages.values())) >= 5
    found = labelled_sources.load(config.Data(source="packages"))
    assert found.names == sorted(packages)
    counts = [
        Counter(
            y for y, held in zip(found.labels, found.held, strict=True) if held == x
        )
        for x in (False, True)
    ]
    for number, name in enumerate(found.names):
        files = len(packages[name])
        assert counts[0][number] + counts[1][number] == files
        assert counts[1][number] == max(1, round(files / 5))


def test_a_long_text_is_cut_and_a_short_one_filled_with_pads(tmp_path):
    """The pieces of a text, joined again, are the text."""
    rows = [("a" * 16, "x"), ("b" * 37, "y"), ("cd", "x"), ("é" * 9, "y")] * 1
    write_rows(tmp_path, rows=rows)
    write_rows(tmp_path, "test", rows=rows)
    found = open_labelled(hub(tmp_path), tmp_path / "data")
    inputs, labels = rows_of(found)
    pieces = [bytes(row[row >= 0].tolist()) for row in inputs]
    wanted = [b"a" * 16, b"b" * 16, b"b" * 16, b"b" * 5, b"cd", "éééééééé".encode()]
    assert pieces == [*wanted, "é".encode()]
    assert labels.tolist() == [0, 1, 1, 1, 0, 1, 1]
    pads = (inputs < 0).sum(axis=1)
    assert pads.tolist() == [0, 0, 0, 11, 14, 0, 14]
    assert (inputs[np.arange(7), -1] < 0).tolist() == (pads > 0).tolist()


def test_a_data_set_of_the_hub_is_read_by_its_columns(tmp_path):
    write_rows(tmp_path, names=None)
    found = open_labelled(hub(tmp_path), tmp_path / "data")
    assert found.labels == ["bad", "good"] and found.fingerprint["label"] == "label"
    examples = labelled_examples(found, 16)
    assert examples.size == "64 training texts of 2 labels"
    for side, count in (("train", 64), ("heldout", 16)):
        inputs, labels = rows_of(found, side, 30)
        texts = [bytes(row[row >= 0].tolist()).decode() for row in inputs]
        assert len(texts) == count
        ends = [text.split()[-1] for text in texts]
        assert ends == [found.labels[label] for label in labels]


def test_named_labels_keep_their_order_and_rows_without_one_are_left_out(tmp_path):
    rows = [("one", 1), ("two", 0), ("none", -1), ("", 1), ("three", 1)]
    write_rows(tmp_path, rows=rows, names=["pos", "neg"])
    write_rows(tmp_path, "test", rows=rows[:2], names=["pos", "neg"])
    found = open_labelled(hub(tmp_path), tmp_path / "data")
    assert found.labels == ["pos", "neg"]
    assert rows_of(found)[1].tolist() == [1, 0, 1]
    assert rows_of(found, "heldout")[1].tolist() == [1, 0]


def images(folder, sizes=((4, 6), (4, 6))):
    from PIL import Image

    random = np.random.default_rng(0)
    shapes = [(*sizes[i % 2], 3) for i in range(20)]
    pixels = [random.integers(0, 256, shape, np.uint8) for shape in shapes]
    table = datasets.Dataset.from_dict(
        {
            "img": list(map(Image.fromarray, pixels)),
            "label": [0, 1] * 10,
        },
        features=datasets.Features(
            {"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
        ),
    )
    table.to_parquet(folder / "train.parquet")
    return pixels


def test_images_of_the_hub_keep_their_pixels(tmp_path):
    pixels = images(tmp_path)
    found = open_labelled(hub(tmp_path, column="img"), tmp_path / "data")
    assert found.image == (4, 6, 3) and labelled_examples(found, 16).vocabulary == 0
    seen = [x for side in ("train", "heldout") for x in rows_of(found, side)[0]]
    assert {(255 * x).round().astype(np.uint8).tobytes() for x in seen} == {
        x.tobytes() for x in pixels
    }


def test_images_whose_pixels_need_more_than_8_bits_are_refused(tmp_path):
    from PIL import Image

    for number in range(4):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((3, 4), 1000 * number, np.uint16)).save(path)
    with pytest.raises(ValueError, match="0.png', row 1 .* more than 8 bits .mode 'I"):
        labelled_sources.load(hub(tmp_path, column="image"))


def test_a_label_that_has_copies_only_is_named(tmp_path):
    write_rows(tmp_path, rows=[*REVIEWS, *[("the same film", "odd")] * 5])
    with pytest.raises(ValueError, match="label 'odd' has one example, or only copies"):
        labelled_sources.load(hub(tmp_path))


def test_the_folder_is_enough_and_a_damaged_one_is_refused(tmp_path):
    write_rows(tmp_path)
    options, data = hub(tmp_path), tmp_path / "data"
    before = open_labelled(options, data)
    (tmp_path / "train.parquet").unlink()
    again = open_labelled(options, data)
    for one, other in zip(rows_of(before), rows_of(again), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="data.column: 'text' → 'x'"):
        open_labelled(replace(options, column="x"), data)
    path = before.parts["train_labels"].path
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match="train_labels.npy' is damaged"):
        open_labelled(options, data)


def test_what_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    write_rows(tmp_path)
    with pytest.raises(ValueError, match="data.label 'stars' is unknown: choose from"):
        open_labelled(replace(hub(tmp_path), label="stars"), tmp_path / "a")
    write_rows(tmp_path, "test", rows=[("x", "ugly")])
    with pytest.raises(ValueError, match="label 'ugly' in split 'test' only, training"):
        open_labelled(hub(tmp_path), tmp_path / "a")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    images(pictures, sizes=((4, 6), (5, 6)))
    with pytest.raises(ValueError, match=r"several sizes: \(4, 6, 3\) and \(5, 6, 3\)"):
        open_labelled(hub(pictures, column="img"), tmp_path / "a")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match="data.column 'img' holds images, which need"):
        open_labelled(hub(pictures, column="img"), tmp_path / "a")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        open_labelled(config.Data("digits", cache=str(tmp_path)), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("data", "model", "words"),
    [
        ({"source": "digits"}, {}, "'digits' has labels: set model.kind to 'encoder'"),
        ({"source": "hub", "label": "y"}, {}, "data.label 'y' has labels"),
        ({}, {"kind": "encoder", "classes": 2}, "'stdlib' has no labels; packages,"),
        ({"source": "copy"}, {"kind": "encoder"}, "has next tokens as targets"),
        ({"label": "y"}, {"classes": 2}, "data.label 'y' is read by data.source=hub"),
    ],
)
def test_a_model_and_its_examples_must_fit(data, model, words, tmp_path):
    options = config.Config(data=config.Data(**data), model=config.Model(**model))
    with pytest.raises(ValueError, match=words):
        open_examples(options, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_the_frequency_of_labels_is_a_reference(tmp_path):
    """Three labels to one in both splits; the reference is their entropy in nats."""
    rows = [(f"{i:02d}", "xxxy"[i % 4]) for i in range(40)]
    write_rows(tmp_path, rows=rows)
    write_rows(tmp_path, "test", rows=rows)
    found = open_labelled(hub(tmp_path), tmp_path / "data")
    wanted = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    references = labelled_examples(found, 16).references
    assert references["frequency"] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("length, pieces", [(16, 1), (8, 2), (4, 4)])
def test_the_frequency_of_labels_is_that_of_rows_however_long_they_are(
    tmp_path, length, pieces
):
    """One long text to three short ones; the long text counts as several rows."""
    rows = [
        (f"{i:02d}".ljust(15 if i % 4 == 3 else 2, "."), "xxxy"[i % 4])
        for i in range(40)
    ]
    write_rows(tmp_path, rows=rows)
    write_rows(tmp_path, "test", rows=rows)
    found = open_labelled(hub(tmp_path), tmp_path / "data")
    share = np.array([3, pieces]) / (3 + pieces)
    wanted = -(share * np.log(share)).sum()
    references = labelled_examples(found, length).references
    assert references["frequency"] == pytest.approx(wanted, abs=1e-3)
