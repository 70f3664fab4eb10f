"""One checkpoint on disk: its format, and the check of what is read from it.

    <step>/<item>        one Orbax item for each tree: params, constants, optimizer
    <step>/meta          JSON: step, the caller's meta, type and checksum of every array

Orbax does not notice a flipped bit. So every array has a checksum, computed on the
device before the save and after the restore, and meta has a checksum too.

Trees are stored as nested dicts of arrays. NamedTuples become dicts with their fields
as keys, and lists become dicts with positions as keys. No Python objects are stored.
meta may hold the source text of a user's mechanism (`symjax.imports`); this module does
not run it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding

from symjax.checkpoints.checksum import checksums
from symjax.distributed import processes
from symjax.storage import is_unanswered

META = "meta"


class Damaged(Exception):
    """A checkpoint differs from what was saved; the message says how, in one line."""


def to_save(step: int, trees: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """Return Orbax's save arguments by item, after waiting for the arrays.

    Raises:
        ValueError: two leaves have one name.
    """
    arrays: dict[str, jax.Array] = {}
    for item, tree in jax.tree.map(jnp.asarray, trees).items():
        arrays |= _named(item, tree)
    arguments: dict[str, Any] = {
        item: ocp.args.StandardSave(tree) for item, tree in _nested(arrays).items()
    }
    arguments[META] = ocp.args.JsonSave(_document(step, meta, arrays))
    return arguments


def read(
    directory: epath.Path, abstract_trees: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read trees and meta, and compare them with their checksums.

    All processes call this together.

    Raises:
        Damaged: something is missing, unreadable or altered.
        ValueError: the arrays have other names, shapes or types than the trees.
    """
    document = _read_document(directory)
    named = {item: _named(item, tree) for item, tree in abstract_trees.items()}
    for item, leaves in named.items():
        _check_fits(directory.name, item, document["arrays"], leaves)
    trees = {}
    for item, leaves in named.items():
        task = functools.partial(_read_item, directory / item, leaves)
        arrays = _attempt(item, task)
        for name, number in zip(arrays, checksums([*arrays.values()]), strict=True):
            if f"{number:08x}" != document["arrays"][name][1]:
                raise Damaged(f"{name} does not match its checksum")
        structure = jax.tree.structure(abstract_trees[item])
        trees[item] = jax.tree.unflatten(structure, arrays.values())
    return trees, _meta(document)


def read_meta(directory: epath.Path) -> dict[str, Any]:
    """Return the meta that `to_save` was given, and the step.

    Raises:
        Damaged: the meta is missing, unreadable or altered.
    """
    return _meta(_read_document(directory))


