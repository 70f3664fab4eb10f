"""The examples of a run: a text, masked tokens of one, labels, or a generated task."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from symjax import config
from symjax.data import generated, ngrams
from symjax.data.batches import Examples, heldout_windows, training_windows
from symjax.data.boundaries import FORMAT
from symjax.data.corpus import Corpus, open_corpus
from symjax.data.draws import Draws
from symjax.data.generated import NOTHING
from symjax.data.labelled import labelled_examples, open_labelled
from symjax.data.sources import classes
from symjax.data.sources.sources import check_keys
from symjax.data.store.folder import open_folder
from symjax.data.store.packed import Packed
from symjax.data.tokens import Tokenizer, from_description

SHARE = 0.15  # of the tokens of a row that are targets
MASKED, RANDOM = 0.8, 0.1  # of these; the rest stays as it is
START = "document_start"  # in a language: the token before a document that predicts it
# What the fingerprint of a generated task is made of: checkpoints know it.
SIGNED = (
    *("source", "path", "name", "subset", "column", "label", "tokenizer"),
    *("items", "symbols", "asked"),
)


def open_examples(
    whole: config.Config,
    directory: Path,
    *,
    replace: bool = False,
    format: int = FORMAT,
) -> Examples:
    """The examples of a run, for which the folder holds what they need.

    A decoder learns the next token of a text, an encoder its labels or, without
    classes, tokens that are masked.

    Args:
        replace: build anew over those of other options, as long as nothing has been
            trained on them.
        format: of a text that has not been packed for the run: see `boundaries`.
    Raises:
        ValueError: as `open_corpus`; options of a generated task that do not fit; a
            model that does not fit the source.
    """
    options, encoder = whole.data, not config.is_causal(whole.model)
    _check_task(options, whole.model)
    if classes.has_labels(options):
        found = open_labelled(options, directory, replace=replace)
        return labelled_examples(found, whole.model.length)
    if options.source not in generated.GENERATORS:
        corpus = open_corpus(options, directory, replace=replace, format=format)
        if encoder:
            return masked_examples(text_examples(_joined(corpus)))
        return text_examples(corpus)
    check_keys(options)
    generated.check(options, generated.GENERATORS[options.source].least(options))
    open_folder(options, Path(directory), lambda *_: {}, replace=replace)
    return generated_examples(options)


def _joined(corpus: Corpus) -> Corpus:
    """A corpus whose documents follow each other, for an encoder.

    The unigram table is then about all tokens. Documents that are kept apart may begin
    with tokens that are no targets.
    """
    references = corpus.references
    if corpus.ends and not corpus.shared:
        references = ngrams.cross_entropies(
            corpus.train[: corpus.shard or len(corpus.train)],
            corpus.heldout[:],
            corpus.tokenizer.vocabulary,
            names=["unigram"],
        )
    return dataclasses.replace(corpus, ends={}, references=references)


def _check_task(options: config.Data, model: config.Model) -> None:
    """Raises: ValueError: the kind of model does not fit the source, naming both."""
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
    if options.documents == "separate" and not config.is_causal(model):
        raise ValueError(
            f"data.documents 'separate' is for decoders: model.kind is {model.kind!r}"
        )
    if options.source in generated.GENERATORS and not config.is_causal(model):
        raise ValueError(
            f"{source} asks for what comes next, which an encoder would see: "
            f"model.kind is {model.kind!r}"
        )


def tokenizer_of(language: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer that `Examples.language` describes; None where there is no text.

    Raises:
        ValueError: it is of an unknown kind.
    """
    if "kind" not in language:  # images, generated tasks
        return None
    return from_description(language)


