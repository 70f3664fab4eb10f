"""A corpus: the tokens of a source, packed once into a folder and read from there.

The folder holds `train.npy`, `heldout.npy` and `corpus.json`. The JSON file is written
last, so a folder without it is not a corpus and is built again; with it the source is
not needed any more. If its files are still there, `source_change` says whether they are
what was packed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from symjax import config
from symjax.data import ngrams, sources, tokens
from symjax.data.packed import WAY_OUT, Packed
from symjax.files import UNFINISHED, replaced

SPLITS = ("train", "heldout")
SEPARATOR = "\0"  # between two documents; a single document has none
Result = TypeVar("Result")
MANIFEST = "corpus.json"
STALE = 3600.0  # seconds after which an unfinished folder has no owner any more
TEXT_KEYS = {"text": "data.path", "hub": "data.name"}  # what a user changes


@dataclass(frozen=True, eq=False)
class Corpus:
    """Packed text.

    Attributes:
        train, heldout: token ids [T] in files, uint8, uint16 or uint32.
        tokenizer: what turned text into these ids.
        fingerprint: plain values that identify the text: source, sha256, versions,
            and for each split its documents, tokens and bytes.
        references: held-out cross-entropy of "unigram", "bigram" and "trigram", nats
            per token.
        bytes_per_token: UTF-8 bytes a held-out token, for bits per byte.
    """

    train: Packed
    heldout: Packed
    tokenizer: tokens.Tokenizer
    fingerprint: dict[str, Any]
    references: dict[str, float]
    bytes_per_token: float

    def check_length(self, length: int) -> None:
        """Refuse a model longer than the text, before anything is compiled.

        Raises:
            ValueError: train or held-out is shorter than length + 1 tokens.
        """
        source = self.fingerprint["source"]
        key = TEXT_KEYS.get(source, f"data.source={source}")
        check_length(self.train, length, "training", key)
        check_length(self.heldout, length, "held-out", key)


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
    return built(_read, _build, options, Path(directory), replace=replace)


def built(
    read: Callable[[config.Data, Path], Result],
    build: Callable[[config.Data, Path], None],
    options: config.Data,
    directory: Path,
    *,
    replace: bool,
) -> Result:
    """What a folder holds, built the first time, or anew if it cannot be read."""
    fresh = not (directory / MANIFEST).exists()
    if fresh:
        build(options, directory)
    try:
        return read(options, directory)
    except ValueError:
        if fresh or not replace:
            raise
    build(options, directory)
    return read(options, directory)


def _read(options: config.Data, directory: Path) -> Corpus:
    manifest = read_manifest(directory)
    check_options(manifest["options"], options, directory)
    parts = {
        split: Packed(directory / f"{split}.npy", **manifest["files"][f"{split}.npy"])
        for split in SPLITS
    }
    heldout = manifest["fingerprint"]["heldout"]
    return Corpus(
        **parts,
        tokenizer=tokens.from_description(manifest["tokenizer"]),
        fingerprint=manifest["fingerprint"],
        references=manifest["ngrams"],
        bytes_per_token=heldout["bytes"] / heldout["tokens"],
    )


def check_length(
    tokens: np.ndarray | Packed, length: int, split: str, key: str = "data.path"
) -> None:
    """Refuse a text shorter than one window.

    Raises:
        ValueError: naming both sizes.
    """
    if length < 1:
        raise ValueError(f"model.length must be at least 1, got {length}")
    if len(tokens) < length + 1:
        raise ValueError(
            f"{key} has {len(tokens)} tokens of {split} text, model.length + 1 = "
            f"{length + 1} are needed: give a longer text or a smaller model.length"
        )


def source_change(options: config.Data, directory: Path) -> str:
    """One line if the source's files are no longer those that were packed, else "".

    Names, sizes and times are compared; only where they differ, the content, by sha256.
    A source that is gone is no change: the corpus does not need it.
    """
    packed = read_manifest(directory).get("origin")
    try:
        files = sources.files(options)
        if not files or packed is None or _stamp(files) == packed["stamp"]:
            return ""
        if _content(files) == packed["sha256"]:
            return ""
    except (ValueError, OSError):
        return ""
    what = f"data.source={options.source}"
    if options.source in TEXT_KEYS:
        key = TEXT_KEYS[options.source].removeprefix("data.")
        what = f"data.{key} {getattr(options, key)!r}"
    return (
        f"{what} has changed since it was packed: the run goes on with its copy in "
        f"{directory}, a new --workdir takes the new text"
    )


class Origin:
    """The files of a source, from before they are read."""

    def __init__(self, files: dict[str, Path]):
        self.files, self.stamp = files, _stamp(files)

    def read(self) -> dict[str, str]:
        """For the manifest, after they were read: what was packed."""
        unchanged = _stamp(self.files) == self.stamp  # else another content was read
        sha256 = _content(self.files) if unchanged else ""
        return {"stamp": self.stamp, "sha256": sha256}


def _stamp(files: dict[str, Path]) -> str:
    """A hash of names, sizes and times of change."""
    status = {name: path.stat() for name, path in files.items()}
    return _json_sha256({n: [s.st_size, s.st_mtime_ns] for n, s in status.items()})


def _content(files: dict[str, Path]) -> str:
    """A hash of names and contents."""
    return _json_sha256({name: _sha256(path) for name, path in files.items()})


def _json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _build(options: config.Data, directory: Path) -> None:
    origin = Origin(sources.files(options))
    documents, facts = sources.load(options)
    texts = {split: SEPARATOR.join(documents[split]["text"]) for split in SPLITS}
    tokenizer = tokens.build(options.tokenizer, texts.values())
    packed = {split: tokenizer.encode(text) for split, text in texts.items()}
    lines = ngrams.cross_entropies(
        packed["train"], packed["heldout"], tokenizer.vocabulary
    )
    encoded = {split: text.encode("utf-8") for split, text in texts.items()}
    fingerprint: dict[str, Any] = {
        "source": options.source,
        **facts,
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
    manifest = {
        "options": dataclasses.asdict(options),
        "tokenizer": tokenizer.describe(),
        "fingerprint": fingerprint,
        "ngrams": lines,
        "origin": origin.read(),
    }
    write(directory, packed, manifest)


def write(
    directory: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]
) -> None:
    """Arrays [T] into temporary files, which are moved in, the manifest last."""
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    with replaced(directory, *(f"{name}.npy" for name in arrays), MANIFEST) as folder:
        written = {}
        for name, array in arrays.items():
            path = folder / f"{name}.npy"
            np.save(path, array)
            written[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        manifest = {**manifest, "files": written}
        Path(folder, MANIFEST).write_text(sealed(manifest))


def _sweep(directory: Path) -> None:
    """Remove what killed builds left, but not what another process is writing now."""
    for path in directory.glob(f"{UNFINISHED}*"):
        try:
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path)
        except OSError:
            continue  # another process was faster


def sealed(manifest: dict[str, Any]) -> str:
    """A manifest as JSON with a hash of itself."""
    return json.dumps({**manifest, "seal": _json_sha256(manifest)}, indent=1) + "\n"


def read_manifest(directory: Path) -> dict[str, Any]:
    """Raises: ValueError: the file is not what `sealed` made."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        manifest = {}
    if manifest.pop("seal", None) != _json_sha256(manifest):
        raise ValueError(
            f"corpus file {str(path)!r} is damaged (not the JSON of a corpus): "
            f"{WAY_OUT}"
        )
    return manifest


def check_options(
    stored: dict[str, Any], options: config.Data, directory: Path
) -> None:
    """Raises: ValueError: the folder holds examples of other options."""
    wanted = dataclasses.asdict(options)
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
