"""Manifests of packed corpora: JSON files, each with a hash of itself."""

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
    """The options that decide what is packed: all but where it is kept."""
    found = dataclasses.asdict(options)
    del found["cache"]
    return found


def fingerprint(source: str, facts: dict[str, Any], content: Any) -> dict[str, Any]:
    """What identifies a corpus: its source, what is known of it, and its content."""
    return {
        "source": source,
        **facts,
        "sha256": content.hexdigest(),
        "python": platform.python_version(),
    }


def sealed(manifest: dict[str, Any]) -> str:
    """A manifest as JSON with a hash of itself."""
    return json.dumps({**manifest, "seal": json_sha256(manifest)}, indent=1) + "\n"


def write_manifest(
    directory: Path, manifest: dict[str, Any], name: str = MANIFEST
) -> None:
    """A file that `read_manifest` reads, in a folder that is made if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    with replaced(directory, name) as unfinished:
        (unfinished / name).write_text(sealed(manifest))


def read_manifest(directory: Path, name: str = MANIFEST) -> dict[str, Any]:
    """Raises: ValueError: the file is not what `sealed` made."""
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
    """The format of a packed corpus; older ones do not name theirs, which is 1."""
    return fingerprint.get("format", 1)


def check_options(found: dict[str, Any], options: config.Data, directory: Path) -> None:
    """Raises: ValueError: the folder holds examples of other options."""
    found = dataclasses.asdict(config.Data()) | found  # keys it did not have yet
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
    """A hash of names, sizes and times of change."""
    status = {name: path.stat() for name, path in files.items()}
    return json_sha256({n: [s.st_size, s.st_mtime_ns] for n, s in status.items()})


def content_of(files: dict[str, Path]) -> str:
    """A hash of names and contents."""
    return json_sha256({name: sha256_of(path) for name, path in files.items()})


def json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
