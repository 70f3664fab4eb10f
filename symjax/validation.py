"""Reading, checking and comparing configurations, whose keys `config` declares."""

from __future__ import annotations

import copy
import dataclasses
import math
import typing
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any

from ml_collections import ConfigDict, FieldReference

from symjax import imports
from symjax.config import Config, Model, OwnOptions, own_options

# Keys and groups of keys in which a resumed run must agree with its checkpoint, except
# for the keys in `MAY_CHANGE`. All other keys may change.
FIXED = ("model", "data", "optimizer", "transfer", "seed", "batch_size")
# Key → its value in runs that began before the key existed, if it is not the default.
# Such a run continues with this value.
BEFORE = {"optimizer.version": 1}
MAY_CHANGE = (  # keys of these groups that change results by rounding at most
    "data.cache",
    "model.remat",
    "model.scan_layers",
    "model.attention.implementation",
)


def choices(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the names that a key may have as its value; empty: any value."""
    known = field.metadata["choices"]
    return known if isinstance(known, tuple) else known()


def fields(kind: type = Config, prefix: str = "") -> Iterator[tuple[str, type, Any]]:
    """Yield every key of a configuration as (dotted name, type, dataclass field).

    The options that mechanisms declare are not among them: see
    `config.declared_options`.
    """
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from fields(kinds[field.name], name + ".")
        elif kinds[field.name] is not OwnOptions:
            yield name, kinds[field.name], field


def from_dict(tree: dict[str, Any]) -> Config:
    """Return the configuration with the values of a nested dict, after checking them.

    Raises:
        ValueError: a key is unknown, or a value has a wrong type, is out of range or
            is not among the choices. The message names the key and what it may be.
    """
    options = _build(Config, tree, "")
    check(options)
    return with_own_options(options)


def with_own_options(options: Config) -> Config:
    """Return the configuration with a value of every own option of its mechanisms."""
    chosen = dataclasses.replace(
        options.model.attention, options=own_options(options.model)
    )
    model = dataclasses.replace(options.model, attention=chosen)
    return dataclasses.replace(options, model=model)


def from_stored(tree: dict[str, Any]) -> Config:
    """Return the configuration of a run that may be older than some keys (`BEFORE`).

    Raises:
        ValueError: as `from_dict`.
    """
    tree = copy.deepcopy(tree)
    for name, value in BEFORE.items():
        group, _, key = name.rpartition(".")
        if isinstance(found := tree.get(group), dict):
            found.setdefault(key, value)
    return from_dict(tree)


def continued(options: Config, saved: Config, allow: Collection[str] = ()) -> Config:
    """Return `options` with the values that `saved` has for the keys of `BEFORE`.

    Args:
        allow: keys whose value in `options` is kept.
    """
    for name in BEFORE.keys() - set(allow):
        group, _, key = name.rpartition(".")
        value = attrgetter(name)(saved)
        keys = dataclasses.replace(getattr(options, group), **{key: value})
        options = dataclasses.replace(options, **{group: keys})
    return options


def check(options: Any, prefix: str = "") -> None:
    """Check every value of a group of keys, and the mechanisms' own options.

    Raises:
        ValueError: a value has a wrong type, is out of range or is not among the
            choices. The message names the key, what it may be, and what it is.
    """
    for name, kind, field in fields(type(options), prefix):
        value = attrgetter(name.removeprefix(prefix))(options)
        _check_value(name, value, kind, field)
    model = options.model if isinstance(options, Config) else options
    if isinstance(model, Model):
        own_options(model)


def to_dict(options: Config) -> dict[str, Any]:
    """Return a nested dict of plain values; `from_dict` is its inverse."""
    return dataclasses.asdict(options)


def differences(left: Config, right: Config) -> dict[str, str]:
    """Return key → "key: left → right" for keys that should agree, but differ."""
    found = {}
    for name, _, _ in fields():
        if name.split(".")[0] in FIXED and name not in MAY_CHANGE:
            one, other = map(attrgetter(name), (left, right))
            if one != other:
                found[name] = f"{name}: {one!r} → {other!r}"
    before, after = (own_options(x.model) for x in (left, right))
    for option in before | after:
        one, other = before.get(option), after.get(option)
        if one != other:
            name = f"model.attention.options.{option}"
            found[name] = f"{name}: {one!r} → {other!r}"
    return found


def _build(kind: type, tree: dict[str, Any], prefix: str) -> Any:
    kinds = typing.get_type_hints(kind)
    values = {}
    for name, value in tree.items():
        if name not in kinds:
            raise ValueError(
                f"{prefix}{name} is unknown: choose from {', '.join(sorted(kinds))}"
            )
        if dataclasses.is_dataclass(kinds[name]):
            if not isinstance(value, dict):
                raise ValueError(f"{prefix}{name} is a group of keys, got {value!r}")
            value = _build(kinds[name], value, f"{prefix}{name}.")
        elif kinds[name] is OwnOptions and not isinstance(value, dict):
            raise ValueError(f"{prefix}{name} is a group of keys, got {value!r}")
        elif isinstance(value, list):  # JSON has no tuples
            value = tuple(value)
        elif name == "remat" and type(value) is bool:  # in older checkpoints
            value = "full" if value else "none"
        values[name] = value
    return kind(**values)


def _check_value(name: str, value: Any, kind: Any, field: dataclasses.Field) -> None:
    plain = typing.get_origin(kind) or kind
    items = typing.get_args(kind) if plain is tuple else ()
    if items[1:] == (Ellipsis,):
        items = items[:1] * len(value) if type(value) is plain else ()
    if type(value) is not plain or (
        plain is tuple and tuple(map(type, value)) != items
    ):
        raise ValueError(f"{name} must be {type_name(kind)}, got {value!r}")
    known, from_tables = choices(field), callable(field.metadata["choices"])
    chosen = value if plain is tuple else (value,)
    more = ""
    if from_tables and not {*chosen} <= {*known}:
        broken = imports.load_installed()
        known, more = choices(field), "; --import FILE.py adds others"
        more += f" ({broken})" if broken else ""
    names = ", ".join(filter(None, known))
    least, most = field.metadata["least"], field.metadata["most"]
    for one in chosen:
        if known and one not in known:
            raise ValueError(f"{name} {one!r} is unknown: choose from {names}{more}")
    if plain in (int, float) and not least <= value <= most:
        wanted = f"at least {least}" if least > -math.inf else "a number"
        if value > most:
            wanted = f"at most {most}"
        raise ValueError(f"{name} must be {wanted}, got {value}")


def type_name(kind: Any) -> str:
    """Return the name of a type as users write it: int, tuple[float, float]."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def default() -> ConfigDict:
    """Return the defaults as a ConfigDict, which a configuration file changes.

    A key keeps its type, unless former values of the key have another type.
    """
    defaults = ConfigDict(to_dict(Config()))
    for name, kind, field in fields():
        if any(type(x) is not kind for x in field.metadata.get("former", ())):
            *groups, key = name.split(".")
            group: Any = defaults
            for part in groups:
                group = group[part]
            value = group[key]
            del group[key]
            group[key] = FieldReference(value, field_type=object)
    return defaults
