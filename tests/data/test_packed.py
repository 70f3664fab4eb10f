"""Files of token ids that are deleted, cut or changed while they are read."""

import hashlib
import io
import os

import numpy as np
import pytest

from symjax.data import batches
from symjax.data.store import packed as module
from symjax.data.store.packed import PackedArray

TOKENS = np.arange(1009, dtype=np.uint16)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train.npy"
    np.save(path, TOKENS)
    return path


@pytest.fixture
def packed(path):
    content = path.read_bytes()
    return PackedArray(
        path, size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )


def drawn(tokens):
    return batches.training_windows(tokens, np.arange(10, 15), 7, 3)


@pytest.mark.parametrize("piece", [(0, 9), (5, 2000), (1008, 1009), (7, 7), (2000, 9)])
def test_slices_are_those_of_the_array(packed, piece):
    found = packed[slice(*piece)]
    assert found.dtype == TOKENS.dtype
    assert np.array_equal(found, TOKENS[slice(*piece)])


def test_it_stands_for_the_array(packed):
    assert len(packed) == len(TOKENS)
    assert np.array_equal(np.asarray(packed), TOKENS)
    assert np.array_equal(np.asarray(packed, np.int64), TOKENS)
    assert np.array_equal(drawn(packed), drawn(TOKENS))
    found, expected = (
        batches.heldout_windows(tokens, np.arange(150), 7)
        for tokens in (packed, TOKENS)
    )
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def test_a_deleted_or_replaced_file_is_read_to_the_end(packed, path, tmp_path):
    assert not packed.vanished
    path.unlink()
    assert packed.vanished
    np.save(path, TOKENS[::-1])
    assert packed.vanished
    assert np.array_equal(drawn(packed), drawn(TOKENS))


def test_a_file_that_is_cut_is_an_error_and_not_the_end_of_the_process(packed, path):
    os.truncate(path, 300)
    message = f"{str(path)!r} is damaged .cut short while in use.: delete the folder"
    with pytest.raises(ValueError, match=message):
        drawn(packed)


def test_a_byte_that_changes_is_an_error_wherever_it_is(packed, path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(path, (1, 1))  # so that a coarse clock shows the write
    with pytest.raises(ValueError, match="is damaged .its sha256 has changed."):
        packed[:3]


def test_a_file_that_is_touched_is_the_same_file(packed, path):
    os.utime(path, (1, 1))
    assert np.array_equal(drawn(packed), drawn(TOKENS))


def test_a_file_system_that_is_lost_is_one_line(packed, path, monkeypatch):
    def lost(*arguments):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "pread", lost)
    with pytest.raises(ValueError, match="cannot be read: Stale file handle"):
        drawn(packed)


def test_a_dropped_corpus_closes_its_file(path, packed):
    held = PackedArray(path, size=path.stat().st_size, sha256=packed.sha256)
    descriptor = held._descriptor
    os.fstat(descriptor)
    del held
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_of_a_large_file_a_sample_is_compared(path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLED_FROM", 1000)
    monkeypatch.setattr(module, "BLOCK", 2)
    content = bytearray(path.read_bytes())
    size = len(content)
    facts = {"size": size, "sha256": hashlib.sha256(content).hexdigest()}
    facts["sample"] = module.sample_hash(io.BytesIO(content), size)
    PackedArray(path, **facts).verify()
    for place, sampled in ((0, True), (size - 1, True), (350, False)):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        said = "a sample of it has changed" if sampled else "its sha256 has changed"
        with pytest.raises(ValueError, match=said):
            PackedArray(path, **facts).verify()
    assert PackedArray(path, **facts)  # bytes outside of the sample are not checked
    with pytest.raises(ValueError, match="its sha256 has changed"):
        PackedArray(path, **{**facts, "sample": ""})
