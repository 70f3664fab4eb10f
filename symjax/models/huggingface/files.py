"""Folders of Hugging Face: config.json beside tensors in safetensors files.

Large models are in several files, model-00001-of-00003.safetensors and so on, with an
index that says in which one a tensor is.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax.optional import needed

TENSORS = "model.safetensors"
INDEX = f"{TENSORS}.index.json"
FILE = re.compile(r"[\w.-]{1,200}\.safetensors")
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
ADAPTER = "adapter_config.json"  # of PEFT
OTHER_FORMATS = "pytorch_model*.bin", "*.pth", "*.gguf"
LFS_POINTER = b"version https://git-lfs"  # the first bytes of a file not downloaded
# Endings of tensors that transformers computes from the configuration: it ignores them
# in a file, where older versions wrote them.
BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    ".attn.bias",
    "masked_bias",
)


def check_folder(directory: Path, name: str) -> None:
    """Raise if a folder cannot be one of Hugging Face, with the way out.

    Args:
        name: the file that describes its model.
    Raises:
        ValueError: there is no such folder, or it holds no model.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no folder{from_the_hub(directory)}")
    if not (directory / name).is_file():
        line = "it is no checkpoint of Hugging Face"
        if (directory / ADAPTER).is_file():
            line = "it is an adapter: merge it into its model by merge_and_unload"
        raise ValueError(f"{directory / name} is missing: {line}")


def from_the_hub(name: Any) -> str:
    """Say how to download what may be a model of the Hugging Face hub; else ""."""
    if not HUB_NAME.fullmatch(str(name)) or Path(name).exists():
        return ""
    return (
        ": if it is a model of the Hugging Face hub, download it first, by hf download "
        f"{name} --local-dir FOLDER"
    )


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


def check_all(*checks: Callable[[], Any]) -> None:
    """Raises: ValueError: checks fail; the message has the lines of all of them."""
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))


def check_settings(settings: dict[str, Any], only: dict[str, Any]) -> None:
    """Raises: ValueError: settings are not the only values that our decoder has."""
    wrong = [
        f"{name} must be {wanted!r}, got {settings[name]!r}"
        for name, wanted in only.items()
        if settings.get(name, wanted) != wanted
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises: ValueError: a setting is none of the values that our decoder has."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def number(settings: dict[str, Any], name: str, default: float | None = None) -> float:
    """Return a setting that is a finite number above 0.

    Raises:
        ValueError: it is not, or it is missing without a default.
    """
    found = settings.get(name, default)
    if type(found) not in (int, float) or not 0 < found < float("inf"):
        raise ValueError(f"{name} must be a number above 0, got {found!r}")
    return float(found)


def check_needed(settings: dict[str, Any], *names: str) -> None:
    """Raises: ValueError: settings are missing, or no whole numbers above 0."""
    missing = [f"{name} is missing" for name in names if name not in settings]
    if missing:
        raise ValueError("; ".join(missing))
    check_all(*(partial(whole, settings, name) for name in names))


def whole(settings: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a setting that is a whole number above 0.

    Raises:
        ValueError: it is not, or it is missing without a default.
    """
    found = settings.get(name, default)
    if type(found) is not int or found < 1:
        raise ValueError(f"{name} must be a whole number above 0, got {found!r}")
    return found


def read_tensors(directory: Path, digest: str | None) -> dict[str, np.ndarray]:
    """Every tensor of a folder by its name, in float32; in one file or in shards.

    Args:
        digest: of the tensors that the folder should have, if it is known.
    Raises:
        ValueError: a file is missing or damaged, files are of different models, a
            tensor has integers or numbers that are not finite, or safetensors is not
            installed.
    """
    _safetensors()
    files: dict[str, set[str] | None] = {TENSORS: None}
    if not (directory / TENSORS).is_file() and (directory / INDEX).is_file():
        files = dict(_files_of(directory / INDEX))
    missing = [file for file in sorted(files) if not (directory / file).is_file()]
    if missing:
        raise ValueError(_missing(directory, missing))
    tensors = {}
    for file, names in sorted(files.items()):
        found = _read_file(directory / file)
        if names is not None and names != found.keys():
            raise ValueError(
                f"{directory / INDEX} does not fit the tensors of {directory / file}"
            )
        tensors |= found
    if digest is not None and digest != digest_of(tensors):
        raise ValueError(
            f"{directory} has not the tensors that it was written with: a save that "
            "did not end? Write the folder again"
        )
    return tensors


def _missing(directory: Path, files: list[str]) -> str:
    """Say which files of weights are missing, and what to do."""
    first = directory / files[0]
    if files != [TENSORS]:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        return f"{first}{more} is missing, which {INDEX} names: download it again"
    others = [x.name for form in OTHER_FORMATS for x in directory.glob(form)]
    if not others:
        return f"{first} is missing"
    return (
        f"{directory} has {min(others)} and no {TENSORS}: load it with transformers, "
        "and write it with its save_pretrained"
    )


def _read_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file in float32, without those that are recomputed."""
    library = _safetensors()
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path} is a pointer of Git LFS: git lfs pull gets it")
    try:
        with library.safe_open(path, framework="flax") as opened:  # it has bfloat16
            found = {x: opened.get_tensor(x) for x in opened.keys()}
    except library.SafetensorError as error:
        raise ValueError(
            f"{path} is damaged ({error}): download or write it again"
        ) from None
    tensors = {}
    for name, tensor in found.items():
        if name.endswith(BUFFERS):
            continue
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(
                f"{path}: {name} has {tensor.dtype}, as quantised weights have: write "
                "them as floating numbers"
            )
        tensors[name] = np.asarray(tensor, np.float32)
        if not np.isfinite(tensors[name]).all():
            count = np.size(tensor) - np.isfinite(tensors[name]).sum()
            raise ValueError(
                f"{path}: {name} has {count} of {np.size(tensor)} numbers that are NaN "
                "or infinite: its training diverged or the file is damaged; take "
                "another checkpoint"
            )
    return tensors


def _files_of(index: Path) -> dict[str, set[str]]:
    """File → its tensors. Raises: ValueError: it does not name files beside it."""
    found = read_json(index).get("weight_map")
    places = found if isinstance(found, dict) else {}
    files = places.values()
    if not files or not all(isinstance(x, str) and FILE.fullmatch(x) for x in files):
        raise ValueError(f"{index} has no weight_map that names files beside it")
    kept = {name: file for name, file in places.items() if not name.endswith(BUFFERS)}
    return {x: {name for name, file in kept.items() if file == x} for x in files}


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