def same_tokens(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the tokens of two `Examples.language` mean the same.

    What stands before a document may differ: it is a token of both.
    """
    return _plain(one) == _plain(other)


def _plain(language: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in language.items() if n not in (START, "bos")}


def text_examples(corpus: Corpus) -> Examples:
    """Windows of a text, whose targets are the next tokens."""
    last, ends = len(corpus.heldout) - 1, corpus.ends
    arrays = corpus.train, corpus.heldout, *ends.values()
    begin = {} if corpus.start is None else {START: corpus.start}
    return Examples(
        train=partial(
            training_windows,
            corpus.train,
            ends=ends.get("train"),
            shared=corpus.shared,
            parts=corpus.parts,
            shard=corpus.shard,
        ),
        heldout=partial(
            heldout_windows,
            corpus.heldout,
            ends=ends.get("heldout"),
            shared=corpus.shared,
        ),
        heldout_rows=lambda length: math.ceil(last / length),
        check_length=corpus.check_length,
        vocabulary=corpus.tokenizer.vocabulary,
        unit=corpus.tokenizer.unit,
        size=corpus.size,
        language={**corpus.tokenizer.describe(), **begin},
        fingerprint=corpus.fingerprint,
        references=corpus.references,
        files=tuple(x for x in arrays if isinstance(x, Packed)),
        stream=corpus.stream,
        tokenizer=corpus.tokenizer,
        text=corpus,
        separate=bool(ends),
        longest=last,
    )


def masked_examples(text: Examples) -> Examples:
    """The rows of a text with 15 % of each row's tokens as targets.

    Of these 80 % are replaced by a token of their own, the last of the vocabulary, and
    10 % by any token. Training masks others in every epoch, held-out rows the same
    ones each time.

    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1.
    """
    mask = text.vocabulary
    language = {n: x for n, x in text.language.items() if n != START}

    def train(
        numbers: np.ndarray, length: int, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, _ = text.train(numbers, length, seed)
        return _masked(tokens, Draws(seed, numbers), mask)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        """Beyond the end of the text is padding: an encoder would see the repeated
        tokens that fill up the row of a decoder."""
        tokens, _, there = text.heldout(numbers, length)
        inputs, targets = _masked(tokens, Draws(0, numbers), mask)
        inputs = np.where(there > 0, inputs, NOTHING)
        return inputs, targets, there * (targets != NOTHING)

    return dataclasses.replace(
        text,
        train=train,
        heldout=heldout,
        vocabulary=mask + 1,
        unit=f"masked {text.unit}",
        language={**language, "mask": mask},
        references={"unigram": text.references["unigram"]},
        text=None,
    )


def _masked(
    tokens: np.ndarray, draws: Draws, mask: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of rows [B, T] with tokens masked, replaced or kept."""
    count = max(1, round(SHARE * tokens.shape[1]))
    places = draws.distinct(tokens.shape[1], count)
    asked, chance = np.take_along_axis(tokens, places, axis=1), draws.uniform(count)
    shown = np.select(
        [chance < MASKED, chance < MASKED + RANDOM],
        [mask, draws.below(mask, count)],
        asked,
    )
    inputs, targets = tokens.copy(), np.full_like(tokens, NOTHING)
    np.put_along_axis(inputs, places, shown.astype(tokens.dtype), axis=1)
    np.put_along_axis(targets, places, asked, axis=1)
    return inputs, targets


def generated_examples(options: config.Data) -> Examples:
    """Rows of a generated task; see `generated`."""
    task, source = generated.GENERATORS[options.source], options.source
    rows = partial(generated.rows, options)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        tokens, targets = rows(length, seed=0, indices=numbers, heldout=True)
        return tokens, targets, (targets >= 0).astype(np.float32)

    def check_length(length: int) -> None:
        for side in (False, True):
            rows(length, seed=0, indices=np.arange(1), heldout=side)

    return Examples(
        train=lambda numbers, length, seed: rows(
            length, seed=seed, indices=numbers, heldout=False
        ),
        heldout=heldout,
        check_length=check_length,
        vocabulary=task.vocabulary(options),
        unit="answer",
        size=f"any number of {source} rows",
        language={"source": source, "symbols": options.symbols},
        fingerprint={
            "source": source,
            "sha256": hashlib.sha256(_sign(options)).hexdigest(),
        },
        references={"chance": math.log(task.answers(options))},
        fixed_length=True,
    )


def _sign(options: config.Data) -> bytes:
    """The options, and rows of a small task, which tell whether the generator has
    changed."""
    small = dataclasses.replace(options, items=4, symbols=8, asked=2)
    rows = generated.rows(small, 64, seed=0, indices=np.arange(8), heldout=True)
    signed = {key: getattr(options, key) for key in SIGNED}
    parts = json.dumps(signed).encode(), *map(bytes, rows)
    return b"".join(parts)
