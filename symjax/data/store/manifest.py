"""Manifests of packed corpora: `corpus.json`, a JSON file with a hash of itself.

A manifest has the options of `data.`, the tokenizer, the fingerprint of the corpus, the
size and hashes of every file and, for a text, the losses of n-grams.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from symjax import config
from symjax.data.store.packed import REMEDY
from symjax.storage import replaced

MANIFEST = "corpus.json"


def stored_options(options: config.Data) -> dict[str, Any]:
    """The options that decide what is packed: all except `data.cache`."""
    values = dataclasses.asdict(options)
    del values["cache"]
    return values


def fingerprint(source: str, facts: dict[str, Any], content: Any) -> dict[str, Any]:
    """Return plain values that identify a corpus.

    Args:
        facts: plain values about the source, as the function that loads it returned.
        content: a hash object that has read the content; that of a stream has read the
            held-out text and the first shard.
    """
    return {
        "source": source,
        **facts,
        "sha256": content.hexdigest(),
        "python": platform.python_version(),
    }


def sealed(manifest: dict[str, Any]) -> str:
    """Return a manifest as JSON with a hash of itself."""
    return json.dumps({**manifest, "seal": json_sha256(manifest)}, indent=1) + "\n"


def write_manifest(
    directory: Path, manifest: dict[str, Any], name: str = MANIFEST
) -> None:
    """Write a manifest into a folder, which is made if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    with replaced(directory, name) as unfinished:
        (unfinished / name).write_text(sealed(manifest))


def read_manifest(directory: Path, name: str = MANIFEST) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        ValueError: the file is not as `write_manifest` wrote it.
    """
    path = directory / name
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        manifest = {}
    if manifest.pop("seal", None) != json_sha256(manifest):
        raise ValueError(
            f"corpus file {str(path)!r} is damaged (not the JSON of a corpus): {REMEDY}"
        )
    return manifest


def format_of(fingerprint: dict[str, Any]) -> int:
    """The format of a packed corpus, which is 1 if its fingerprint has none."""
    return fingerprint.get("format", 1)


def check_options(found: dict[str, Any], options: config.Data, directory: Path) -> None:
    """Check that a folder was packed with the same options.

    Args:
        found: the options in the manifest of the folder.
    Raises:
        ValueError: they differ; the message has each such key and both of its values.
    """
    found = dataclasses.asdict(config.Data()) | found  # defaults of newer keys
    different = [
        f"data.{name}: {found[name]!r} → {value!r}"
        for name, value in stored_options(options).items()
        if found[name] != value
    ]
    if different:
        raise ValueError(
            f"corpus {str(directory)!r} was built with other options "
            f"({', '.join(different)}): use another --workdir"
        )


def stamp_of(files: dict[str, Path]) -> str:
    """Return a hash of the names, sizes and modification times of files."""
    status = {name: path.stat() for name, path in files.items()}
    return json_sha256({n: [s.st_size, s.st_mtime_ns] for n, s in status.items()})


def content_of(files: dict[str, Path]) -> str:
    """Return a hash of the names and contents of files."""
    return json_sha256({name: sha256_of(path) for name, path in files.items()})


def json_sha256(value: Any) -> str:
    """Return the sha256 of a value as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
