"""What a run learns from: a text, or rows that are made up on the spot."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from symjax import config
from symjax.data import classes, generated
from symjax.data.batches import Rows, Shape
from symjax.data.corpus import (
    MANIFEST,
    UNFINISHED,
    check_options,
    open_corpus,
    read_manifest,
    sealed,
)
from symjax.data.labelled import open_labelled
from symjax.data.masked import Masked
from symjax.data.sources import check_keys

HELDOUT_BATCHES = 32  # of generated rows, of which there is no end


class Examples(Protocol):
    """
    Attributes:
        vocabulary: token types.
        unit: what a loss is a mean over: byte, character or answer.
        size: how much there is, in words.
        language: plain values; where they are equal, tokens mean the same.
        fingerprint: plain values that identify the examples, "sha256" among them.
        references: losses that need no model, by name.
    """

    @property
    def fingerprint(self) -> dict[str, Any]: ...
    @property
    def references(self) -> dict[str, float]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def unit(self) -> str: ...
    @property
    def size(self) -> str: ...
    @property
    def language(self) -> dict[str, Any]: ...

    def check_length(self, length: int) -> None:
        """Raises: ValueError: rows of this length cannot be had."""

    def batch(self, shape: Shape, *, seed: int, step: int) -> Rows:
        """The training batch of a step. Targets below 0 are not learned."""
        ...

    def heldout_batches(self, shape: Shape, count: int | None = None) -> Iterator[Rows]:
        """`count` batches spread over what is held out; None: all of it."""
        ...

    def heldout_count(self, shape: Shape) -> int:
        """Batches that cover what is held out."""
        ...

    def vanished(self) -> str:
        """One line if files that are being read are gone, else ""."""
        ...


class Generated:
    """Rows of a generated task; see `generated`."""

    unit = "answer"

    def __init__(self, options: config.Data):
        self.options = options
        self.generator = generated.GENERATORS[options.source]
        self.references = {"chance": math.log(self.generator.answers(options))}
        self.fingerprint = {
            "source": options.source,
            "sha256": hashlib.sha256(_sign(options)).hexdigest(),
        }

    @property
    def vocabulary(self) -> int:
        return self.generator.vocabulary(self.options)

    @property
    def size(self) -> str:
        return f"any number of {self.options.source} rows"

    @property
    def language(self) -> dict[str, Any]:
        return {"source": self.options.source, "symbols": self.options.symbols}

    def check_length(self, length: int) -> None:
        for heldout in (False, True):
            self._rows((1, length), 0, 0, 1, heldout=heldout)

    def batch(self, shape: Shape, *, seed: int, step: int) -> Rows:
        first = step * shape[0]

        def some(start: int, stop: int):
            return self._rows(shape, seed, first + start, first + stop)

        return some

    def heldout_batches(self, shape: Shape, count: int | None = None) -> Iterator[Rows]:
        for step in range(min(count or HELDOUT_BATCHES, HELDOUT_BATCHES)):
            first = step * shape[0]
            yield functools.partial(self._judged, shape, first)

    def heldout_count(self, shape: Shape) -> int:
        return HELDOUT_BATCHES

    def vanished(self) -> str:
        return ""

    def _judged(self, shape: Shape, first: int, start: int, stop: int):
        rows = self._rows(shape, 0, first + start, first + stop, heldout=True)
        return *rows, (rows[1] >= 0).astype(np.float32)

    def _rows(
        self, shape: Shape, seed: int, start: int, stop: int, *, heldout: bool = False
    ) -> generated.Rows:
        indices, length = np.arange(start, stop), shape[1]
        return generated.rows(
            self.options, length, seed=seed, indices=indices, heldout=heldout
        )


def _sign(options: config.Data) -> bytes:
    """The options, and rows of a small task, which tell whether the generator has
    changed."""
    small = dataclasses.replace(options, items=4, symbols=8, asked=2)
    rows = generated.rows(small, 64, seed=0, indices=np.arange(8), heldout=True)
    parts = json.dumps(dataclasses.asdict(options)).encode(), *map(bytes, rows)
    return b"".join(parts)


def open_examples(
    whole: config.Config, directory: Path, *, replace: bool = False
) -> Examples:
    """The examples of a run, for which the folder holds what they need.

    A decoder learns the next token of a text, an encoder its labels or, without
    classes, tokens that are masked.

    Args:
        replace: build anew over those of other options, as long as nothing has been
            trained on them.
    Raises:
        ValueError: as `open_corpus`; options of a generated task that do not fit; a
            model that cannot learn what there is.
    """
    options, encoder = whole.data, not config.is_causal(whole.model)
    _check_task(options, whole.model)
    if classes.has_labels(options):
        length = whole.model.length
        return open_labelled(options, directory, length, replace=replace)
    if options.source not in generated.GENERATORS:
        corpus = open_corpus(options, directory, replace=replace)
        return Masked(corpus) if encoder else corpus
    check_keys(options)
    generated.check(options, generated.GENERATORS[options.source].least(options))
    path = Path(directory, MANIFEST)
    if path.exists() and not replace:
        check_options(read_manifest(directory)["options"], options, path)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{UNFINISHED}{MANIFEST}")
        unfinished.write_text(sealed({"options": dataclasses.asdict(options)}))
        os.replace(unfinished, path)
    return Generated(options)


def _check_task(options: config.Data, model: config.Model) -> None:
    """Raises: ValueError: the model cannot learn what the source has, naming both."""
    labelled, source = classes.has_labels(options), f"data.source {options.source!r}"
    if labelled and not model.classes:
        what = f"data.label {options.label!r}" if options.label else source
        raise ValueError(
            f"{what} has labels: set model.kind to 'encoder' and model.classes to "
            "their number"
        )
    if model.classes and not labelled:
        raise ValueError(
            f"model.classes {model.classes}: {source} has no labels; packages, digits, "
            "and hub with data.label have"
        )
    if options.source in generated.GENERATORS and not config.is_causal(model):
        raise ValueError(
            f"{source} asks for what comes next, which an encoder would see: "
            f"model.kind is {model.kind!r}"
        )
