"""Folders of Hugging Face: config.json beside tensors in safetensors files.

Large models are in several files, model-00001-of-00003.safetensors and so on, with an
index that says in which one a tensor is.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from symjax.optional import needed

TENSORS = "model.safetensors"
INDEX = f"{TENSORS}.index.json"
FILE = re.compile(r"[\w.-]{1,200}\.safetensors")
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ValueError: the file is missing, or no JSON object."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: it is no checkpoint of Hugging Face")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}")
    return found


def check_settings(settings: dict[str, Any], only: dict[str, Any]) -> None:
    """Raises: ValueError: a setting is not the only value that our decoder has."""
    for name, wanted in only.items():
        if settings.get(name, wanted) != wanted:
            raise ValueError(
                f"config.json: {name} must be {wanted!r}, got {settings[name]!r}"
            )


def check_needed(settings: dict[str, Any], *names: str) -> None:
    """Raises: ValueError: a setting is missing, or no whole number above 0."""
    for name in names:
        if name not in settings:
            raise ValueError(f"config.json: {name} is missing")
        if type(settings[name]) is not int or settings[name] < 1:
            raise ValueError(
                f"config.json: {name} must be a whole number above 0, got "
                f"{settings[name]!r}"
            )


def read_tensors(directory: Path, digest: str | None) -> dict[str, np.ndarray]:
    """Every tensor of a folder by its name, in float32; in one file or in shards.

    Args:
        digest: of the tensors that the folder should have, if it is known.
    Raises:
        ValueError: a file is missing or damaged, files are of different models, or
            safetensors is not installed.
    """
    safe_open, tensors = _safetensors().safe_open, {}
    files = {TENSORS: None}
    if not (directory / TENSORS).is_file() and (directory / INDEX).is_file():
        files = _files_of(directory / INDEX)
    for file, names in sorted(files.items()):
        path = directory / file
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        try:
            with safe_open(path, framework="flax") as opened:  # NumPy has no bfloat16
                found = {x: opened.get_tensor(x) for x in opened.keys()}
        except _safetensors().SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if names is not None and names != found.keys():
            raise ValueError(f"{directory / INDEX} does not fit the tensors of {path}")
        tensors |= {x: np.asarray(y, np.float32) for x, y in found.items()}
    if digest is not None and digest != digest_of(tensors):
        raise ValueError(
            f"{directory} has not the tensors that it was written with: a save that "
            "did not end? Write the folder again"
        )
    return tensors


def _files_of(index: Path) -> dict[str, set[str]]:
    """File → its tensors. Raises: ValueError: it does not name files beside it."""
    found = read_json(index).get("weight_map")
    places = found if isinstance(found, dict) else {}
    files = places.values()
    if not files or not all(isinstance(x, str) and FILE.fullmatch(x) for x in files):
        raise ValueError(f"{index} has no weight_map that names files beside it")
    return {x: {name for name, file in places.items() if file == x} for x in files}


def digest_of(tensors: Mapping[str, Any]) -> str:
    """That of names and numbers in float32: files of two saves have another."""
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        content.update(name.encode())
        content.update(np.ascontiguousarray(tensor, np.float32).data)
    return content.hexdigest()


def in_shards(tensors: Mapping[str, Any], size: int) -> dict[str, dict[str, Any]]:
    """File → its tensors by name, in their order: of at most `size` bytes together,
    or one that is larger.

    Raises:
        ValueError: a size that is no whole number above 0.
    """
    if type(size) is not int or size < 1:
        raise ValueError(f"shard_size must be at least 1 byte, got {size!r}")
    shards: list[dict[str, Any]] = [{}]
    room = size
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = size
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        return {TENSORS: shards[0]}
    count = len(shards)
    return {
        f"model-{i:05}-of-{count:05}.safetensors": x for i, x in enumerate(shards, 1)
    }


def index_of(shards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the index of several files says."""
    sizes = [tensor.nbytes for some in shards.values() for tensor in some.values()]
    places = {name: file for file, some in shards.items() for name in some}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": places}


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Tensors by name in one file.

    Raises:
        ValueError: safetensors is not installed.
    """
    _safetensors()
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(arrays, path, metadata={"format": "pt"})  # transformers asks for it


def check_shapes(
    who: str, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises: ValueError: names or shapes are not those of the configuration."""
    check_names(who, tensors, shapes)
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{who}: {name} must be {shape} by the configuration beside it, got "
                f"{tensors[name].shape}"
            )


def check_names(
    who: str, found: Iterable[str], wanted: Iterable[str], optional: str = ""
) -> None:
    """Raises: ValueError: a name is missing or unknown."""
    found, wanted = set(found), set(wanted)
    for what, names in (
        ("lacks", wanted - found),
        ("has unknown", found - wanted - {optional}),
    ):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:3]))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{who}: the layer or model {what} {shown}{more}")


def _safetensors() -> Any:
    line = "folders of weights need safetensors: pip install safetensors"
    return needed("safetensors", line)
