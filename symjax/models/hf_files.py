"""Folders of Hugging Face: config.json beside tensors in safetensors files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TENSORS = "model.safetensors"
INDEX = f"{TENSORS}.index.json"


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
    index, files = directory / INDEX, {TENSORS}
    if index.is_file():
        files = set(read_json(index)["weight_map"].values())
    tensors = {}
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
