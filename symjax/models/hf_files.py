"""Folders of Hugging Face: config.json beside tensors in safetensors files.

Large models are in several files, model-00001-of-00003.safetensors and so on, with an
index that says in which one a tensor is.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TENSORS = "model.safetensors"
INDEX = f"{TENSORS}.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ValueError: the file is missing, or no JSON object."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: it is no checkpoint of Hugging Face")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}")
    return found


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder by its name, in float32; in one file or in shards.

    Raises:
        ValueError: a file is missing or damaged, or safetensors is not installed.
    """
    safe_open = _safetensors().safe_open
    files, tensors = {TENSORS}, {}
    if (directory / INDEX).is_file():
        files = _files_of(directory / INDEX)
    for path in (directory / name for name in sorted(files)):
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        try:
            with safe_open(path, framework="flax") as file:  # NumPy has no bfloat16
                for name in file.keys():
                    tensors[name] = np.asarray(file.get_tensor(name), np.float32)
        except _safetensors().SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    return tensors


def _files_of(index: Path) -> set[str]:
    """Raises: ValueError: it does not name files beside it."""
    found = read_json(index).get("weight_map")
    names = found.values() if isinstance(found, dict) else ()
    if not names or not all(isinstance(x, str) and Path(x).name == x for x in names):
        raise ValueError(f"{index} has no weight_map that names files beside it")
    return set(names)


def in_shards(tensors: Mapping[str, Any], size: int) -> dict[str, dict[str, Any]]:
    """File → its tensors by name, in their order: of at most `size` bytes together,
    or one that is larger.

    Raises:
        ValueError: a size below 1.
    """
    if size < 1:
        raise ValueError(f"shard_size must be at least 1 byte, got {size}")
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
    try:
        import safetensors
    except ImportError as error:
        raise ValueError(
            "folders of weights need safetensors: pip install 'symjax[exchange]'"
        ) from error
    return safetensors
