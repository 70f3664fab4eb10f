"""`Loaded`: a trained model that continues texts and returns logits and losses."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from symjax.config import Config, attention_of, is_causal
from symjax.data.delimiters import Delimiters, delimiters
from symjax.data.examples import tokenizer_of
from symjax.data.subwords import utf8
from symjax.data.tokens import Tokenizer
from symjax.exchange.continued import row_keys, texts
from symjax.exchange.scores import text_losses
from symjax.imports import Words, using
from symjax.models.build import Model, decoder_of, merged, weights_and_constants
from symjax.models.generate import whole
from symjax.training.saved import read_run


class TextLoss(NamedTuple):
    """Mean loss of a text.

    The first token is scored only if the model has learned a token that precedes
    documents, since otherwise nothing predicts it.

    Attributes:
        nats_per_token: mean of −ln p over the scored tokens.
        bits_per_byte: sum of −log₂ p of these tokens, divided by their bytes.
    """

    nats_per_token: float
    bits_per_byte: float


@dataclass(frozen=True, eq=False)
class Loaded:
    """A trained model with its tokenizer and the configuration of its run.

    Attributes:
        model: a Decoder or Encoder, in evaluation mode.
        tokenizer: None if the model reads images or a generated task, or if a folder of
            transformers has no tokenizer.json.
        config: the configuration of the run; `config.model` describes the model.
        step: the step of the checkpoint.
        labels: the names of the classes, if the model is a classifier.
        language: a dict that describes the tokens, as `Examples.language`.
        ema: whether the weights are the moving average that optimizer.ema keeps.
    """

    model: Model
    tokenizer: Tokenizer | None
    config: Config
    step: int = 0
    labels: tuple[str, ...] = ()
    language: dict[str, Any] = field(default_factory=dict)
    ema: bool = False

    def __repr__(self) -> str:
        """Return a few lines: sizes, attention, tokenizer and step, but no arrays."""
        options, names = self.config.model, ", ".join(map(repr, self.labels[:4]))
        weights = sum(
            x.size for x in jax.tree.leaves(weights_and_constants(self.model)[0])
        )
        rows = {
            "model": f"{options.kind}, {weights:,} parameters, {options.depth} layers "
            f"of width {options.width}, {options.heads} heads, {options.length} tokens",
            "attention": attention_of(options),
            "tokenizer": repr(self.tokenizer),
            "step": f"{self.step}{', the mean of weights (ema)' * self.ema}",
        }
        if self.labels:
            more = ", …" * (len(self.labels) > 4)
            rows["labels"] = f"{len(self.labels)}: {names}{more}"
        lines = [f"  {name:<11}{value}" for name, value in rows.items()]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    @property
    def delimiters(self) -> Delimiters:
        """Tokens before and after a document.

        Raises:
            ValueError: the model has no tokenizer.
        """
        return delimiters(self._known_tokenizer(), self.language)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids [T] of a text.

        Raises:
            ValueError: `text` is not a string, the model has no tokenizer, or the
                tokenizer does not know a character.
        """
        if not isinstance(text, str):
            raise ValueError(f"a text is needed, got {text!r}")
        return self._known_tokenizer().encode(text)

    def decode(self, tokens: Any) -> str:
        """Return the text of token ids [T].

        Raises:
            ValueError: the model has no tokenizer, or an id is outside the vocabulary.
        """
        tokenizer = self._known_tokenizer()
        return tokenizer.decode(self._ids(tokens, axes=(1,)))

    def generate(
        self,
        prompt: str | Sequence[str],
        count: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: int | str | Sequence[int | str] = (),
        ignore_end: bool = False,
        seed: int = 0,
    ) -> Any:
        """Continue a prompt, or each prompt of a list, up to the end of the document.

        Several prompts are continued in batches. The continuation of a prompt does not
        depend on the other prompts, but its random draws depend on its place in the
        list. The first prompt has the same draws as a single prompt. Without learned
        positions, a prompt may be longer than the rows of training. An empty prompt
        gives a whole document, if the model has learned a token that precedes
        documents.

        Args:
            count: largest number of new tokens; learned positions may leave fewer.
            temperature, top_k, top_p: as in `symjax.models.generate`.
            stop: a token id or a string, or several. The first one that appears ends
                the continuation and is not part of it.
            ignore_end: continue after the token that ends a document. It is then part
                of the text.
            seed: seed of the draws; equal arguments give equal texts.
        Returns:
            A string, or a list of strings for a list of prompts.
        Raises:
            ValueError: the model is an encoder or has no tokenizer; there is no prompt;
                a prompt is empty and the model knows no token that precedes a document;
                a prompt fills the learned positions; `stop` holds an empty string or a
                value that is neither a token nor a string; a number is out of range.
        """
        stop = _several(stop)
        if "" in stop:
            raise ValueError("stop: every text holds the empty string, got ''")
        prompts = _several(prompt)
        tokenizer, model = self._known_tokenizer(), decoder_of(self.model)
        known = self.delimiters
        if known.end is not None and not ignore_end:
            stop.append(known.end)
        ids = [known.prompt(self.encode(text)) for text in prompts]
        key = jax.random.key(whole("seed", seed, 0))
        found = texts(
            model,
            tokenizer,
            ids,
            count,
            row_keys(key, len(ids)),
            stop=stop,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        return found[0] if isinstance(prompt, str) else found

    def logits(self, tokens: Any) -> Float[Array, "*B T vocabulary"]:
        """Return the logits at every position, in float32.

        Args:
            tokens: a text, or token ids [T] or [B, T], or images for an encoder of
                images. If every document of training began with the BOS token
                (data.bos), that token is put before a text.
        Returns:
            [B T vocabulary], or [B 1 classes] of a classifier; without B for a text or
            token ids [T].
        Raises:
            ValueError: there are no tokens, or an id is outside the vocabulary.
        """
        if isinstance(tokens, str) and self.delimiters.every:
            tokens = self.delimiters.with_start(self.encode(tokens))
        if not self.config.model.patch:
            tokens = self._ids(tokens, axes=(1, 2))
            if not tokens.size:
                raise ValueError(f"logits need a token or more, got {tokens.shape}")
        tokens = jnp.asarray(tokens)
        if tokens.ndim == 1:
            return self.logits(tokens[None])[0]
        return _logits(*nnx.split(self.model), tokens)

    def losses(self, tokens: Any) -> np.ndarray:
        """Return −log p of each token given the tokens before it, in nats.

        The first of T token ids is not scored, so the result is [T − 1]. A text is
        scored as a whole document: if the model has learned a token that precedes
        documents, that token is put before the text, and the result is [T].

        A text longer than config.model.length is read in windows of that length, like
        held-out text in evaluation. A token is then predicted only from the tokens
        before it in its window.

        Args:
            tokens: a text, or token ids [T].
        Raises:
            ValueError: the model is an encoder, an id is outside the vocabulary, or
                `tokens` is a text and the model has no tokenizer.
        """
        model, ids = decoder_of(self.model), self._ids(tokens, axes=(1,))
        if isinstance(tokens, str):
            ids = self.delimiters.with_start(ids)
        (found,) = text_losses(model, [ids], self.config.model.length)
        return found

    def loss(self, text: str) -> TextLoss:
        """Return the mean of `losses` over a text.

        Raises:
            ValueError: no token is left to score.
        """
        losses = self.losses(text).astype(np.float64)
        if not len(losses):
            needed = "2 tokens" if self.delimiters.start is None else "1 token"
            raise ValueError(
                f"a loss needs {needed} or more, {text!r} has {len(self.encode(text))}"
            )
        size = len(utf8(text, "surrogateescape"))
        if self.delimiters.start is None:
            first = int(self.encode(text)[0])
            size -= self._known_tokenizer().size_of(first, text)
        return TextLoss(
            float(losses.mean()), float(losses.sum() / max(size, 1) / math.log(2))
        )

    def _ids(self, tokens: Any, axes: Sequence[int]) -> np.ndarray:
        """Return the token ids of a text, or the given ids, as int32.

        Args:
            axes: allowed numbers of axes.
        Raises:
            ValueError: the given values are not token ids of the vocabulary.
        """
        ids = np.asarray(self.encode(tokens) if isinstance(tokens, str) else tokens)
        if ids.ndim not in axes or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"token ids are whole numbers [T]{' or [B, T]' if 2 in axes else ''}, "
                f"got {ids.dtype} {ids.shape}"
            )
        model = self.config.model
        least, most = (0 if is_causal(model) else -1), model.vocabulary  # −1: padding
        if ids.size and not least <= ids.min() <= ids.max() < most:
            raise ValueError(
                f"token ids must be in [{least}, {most}), the model's vocabulary, got "
                f"{ids.min()} to {ids.max()}"
            )
        return ids.astype(np.int32)

    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            source = self.config.data.source
            raise ValueError(f"a model of data.source={source} has no tokenizer")
        return self.tokenizer


