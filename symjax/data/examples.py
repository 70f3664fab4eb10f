"""The examples of a run, by its configuration.

`open_examples` chooses: next tokens of a text (`text_examples`), masked tokens of a
text (`masked_examples`), labels (`labelled.labelled_examples`), or a generated task
(`generated_examples`).
"""

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
from symjax.data.sources import labelled_sources
from symjax.data.sources.table import check_keys
from symjax.data.store.folder import open_folder
from symjax.data.store.packed import PackedArray
from symjax.data.tokens import Tokenizer, from_description

MASKED_LM_TARGETS = 0.15  # share of the tokens of a row
# The share of masked-LM targets whose input is the mask, and the share whose input is a
# random token. All other targets keep their own token as input.
MASKED, RANDOM = 0.8, 0.1
START = "document_start"  # key of `Examples.language`: the token before a document
# The options in the fingerprint of a generated task. Checkpoints store the fingerprint,
# so this list must not change.
FINGERPRINT_OPTIONS = (
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
    """Open the examples of a run; the first time, pack them.

    A decoder learns the next tokens of a text or a generated task. An encoder learns
    labels, or masked tokens if it has no classes.

    Args:
        directory: the folder "data" of the run, for its `corpus.json`.
        replace: replace the manifest if it has other options or its files are damaged.
            Allowed only while nothing has been trained on it.
        format: the format of a text that is packed now: see `boundaries`.
    Raises:
        ValueError: as in `open_corpus`; options of a generated task that contradict
            each other; a model that does not fit the source.
    """
    options, encoder = whole.data, not config.is_causal(whole.model)
    _check_task(options, whole.model)
    if labelled_sources.has_labels(options):
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
    """Return a corpus with joined documents, for an encoder.

    In joined documents every token is a target. If the unigram cross-entropy of the
    corpus leaves out the first tokens of documents, it is computed again over all
    tokens.
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
    """Check that the kind of model fits the source.

    Raises:
        ValueError: it does not; the message names both.
    """
    labelled, source = (
        labelled_sources.has_labels(options),
        f"data.source {options.source!r}",
    )
    if labelled and not model.classes:
        what = f"data.label {options.label!r}" if options.label else source
        raise ValueError(
            f"{what} has labels: set model.kind to 'encoder' and model.classes to "
            "their number"
        )
    if model.classes and not labelled:
        raise ValueError(
            f"model.classes {model.classes}: {source} has no labels; packages, digits, "
            "and hub with data.label have labels"
        )
    if options.documents == "separate" and not config.is_causal(model):
        raise ValueError(
            f"data.documents 'separate' is for decoders: model.kind is {model.kind!r}"
        )
    if options.source in generated.GENERATORS and not config.is_causal(model):
        raise ValueError(
            f"{source} has next tokens as targets, which an encoder would see: "
            f"model.kind is {model.kind!r}"
        )


def tokenizer_of(language: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer that `Examples.language` describes; None if it describes none.

    Raises:
        ValueError: the tokenizer is of an unknown kind.
    """
    if "kind" not in language:  # images, generated tasks
        return None
    return from_description(language)


def same_tokens(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether equal token ids mean the same in two `Examples.language`.

    Entries about the token before a document are ignored.
    """

    def without_start(language: dict[str, Any]) -> dict[str, Any]:
        return {n: x for n, x in language.items() if n not in (START, "bos")}

    return without_start(one) == without_start(other)


def text_examples(corpus: Corpus) -> Examples:
    """Windows of a text, with the next tokens as targets."""
    last, ends = len(corpus.heldout) - 1, corpus.ends
    arrays = corpus.train, corpus.heldout, *ends.values()
    start = {} if corpus.start is None else {START: corpus.start}
    return Examples(
        read_training=partial(
            training_windows,
            corpus.train,
            ends=ends.get("train"),
            shared=corpus.shared,
            parts=corpus.parts,
            shard=corpus.shard,
        ),
        read_heldout=partial(
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
        language={**corpus.tokenizer.describe(), **start},
        fingerprint=corpus.fingerprint,
        references=corpus.references,
        files=tuple(x for x in arrays if isinstance(x, PackedArray)),
        stream=corpus.stream,
        tokenizer=corpus.tokenizer,
        text=corpus,
        separate=bool(ends),
        longest=last,
    )


def masked_examples(text: Examples) -> Examples:
    """The rows of a text, with 15 % of the tokens of each row as targets.

    The mask is one more token of the vocabulary. It is the input of 80 % of the
    targets. 10 % have a random token as input, and 10 % keep their own token. Training
    rows have other targets in every epoch. Held-out rows always have the same targets.

    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1.
    """
    mask = text.vocabulary
    language = {n: x for n, x in text.language.items() if n != START}

    def train(
        numbers: np.ndarray, length: int, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, _ = text.read_training(numbers, length, seed)
        return _masked(tokens, Draws(seed, numbers), mask)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        """Held-out rows, with padding after the end of the text.

        `text.read_heldout` repeats the last token there, which an encoder would see.
        """
        tokens, _, weights = text.read_heldout(numbers, length)
        inputs, targets = _masked(tokens, Draws(0, numbers), mask)
        inputs = np.where(weights > 0, inputs, NOTHING)
        return inputs, targets, weights * (targets != NOTHING)

    return dataclasses.replace(
        text,
        read_training=train,
        read_heldout=heldout,
        vocabulary=mask + 1,
        unit=f"masked {text.unit}",
        language={**language, "mask": mask},
        references={"unigram": text.references["unigram"]},
        text=None,
    )


def _masked(
    tokens: np.ndarray, draws: Draws, mask: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of rows [B, T]; places that are no targets have −1.

    Args:
        mask: the id of the mask token.
    """
    count = max(1, round(MASKED_LM_TARGETS * tokens.shape[1]))
    places = draws.distinct(tokens.shape[1], count)
    answers, chance = np.take_along_axis(tokens, places, axis=1), draws.uniform(count)
    replacements = np.select(
        [chance < MASKED, chance < MASKED + RANDOM],
        [mask, draws.below(mask, count)],
        answers,
    )
    inputs, targets = tokens.copy(), np.full_like(tokens, NOTHING)
    np.put_along_axis(inputs, places, replacements.astype(tokens.dtype), axis=1)
    np.put_along_axis(targets, places, answers, axis=1)
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
        read_training=lambda numbers, length, seed: rows(
            length, seed=seed, indices=numbers, heldout=False
        ),
        read_heldout=heldout,
        check_length=check_length,
        vocabulary=task.vocabulary(options),
        unit="answer",
        size=f"any number of {source} rows",
        language={"source": source, "symbols": options.symbols},
        fingerprint={
            "source": source,
            "sha256": hashlib.sha256(_identity(options)).hexdigest(),
        },
        references={"chance": math.log(task.answers(options))},
        fixed_length=True,
    )


def _identity(options: config.Data) -> bytes:
    """Return the options of a task, and rows of a small task, as bytes to hash.

    The rows make the hash change if the code of the generator changes.
    """
    small = dataclasses.replace(options, items=4, symbols=8, asked=2)
    rows = generated.rows(small, 64, seed=0, indices=np.arange(8), heldout=True)
    values = {key: getattr(options, key) for key in FINGERPRINT_OPTIONS}
    parts = json.dumps(values).encode(), *map(bytes, rows)
    return b"".join(parts)
