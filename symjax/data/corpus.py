"""A corpus: the tokens of a source, packed once into a folder and memory mapped.

The folder holds `train.npy`, `heldout.npy` and `corpus.json`. The JSON file is written
last, so a folder without it is not a corpus and is built again; with it the source is
not needed any more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from symjax import config
from symjax.data import batches, ngrams, sources, tokens

SPLITS = ("train", "heldout")
SEPARATOR = "\0"  # between two documents; a single document has none
MANIFEST = "corpus.json"
UNFINISHED = ".unfinished-"
STALE = 3600.0  # seconds after which an unfinished folder has no owner any more
WAY_OUT = "delete the folder to build it again"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Packed text.

    Attributes:
        train, heldout: token ids [T], memory mapped uint8, uint16 or uint32.
        tokenizer: what turned text into these ids.
        fingerprint: plain values that identify the text: source, sha256, versions,
            and for each split its documents, tokens and bytes.
        ngrams: held-out cross-entropy of "unigram", "bigram" and "trigram", nats per
            token.
        bytes_per_token: UTF-8 bytes a held-out token, for bits per byte.
    """

    train: np.ndarray
    heldout: np.ndarray
    tokenizer: tokens.Tokenizer
    fingerprint: dict[str, Any]
    ngrams: dict[str, float]
    bytes_per_token: float

    def check_length(self, length: int) -> None:
        """Refuse a model longer than the text, before anything is compiled.

        Raises:
            ValueError: train or held-out is shorter than length + 1 tokens.
        """
        source = self.fingerprint["source"]
        key = "data.path" if source == "text" else f"data.source={source}"
        batches.check_length(self.train, length, "training", key)
        batches.check_length(self.heldout, length, "held-out", key)


def open_corpus(
    options: config.Data, directory: Path, *, replace: bool = False
) -> Corpus:
    """The corpus of a folder, built from its source the first time.

    Killed at any moment, the build leaves no corpus or a whole one. An existing corpus
    is used without its source. Two processes may build at once: both write the same.

    Args:
        replace: build anew over a corpus of other options, or a damaged one, as long
            as nothing has been trained on it.
    Raises:
        ValueError: the source cannot be read, the folder holds a corpus of other
            options, or a file of it is damaged.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).exists():
        _build(options, directory)
    elif replace:
        try:
            return open_corpus(options, directory)
        except ValueError:
            _build(options, directory)
    manifest = _manifest(directory)
    _check_options(manifest["options"], dataclasses.asdict(options), directory)
    arrays = {split: _map(directory, split, manifest["files"]) for split in SPLITS}
    heldout = manifest["fingerprint"]["heldout"]
    return Corpus(
        train=arrays["train"],
        heldout=arrays["heldout"],
        tokenizer=tokens.from_description(manifest["tokenizer"]),
        fingerprint=manifest["fingerprint"],
        ngrams=manifest["ngrams"],
        bytes_per_token=heldout["bytes"] / heldout["tokens"],
    )


def _build(options: config.Data, directory: Path) -> None:
    """Pack the source into temporary files, then move them in, the manifest last."""
    documents = sources.load(options)
    texts = {split: SEPARATOR.join(documents[split]["text"]) for split in SPLITS}
    tokenizer = tokens.build(options.tokenizer, texts.values())
    packed = {split: tokenizer.encode(text) for split, text in texts.items()}
    lines = ngrams.cross_entropies(
        packed["train"], packed["heldout"], tokenizer.vocabulary
    )
    encoded = {split: text.encode("utf-8") for split, text in texts.items()}
    fingerprint: dict[str, Any] = {
        "source": options.source,
        "sha256": hashlib.sha256(b"".join(encoded.values())).hexdigest(),
        "python": platform.python_version(),
        "datasets": version("datasets"),
    }
    for split in SPLITS:
        fingerprint[split] = {
            "documents": len(documents[split]),
            "tokens": len(packed[split]),
            "bytes": len(encoded[split]),
        }
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=directory) as unfinished:
        files = {}
        for split in SPLITS:
            path = Path(unfinished, f"{split}.npy")
            np.save(path, packed[split])
            files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        manifest = {
            "options": dataclasses.asdict(options),
            "tokenizer": tokenizer.describe(),
            "fingerprint": fingerprint,
            "ngrams": lines,
            "files": files,
        }
        Path(unfinished, MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for name in (*files, MANIFEST):
            os.replace(Path(unfinished, name), directory / name)


def _sweep(directory: Path) -> None:
    """Remove what killed builds left, but not what another process is writing now."""
    for path in directory.glob(f"{UNFINISHED}*"):
        try:
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path)
        except OSError:
            continue  # another process was faster


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    parts = {"options", "tokenizer", "fingerprint", "ngrams", "files"}
    if not isinstance(manifest, dict) or not parts <= manifest.keys():
        raise ValueError(
            f"corpus file {str(path)!r} is damaged (not the JSON of a corpus): "
            f"{WAY_OUT}"
        )
    return manifest


def _check_options(
    stored: dict[str, Any], wanted: dict[str, Any], directory: Path
) -> None:
    stored = dataclasses.asdict(config.Data()) | stored  # keys it did not have yet
    different = [
        f"data.{name}: {stored[name]!r} → {value!r}"
        for name, value in wanted.items()
        if stored[name] != value
    ]
    if different:
        raise ValueError(
            f"corpus {str(directory)!r} was built with other options "
            f"({', '.join(different)}): use another --workdir"
        )


def _map(directory: Path, split: str, files: dict[str, Any]) -> np.ndarray:
    """A packed split, after comparing its bytes with what the manifest promises."""
    path = directory / f"{split}.npy"
    recorded = files[path.name]
    size = path.stat().st_size if path.exists() else None
    if size is None:
        problem = "missing"
    elif size != recorded["size"]:
        problem = f"{size} bytes, {recorded['size']} were written"
    elif _sha256(path) != recorded["sha256"]:
        problem = "its sha256 has changed"
    else:
        return np.load(path, mmap_mode="r")
    raise ValueError(f"corpus file {str(path)!r} is damaged ({problem}): {WAY_OUT}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