def _several(values: Any) -> list[Any]:
    """Return one or several values as a list."""
    one = isinstance(values, str | bytes) or not isinstance(values, Iterable)
    return [values] if one else list(values)


def load(
    workdir: str | os.PathLike[str],
    step: int | None = None,
    *,
    best: bool = False,
    ema: bool = False,
    imports: Words = (),
) -> Loaded:
    """Load the model of a run from its checkpoints. The run's data is not needed.

        model = symjax.load("runs/diff_sym-tiny")
        print(model.generate("def main(", temperature=0.7, top_p=0.9))

    Args:
        workdir: the --workdir of train.py; also gs://BUCKET/FOLDER.
        step: step of the checkpoint; None means the newest undamaged one.
        best: take the kept checkpoint with the lowest held-out loss.
        ema: take the moving average of the weights that optimizer.ema keeps.
        imports: files (my_mechanism.py) or modules to run first, which define the
            mechanism of the model. "stored" runs the source that the checkpoint
            stores; "show" prints it.
    Raises:
        ValueError: there is no such run or checkpoint, the checkpoint is damaged or has
            no moving average, or it needs code that was not given.
    """
    with using(imports):
        found = read_run(workdir, step, best=best, ema=ema)
    model = merged(found.config.model, found.params, found.constants)
    tokenizer, about = tokenizer_of(found.language), (found.labels, found.language)
    return Loaded(model, tokenizer, found.config, found.step, *about, ema)


@partial(jax.jit, static_argnums=0)
def _logits(graph: Any, weights: Any, tokens: Array) -> Array:
    return nnx.merge(graph, weights)(tokens)
