"""Losses on held-out and training text (task `loss`), and a sample (task `sample`).

A loss is the mean of −ln p(target) over all targets, in nats per token (per answer in a
generated task, per label of a classifier). There are three:

    held-out                        held-out batches, without dropout
    training text, evaluation mode  the first training batches, without dropout: much
                                    lower than the held-out loss in a model that
                                    memorises
    training text, training mode    the first training batches with dropout, as in
                                    training

perplexity is exp(loss). bits per byte is loss / ln 2 / (bytes per token), with which
models of different tokenizers can be compared. The held-out loss is compared with
references that need no model: tables of n-grams for text, frequencies for labels, and
chance for generated tasks.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from symjax.data.batches import ReadRows, Shape
from symjax.data.corpus import Corpus
from symjax.data.delimiters import delimiters
from symjax.data.given import NO_DATA
from symjax.data.subwords import REPLACEMENT
from symjax.data.tokens import Tokenizer
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Options, Result, Table, progress
from symjax.exchange.continued import row_keys, texts
from symjax.training.step import Means, means

# Modes of the losses on training text, and their keys in the JSON.
MODES = {"training": "loss", "evaluation": "loss_eval_mode"}
PROMPT = 16  # first tokens of the held-out text, the prompt if none is given


def loss(run: LoadedRun, options: Options) -> Result:
    """Measure the held-out loss, its references, and both losses on training text."""
    measured = losses(run, options.batches)
    heldout, train = measured["heldout"], measured["train"]
    unit = f"nats/{run.examples.unit}"
    lines = [
        f"step {run.step}, {run.parameters():,} parameters",
        "",
        f"held-out loss                    {heldout['loss']:.4f} {unit}",
        f"held-out perplexity              {heldout['perplexity']:.3f}",
    ]
    for name in ("accuracy", "bits_per_byte"):
        if name in heldout:
            label = f"held-out {name.replace('_', ' ')}"
            lines.append(f"{label:<33}{heldout[name]:.4f}")
    bits = heldout.get("ngrams_bits_per_byte", {})
    part = heldout["batches"] < heldout["all_batches"]
    if part:
        lines.append(
            f"  on {heldout['batches']} of {heldout['all_batches']} batches; "
            "the references are of all"
        )
    for name, value in run.examples.references.items():
        beaten = ": beaten" if heldout["loss"] < value else ": not beaten"
        label = name if name == "chance" else f"{name} table"
        reference = f"{value:.4f} {unit}"
        if name in bits:
            reference += f", {bits[name]:.4f} bits/byte"
        lines.append(f"  {label:<31}{reference}{'' if part else beaten}")
    if run.examples.text is not None and run.examples.text.all_counted:
        lines.append(
            "  bits/byte and tables also count the first tokens of documents, which "
            "are not targets: an older version packed this text"
        )
    for mode, key in MODES.items():
        if key in train:
            label = f"training text, {mode} mode"
            lines.append(f"{label:<33}{train[key]:.4f} {unit}")
    return Result(measured, lines, (_table(heldout, train),))


def _table(heldout: dict[str, Any], train: dict[str, float]) -> Table:
    """Return the numbers of the printed lines as a table, for CSV."""
    names = ("loss", "perplexity", "bits_per_byte", "accuracy")
    columns = [name for name in names if name in heldout]
    empty = (None,) * (len(columns) - 1)
    rows = [("held-out", *(heldout[name] for name in columns))]
    rows += [
        (f"training text, {mode} mode", train[key], *empty)
        for mode, key in MODES.items()
        if key in train
    ]
    return Table("loss", ("of", *columns), rows, printed=False)


def losses(run: LoadedRun, batches: int | None = None) -> dict[str, Any]:
    """Return the losses on held-out and training text, in nats per target.

    Models that do not continue text also have an accuracy: the fraction of held-out
    answers, labels or masked tokens whose likeliest prediction is right.

    Args:
        batches: number of held-out batches; None means all. The training text is
            measured on the same number of batches, the first ones of training.
    """
    examples, shape = run.examples, (run.config.batch_size, run.config.model.length)
    total = examples.heldout_count(shape)
    count = min(batches or total, total)

    def mean(
        name: str, rows: Iterator[ReadRows], key: jax.Array | None = None
    ) -> Means:
        """Return means over batches; with dropout if a key is given."""
        bar = progress(rows, name, count)
        return means(run.program, run.params, run.constants, shape, bar, key)

    value, accuracy = mean("held-out", examples.heldout_batches(shape, count))
    heldout: dict[str, Any] = {
        "loss": value,
        "perplexity": math.exp(value) if value < 700 else math.inf,
        "batches": count,
        "all_batches": total,
    }
    if examples.text is not None:
        bits = examples.text.bits_per_byte
        heldout["bits_per_byte"] = bits(value)
        heldout["ngrams"] = dict(examples.references)
        heldout["ngrams_bits_per_byte"] = {
            name: bits(x) for name, x in examples.references.items()
        }
    else:
        heldout["references"] = dict(examples.references)
        heldout["accuracy"] = accuracy
    train = {}
    if examples.text is None or len(examples.text.train):
        rows = functools.partial(_training_batches, run, shape, count)
        train["loss"] = mean("training mode", rows(), jax.random.key(0)).loss
        train["loss_eval_mode"] = mean("evaluation mode", rows()).loss
    return {"heldout": heldout, "train": train}


def _training_batches(run: LoadedRun, shape: Shape, count: int) -> Iterator[ReadRows]:
    """Return the first training batches, every target with weight 1."""

    def rows(step: int, start: int, stop: int):
        batch = run.examples.batch_reader(shape, seed=run.config.seed, step=step)
        inputs, targets = batch(start, stop)
        return inputs, targets, (targets >= 0).astype(np.float32)

    return (functools.partial(rows, step) for step in range(count))


def sample(run: LoadedRun, options: Options) -> Result:
    """Continue a prompt by the model; the task applies to models of text only."""
    if run.examples.text is None:
        return Result({}, ["sample: none, the model has not learned a text"])
    prompt, written = continuation(run, run.examples.text, options)
    return Result({}, [f"prompt {prompt!r}, sample:", prompt + written])


def continuation(run: LoadedRun, text: Corpus, options: Options) -> tuple[str, str]:
    """Return (prompt, continuation).

    The continuation ends at the end of the document, after `options.tokens` tokens, or
    at the last of the learned positions.

    Raises:
        ValueError: the prompt is empty and the model has not learned how a document
            begins; or the prompt is too long or has unknown characters; or there is
            neither a prompt nor held-out text.
    """
    tokenizer = text.tokenizer
    document = delimiters(tokenizer, run.examples.language)
    if options.prompt is not None:
        ids = document.prompt(tokenizer.encode(options.prompt))
        if not len(ids):
            raise ValueError("--prompt is empty: give text to continue")
        shown = options.prompt
    elif not len(text.heldout):
        raise ValueError(NO_DATA)
    else:
        ids = _whole_characters(text.heldout[:PROMPT], tokenizer)
        shown = text.decode(ids)
    (written,) = texts(
        run.decoder(),
        tokenizer,
        [ids],
        options.tokens,
        row_keys(jax.random.key(options.seed), 1),
        stop=[] if document.end is None else [document.end],
        temperature=options.temperature,
    )
    return shown, written


def _whole_characters(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return token ids without the last character if it is incomplete."""
    for cut in range(min(4, len(ids))):
        if not tokenizer.decode(ids[: len(ids) - cut]).endswith(REPLACEMENT):
            return ids[: len(ids) - cut]
    return ids