def short(error: BaseException) -> str:
    """Return the type of an error and its first line.

    Only the end of a long line is kept, since Orbax's messages end with the cause.
    """
    error = error.__cause__ or error
    line = (str(error).splitlines() or [""])[0].split(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {line if len(line) < 80 else '…' + line[-80:]}"


def _named(item: str, tree: Any) -> dict[str, Any]:
    """Return the leaves by their names "item/path/of/the/leaf", in the tree's order.

    Raises:
        ValueError: two leaves have the same name, or a name is the beginning of another
            ("a/b" and "a/b/c"). As in Orbax, "a.b" counts as "a/b".
    """
    named, taken = {}, set()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        named[f"{item}/{name}"] = leaf
        taken.add(name.replace(".", "/"))
    beginnings = {n[:i] for n in taken for i, letter in enumerate(n) if letter == "/"}
    if len(taken) < len(jax.tree.leaves(tree)) or taken & beginnings:
        raise ValueError(
            f"two leaves of {item} have one name, or one is a folder of the other"
        )
    return named


def _nested(named: dict[str, Any]) -> dict[str, Any]:
    """Return the nested dicts that Orbax stores, by item.

    Arrays without elements are left out, since Orbax cannot store them.
    """
    return unflatten_dict({n: leaf for n, leaf in named.items() if leaf.size}, sep="/")


def _document(
    step: int, meta: dict[str, Any], arrays: dict[str, jax.Array]
) -> dict[str, Any]:
    """Return the JSON of `meta`, with types and checksums of all arrays."""
    numbers = checksums([*arrays.values()])
    document = {
        "step": step,
        "meta": json.loads(json.dumps(meta)),
        "arrays": {
            name: [_type_of(leaf), f"{number:08x}"]
            for (name, leaf), number in zip(arrays.items(), numbers, strict=True)
        },
    }
    return {**document, "checksum": _seal(document)}


def _seal(document: dict[str, Any]) -> str:
    """Return the SHA-256 of a document that has no checksum yet."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _meta(document: dict[str, Any]) -> dict[str, Any]:
    """Return the caller's meta, and the step."""
    return {**document["meta"], "step": document["step"]}


def _type_of(leaf: Any) -> str:
    """Return type and shape of an array, for instance "float32[2, 3]"."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def _check_fits(
    step: str, item: str, arrays: dict[str, Any], leaves: dict[str, Any]
) -> None:
    """Check names, types and shapes of an item.

    Raises:
        ValueError: the checkpoint has other names, types or shapes; the message names
            those of both sides.
    """
    stored = {n: kind for n, (kind, _) in arrays.items() if n.split("/")[0] == item}
    wanted = {name: _type_of(leaf) for name, leaf in leaves.items()}
    for name in {**stored, **wanted}:
        there, here = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if there != here:
            raise ValueError(
                f"checkpoint {step} does not fit: {name} is {there} there, {here} here"
            )


def _attempt(what: str, read: Callable[[], Any]) -> Any:
    """Return the result of `read`; raise Damaged in every process if one fails.

    Some failures are not damage, and end the run: too little memory, no permission, a
    broken device, or a store that does not answer.
    """

    def attempt() -> tuple[Any, str]:
        try:
            return read(), ""
        except Damaged as error:
            return None, str(error)
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, MemoryError | PermissionError | JaxRuntimeError):
                raise cause from None
            if is_unanswered(error):
                raise OSError(0, f"{what} cannot be read: {short(error)}") from error
            return None, f"{what} cannot be read: {short(error)}"

    value, reason = processes.all_succeed(attempt)
    if reason := next(filter(None, processes.allgather(reason)), ""):
        raise Damaged(reason)
    return value


def _read_document(directory: epath.Path) -> dict[str, Any]:
    """Return the checked JSON of `meta`."""

    def read() -> dict[str, Any]:
        document = dict(ocp.JsonCheckpointHandler().restore(directory / META))
        if document.pop("checksum") != _seal(document):
            raise Damaged(f"{META} does not match its checksum")
        # Other programs can write valid checksums: check the types of `_document`.
        kinds = {"step": int, "meta": dict, "arrays": dict}
        if any(type(document.get(n)) is not kind for n, kind in kinds.items()) or any(
            not isinstance(array, list) or [*map(type, array)] != [str, str]
            for array in document["arrays"].values()
        ):
            raise Damaged(f"{META} is not that of a checkpoint")
        if str(document["step"]) != directory.name:
            raise Damaged(f"{META} is that of step {document['step']}")
        return document

    return _attempt(META, read)


def _read_item(directory: epath.Path, leaves: dict[str, Any]) -> dict[str, jax.Array]:
    """Restore the arrays of an item by name, in the order of `leaves`."""
    default = SingleDeviceSharding(jax.devices()[0])
    placed = {
        name: leaf.update(sharding=leaf.sharding or default)
        for name, leaf in leaves.items()
    }
    item, restored = directory.name, {}
    if tree := _nested(placed).get(item):
        arguments = ocp.args.StandardRestore(tree)
        handler = ocp.StandardCheckpointHandler()
        restored = _named(item, handler.restore(directory, args=arguments))
    for name, leaf in placed.items():
        if not leaf.size:
            empty = np.zeros(leaf.shape, leaf.dtype)
            restored[name] = jax.device_put(empty, leaf.sharding)
    return {name: restored[name] for name in leaves}
