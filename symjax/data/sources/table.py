"""The table of sources: the keys that each reads, and the functions that load it.

`load` returns the `Texts` of a source, with the splits "train" and "heldout". `stdlib`
and `text` read files exactly: newlines are not translated, and nothing but a byte order
mark is removed. Only `hub` downloads, into the Hugging Face cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from symjax import config
from symjax.data import tokens
from symjax.data.sources import hub, local_files, mixture
from symjax.data.sources.texts import Texts

# The keys of `data.` that each source reads. `labelled_sources` loads packages, digits,
# and hub with `label`. `data.generated` makes the tasks from mqar on. `load` loads all
# other sources.
TOKENS = ("tokenizer", "vocabulary")
TEXT = (*TOKENS, "documents", "bos")
STREAM = ("streaming", "tokens")
KEYS = {
    "stdlib": TEXT,
    "text": (*TEXT, "path", "mixture"),
    "hub": (*TEXT, "name", "mixture", "subset", "column", "label", *STREAM),
    "packages": TOKENS,
    "digits": (),
    "mqar": ("items", "symbols"),
    "needle": ("items", "symbols", "asked"),
    **dict.fromkeys(("copy", "reverse", "sort", "swap"), ("items", "symbols")),
    "sets": ("symbols",),
    "listops": (),
}

TEXT_SOURCES = tuple(name for name, keys in KEYS.items() if "documents" in keys)


def load(options: config.Data) -> tuple[Texts, dict[str, Any]]:
    """Load the documents of a source of text.

    Returns:
        the documents, and plain values that identify them in addition to their text.
    Raises:
        ValueError: the source is unknown, or has no text for these options.
    """
    check_keys(options)
    if options.source == "hub":
        return hub.load(options)
    if options.source == "text":
        return local_files.text_files(options.path), {}
    return local_files.stdlib(), {}


def files(options: config.Data) -> dict[str, Path]:
    """The files that a source reads on this machine, by name.

    A data set on the hub and a generated task have none.

    Raises:
        ValueError: files are missing, or as in `check_keys`.
    """
    check_keys(options)
    if options.mixture:
        parts = [files(part) for _, part in mixture.entries(options)]
        return {f"{n} {x}": y for n, part in enumerate(parts) for x, y in part.items()}
    if options.source == "stdlib":
        return local_files.library_files()
    if options.source == "packages":
        groups = local_files.packages().values()
        return {name: path for group in groups for name, path in group.items()}
    if options.source == "text":
        return local_files.matched_files(options.path)
    folder = Path(options.name).expanduser()
    found = sorted(folder.rglob("*")) if options.name else []
    return {str(path.relative_to(folder)): path for path in found if path.is_file()}


def revisions(options: config.Data) -> list[str]:
    """The revisions of the data sets that are read from the hub.

    Raises:
        ValueError: the hub does not answer, or has no such data set.
    """
    parts = [part for _, part in mixture.entries(options)]
    return [hub.revision(x) for x in parts if x.source == "hub" and not files(x)]


def check_keys(options: config.Data) -> None:
    """Check that the source is known and reads all keys that are set.

    Raises:
        ValueError: the source is unknown, it does not read a key that is set, or two
            keys contradict each other; the message names them.
    """
    if options.source not in KEYS:
        raise ValueError(
            f"data.source {options.source!r} is unknown: choose from {', '.join(KEYS)}"
        )
    for key in dict.fromkeys(key for keys in KEYS.values() for key in keys):
        value, unset = getattr(options, key), getattr(config.Data(), key)
        if value != unset and key not in KEYS[options.source]:
            readers = ", ".join(name for name, keys in KEYS.items() if key in keys)
            unset = "empty" if unset == "" else unset
            raise ValueError(
                f"data.{key} {value!r} is read by data.source={readers} only: set "
                f"data.source={readers}, or leave data.{key} {unset}"
            )
    if options.mixture and options.label:
        raise ValueError(
            f"data.mixture {options.mixture!r} is for texts: leave data.label "
            f"{options.label!r} empty"
        )
    if options.streaming != bool(options.tokens):
        raise ValueError(
            f"data.streaming {options.streaming} and data.tokens {options.tokens}: "
            "set both for a stream, else neither"
        )
    if options.streaming and (options.mixture or options.label):
        raise ValueError(
            "data.streaming reads one text: leave data.mixture and data.label empty"
        )
    if options.streaming and options.tokenizer == "char":
        raise ValueError(
            "data.tokenizer char takes its alphabet from the whole text: choose byte, "
            "bpe or a tokenizer.json for data.streaming"
        )
    if options.bos == "true" and (options.tokenizer in tokens.KINDS or options.label):
        other = "data.label" if options.label else f"data.tokenizer={options.tokenizer}"
        raise ValueError(
            f"data.bos true is for texts and a tokenizer.json, not for {other}: leave "
            "data.bos auto"
        )
    if options.tokenizer != "bpe" and options.vocabulary != config.Data().vocabulary:
        raise ValueError(
            f"data.vocabulary {options.vocabulary} is learned by data.tokenizer=bpe "
            f"only, got data.tokenizer {options.tokenizer!r}"
        )
