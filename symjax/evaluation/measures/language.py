"""Held-out and training losses, and a sample.

Three losses: on held-out text; on training text in evaluation mode, the same way; and
on training text in training mode, with dropout. The last two show memorisation.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from symjax.data.batches import Rows, Shape
from symjax.data.corpus import Corpus
from symjax.data.delimiters import delimiters
from symjax.data.given import NO_DATA
from symjax.data.subwords import REPLACEMENT
from symjax.data.tokens import Tokenizer
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Options, Result, Table, progress
from symjax.exchange.continued import row_keys, texts
from symjax.training.step import Means, means

MODES = {"training": "loss", "evaluation": "loss_eval_mode"}  # of training text
PROMPT = 16  # tokens of held-out text where no prompt is given


def loss(run: LoadedRun, options: Options) -> Result:
    """The three losses, beside what needs no model: tables of n-grams, or chance."""
    found = losses(run, options.batches)
    heldout, train = found["heldout"], found["train"]
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
            "the lines below on all"
        )
    for name, value in run.examples.references.items():
        beaten = ": beaten" if heldout["loss"] < value else ": not beaten"
        label = name if name == "chance" else f"{name} table"
        both = f"{value:.4f} {unit}"
        if name in bits:
            both += f", {bits[name]:.4f} bits/byte"
        lines.append(f"  {label:<31}{both}{'' if part else beaten}")
    if run.examples.text is not None and run.examples.text.all_counted:
        lines.append(
            "  bits/byte and tables count the first tokens of documents, which are no "
            "targets: an older version packed this text"
        )
    for mode, key in MODES.items():
        if key in train:
            label = f"training text, {mode} mode"
            lines.append(f"{label:<33}{train[key]:.4f} {unit}")
    return Result(found, lines, (_table(heldout, train),))


def _table(heldout: dict[str, Any], train: dict[str, float]) -> Table:
    """The numbers of the text once more, for CSV."""
    parts = ("loss", "perplexity", "bits_per_byte", "accuracy")
    known = [name for name in parts if name in heldout]
    rest = (None,) * (len(known) - 1)
    rows = [("held-out", *(heldout[name] for name in known))]
    rows += [
        (f"training text, {mode} mode", train[key], *rest)
        for mode, key in MODES.items()
        if key in train
    ]
    return Table("loss", ("of", *known), rows, printed=False)


def losses(run: LoadedRun, batches: int | None = None) -> dict[str, Any]:
    """Held-out and training losses, in nats a token, an answer or a label; and the
    accuracy of held-out answers, labels or hidden tokens.

    Args:
        batches: of held-out text; None is all of it. As many batches of training text
            are taken, the first that training saw.
    """
    examples, shape = run.examples, (run.config.batch_size, run.config.model.length)
    total = examples.heldout_count(shape)
    count = min(batches or total, total)

    def over(name: str, rows: Iterator[Rows], key: jax.Array | None = None) -> Means:
        bar = progress(rows, name, count)
        return means(run.program, run.params, run.constants, shape, bar, key)

    value, accuracy = over("held-out", examples.heldout_batches(shape, count))
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
        rows, key = functools.partial(_training, run, shape, count), jax.random.key(0)
        train["loss"] = over("training mode", rows(), key).loss
        train["loss_eval_mode"] = over("evaluation mode", rows()).loss
    return {"heldout": heldout, "train": train}


def _training(run: LoadedRun, shape: Shape, count: int) -> Iterator[Rows]:
    """The first training batches, every target with weight 1."""

    def rows(step: int, start: int, stop: int):
        batch = run.examples.batch(shape, seed=run.config.seed, step=step)
        inputs, targets = batch(start, stop)
        return inputs, targets, (targets >= 0).astype(np.float32)

    return (functools.partial(rows, step) for step in range(count))


def sample(run: LoadedRun, options: Options) -> Result:
    """A prompt and its continuation by the model; nothing where there is no text."""
    if run.examples.text is None:
        return Result({}, ["sample: none, the model has not learned a text"])
    prompt, more = continuation(run, run.examples.text, options)
    return Result({}, [f"prompt {prompt!r}, sample:", prompt + more])


def continuation(run: LoadedRun, text: Corpus, options: Options) -> tuple[str, str]:
    """(prompt, its continuation), up to the end of the document, and at most as far as
    the model has positions.

    Raises:
        ValueError: the prompt is empty and the model has not learned how a document
            begins; or it is too long, or has unknown characters.
    """
    tokenizer = text.tokenizer
    known = delimiters(tokenizer, run.examples.language)
    if options.prompt is not None:
        ids = known.prompt(tokenizer.encode(options.prompt))
        if not len(ids):
            raise ValueError("--prompt is empty: give text to continue")
        shown = options.prompt
    elif not len(text.heldout):
        raise ValueError(NO_DATA)
    else:
        ids = _whole_characters(text.heldout[:PROMPT], tokenizer)
        shown = text.shown(ids)
    (more,) = texts(
        run.decoder(),
        tokenizer,
        [ids],
        options.tokens,
        row_keys(jax.random.key(options.seed), 1),
        stop=[] if known.end is None else [known.end],
        temperature=options.temperature,
    )
    return shown, more


def _whole_characters(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Token ids without those at the end that are a part of a character."""
    for cut in range(min(4, len(ids))):
        if not tokenizer.decode(ids[: len(ids) - cut]).endswith(REPLACEMENT):
            return ids[: len(ids) - cut]
    return ids
