"""Files in folders of Hugging Face: config.json, and tensors in safetensors files.

Large models have several files, model-00001-of-00003.safetensors and so on, and an
index that maps the name of a tensor to its file.
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
LFS_POINTER = b"version https://git-lfs"  # first bytes of a file not downloaded
# Endings of names of tensors that are ignored: transformers computes them from the
# configuration, and older versions also wrote them to files.
BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    ".attn.bias",
    "masked_bias",
)


def check_folder(directory: Path, name: str) -> None:
    """Raise if a folder holds no model of Hugging Face, and say what to do.

    Args:
        name: file that describes the model.
    Raises:
        ValueError: there is no such folder, or it lacks the file.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no folder{from_the_hub(directory)}")
    if not (directory / name).is_file():
        line = "it is no checkpoint of Hugging Face"
        if (directory / ADAPTER).is_file():
            line = "it is an adapter: merge it into its model by merge_and_unload"
        raise ValueError(f"{directory / name} is missing: {line}")


def from_the_hub(name: Any) -> str:
    """Return how to download a model if `name` may be one of the hub, else ""."""
    if not HUB_NAME.fullmatch(str(name)) or Path(name).exists():
        return ""
    return (
        ": if it is a model of the Hugging Face hub, download it first, by hf download "
        f"{name} --local-dir FOLDER"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object.

    Raises:
        ValueError: the file is missing, or holds no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: it is no checkpoint of Hugging Face")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def check_all(*checks: Callable[[], Any]) -> None:
    """Run checks that raise ValueError, and raise one with all their messages."""
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))


def check_settings(settings: dict[str, Any], only: dict[str, Any]) -> None:
    """Raise unless each setting has the one value that symjax's decoder supports.

    Args:
        only: setting → its supported value; missing settings have it.
    """
    wrong = [
        f"{name} must be {wanted!r}, got {settings[name]!r}"
        for name, wanted in only.items()
        if settings.get(name, wanted) != wanted
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise unless a setting has one of the values that symjax's decoder supports."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def number(settings: dict[str, Any], name: str, default: float | None = None) -> float:
    """Return a setting that must be a finite number above 0.

    Raises:
        ValueError: it is not, or it is missing and has no default.
    """
    value = settings.get(name, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def check_needed(settings: dict[str, Any], *names: str) -> None:
    """Raise if settings are missing, or are not whole numbers above 0."""
    missing = [f"{name} is missing" for name in names if name not in settings]
    if missing:
        raise ValueError("; ".join(missing))
    check_all(*(partial(whole, settings, name) for name in names))


def whole(settings: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a setting that must be a whole number above 0.

    Raises:
        ValueError: it is not, or it is missing and has no default.
    """
    value = settings.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    return value


def read_tensors(directory: Path, digest: str | None) -> dict[str, np.ndarray]:
    """Read all tensors of a folder by name, in float32, from one file or several.

    Args:
        digest: `digest_of` the tensors that the folder should have, if it is known.
    Raises:
        ValueError: a file is missing or damaged, files belong to different models, a
            tensor holds integers or values that are not finite, or safetensors is not
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
        of_file = _read_file(directory / file)
        if names is not None and names != of_file.keys():
            raise ValueError(
                f"{directory / INDEX} does not fit the tensors of {directory / file}"
            )
        tensors |= of_file
    if digest is not None and digest != digest_of(tensors):
        raise ValueError(
            f"{directory} does not have the tensors that it was written with: was the "
            "save interrupted? Write the folder again"
        )
    return tensors


def _missing(directory: Path, files: list[str]) -> str:
    """Return an error message that names missing files of weights and a remedy."""
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
    """Read the tensors of one file in float32, without `BUFFERS`."""
    library = _safetensors()
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path} is a pointer of Git LFS: git lfs pull gets it")
    try:
        # framework="flax" reads bfloat16, which numpy lacks.
        with library.safe_open(path, framework="flax") as opened:
            stored = {x: opened.get_tensor(x) for x in opened.keys()}
    except library.SafetensorError as error:
        raise ValueError(
            f"{path} is damaged ({error}): download or write it again"
        ) from None
    tensors = {}
    for name, tensor in stored.items():
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
    """Return file → names of its tensors, from an index, without `BUFFERS`.

    Raises:
        ValueError: the index does not name files in its folder.
    """
    weight_map = read_json(index).get("weight_map")
    file_of = weight_map if isinstance(weight_map, dict) else {}
    files = file_of.values()
    if not files or not all(isinstance(x, str) and FILE.fullmatch(x) for x in files):
        raise ValueError(f"{index} has no weight_map that names files beside it")
    weights = {x: file for x, file in file_of.items() if not x.endswith(BUFFERS)}
    return {x: {name for name, file in weights.items() if file == x} for x in files}


def digest_of(tensors: Mapping[str, Any]) -> str:
    """Return a digest of names and float32 values of tensors.

    Two files with equal tensors may differ in other bytes, so files are not hashed.
    """
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        content.update(name.encode())
        content.update(np.ascontiguousarray(tensor, np.float32).data)
    return content.hexdigest()


def in_shards(tensors: Mapping[str, Any], size: int) -> dict[str, dict[str, Any]]:
    """Split tensors into files of at most `size` bytes, in order: file → its tensors.

    A tensor larger than that has a file for itself.

    Raises:
        ValueError: the size is not a whole number above 0.
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
    """Return the content of the index of several files."""
    sizes = [x.nbytes for tensors in shards.values() for x in tensors.values()]
    file_of = {name: file for file, tensors in shards.items() for name in tensors}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": file_of}


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors by name to one file.

    Raises:
        ValueError: safetensors is not installed.
    """
    _safetensors()
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(arrays, path, metadata={"format": "pt"})  # transformers needs it


def check_shapes(
    who: str, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise if names or shapes of tensors differ from those of the configuration.

    Args:
        who: beginning of the error message.
    """
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
    """Raise if names are missing or unknown.

    Args:
        who: beginning of the error message.
        optional: a name that may be there or not.
    """
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
