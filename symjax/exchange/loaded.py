"""A trained model to work with: text in, text, logits and losses out."""

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
from symjax.models.build import Model, decoder_of, merged, parts
from symjax.models.generate import whole
from symjax.training.saved import read_run


class TextLoss(NamedTuple):
    """The mean loss of a text.

    Its first token is left out unless the model knows what precedes a document:
    nothing else predicts it.
    """

    nats_per_token: float
    bits_per_byte: float  # of the bytes that these tokens stand for


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model, and what turns text into its tokens.

    Attributes:
        model: a Decoder or Encoder, in evaluation mode.
        tokenizer: None of a model of images or of a generated task.
        config: the configuration of its run; config.model is that of the model.
        step: of the checkpoint.
        labels: the names of its classes, if it is a classifier.
        language: plain values that describe the tokens, as `Examples.language`.
        ema: whether the weights are the mean that optimizer.ema keeps.
    """

    model: Model
    tokenizer: Tokenizer | None
    config: Config
    step: int = 0
    labels: tuple[str, ...] = ()
    language: dict[str, Any] = field(default_factory=dict)
    ema: bool = False

    def __repr__(self) -> str:
        """A few lines: sizes, attention, tokens and step, but no arrays."""
        options, names = self.config.model, ", ".join(map(repr, self.labels[:4]))
        weights = sum(x.size for x in jax.tree.leaves(parts(self.model)[0]))
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
        """The tokens before and after a document.

        Raises:
            ValueError: the model has no tokenizer.
        """
        return delimiters(self._known_tokenizer(), self.language)

    def encode(self, text: str) -> np.ndarray:
        """Token ids [T].

        Raises:
            ValueError: no text, the model has no tokenizer, or its tokenizer not these
                letters.
        """
        if not isinstance(text, str):
            raise ValueError(f"a text is needed, got {text!r}")
        return self._known_tokenizer().encode(text)

    def decode(self, tokens: Any) -> str:
        """The text of token ids [T].

        Raises:
            ValueError: the model has no tokenizer, or its vocabulary not these ids.
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
        """Continue a prompt, or each of several, up to the end of the document.

        Several prompts are continued in batches, each as it would be alone: the first
        of them has the draws of a single prompt, and each of the others has different
        draws, which its place in the list decides. Without learned positions a prompt
        may be longer than the rows of training, and is read whole. An empty prompt asks
        for a whole document, if the model has learned how a document begins.

        Args:
            count: tokens; fewer where learned positions end.
            temperature, top_k, top_p: as in `symjax.models.generate`.
            stop: one or several tokens and strings. The first of them ends a
                continuation and is left out of it.
            ignore_end: go on past the token that ends a document, which is part of the
                text then.
            seed: equal arguments give the same text.
        Returns:
            a string, or a list of them for a list of prompts.
        Raises:
            ValueError: the model is an encoder or has no tokenizer; no prompt, an empty
                one where nothing is known to precede a document, or one that fills
                the learned positions; an empty string to stop at, or what is no token
                or string; a number outside its range.
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
        """Logits at every place, in float32.

        Args:
            tokens: a text, before which the token stands that began every document of
                training (data.bos); or ids [T] or [B, T]; of an encoder also images,
                and its classes come out [B, classes].
        Raises:
            ValueError: no tokens, or ids that the vocabulary does not have.
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
        """−log p of every token but the first, given those before it: nats [T − 1].

        A text is read as a whole document: if the model knows what precedes one,
        that token is put before the text, and the text's first token is scored too
        [T]. Token ids are taken as they are.

        A text longer than the model's length is read in windows of that many tokens,
        as held-out text is in evaluation: a token is given those of its window.

        Args:
            tokens: a text, or ids [T].
        Raises:
            ValueError: the model is an encoder, or the vocabulary does not have these
                ids.
        """
        model, ids = decoder_of(self.model), self._ids(tokens, axes=(1,))
        if isinstance(tokens, str):
            ids = self.delimiters.with_start(ids)
        (found,) = text_losses(model, [ids], self.config.model.length)
        return found

    def loss(self, text: str) -> TextLoss:
        """The mean of `losses` over a text.

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
        """Token ids of a text, or as given, int32. Raises: ValueError: they are none.

        Args:
            axes: how many they may have.
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


def _several(given: Any) -> list[Any]:
    """What is given, one or several, as a list."""
    one = isinstance(given, str | bytes) or not isinstance(given, Iterable)
    return [given] if one else list(given)


def load(
    workdir: str | os.PathLike[str],
    step: int | None = None,
    *,
    best: bool = False,
    ema: bool = False,
    imports: Words = (),
) -> Loaded:
    """The model of a run, from its checkpoints alone: `data` is not needed.

        model = symjax.load("runs/diff_sym-tiny")
        print(model.generate("def main(", temperature=0.7, top_p=0.9))

    Args:
        workdir: of train.py; also gs://BUCKET/FOLDER.
        step: of a checkpoint; None: the newest whole one.
        best: the one of the least held-out loss among those that are kept.
        ema: take the mean of the weights that the run kept by optimizer.ema.
        imports: files (my_mechanism.py) or modules to run first, which add the
            mechanism that the run was trained with; "stored" runs the source that its
            checkpoint stores, "show" prints it.
    Raises:
        ValueError: there is no such run or checkpoint, it is damaged, it has no mean
            of the weights, or it needs code that was not given.
    """
    with using(imports):
        found = read_run(workdir, step, best=best, ema=ema)
    model = merged(found.config.model, found.params, found.constants)
    tokenizer, about = tokenizer_of(found.language), (found.labels, found.language)
    return Loaded(model, tokenizer, found.config, found.step, *about, ema)


@partial(jax.jit, static_argnums=0)
def _logits(graph: Any, weights: Any, tokens: Array) -> Array:
    return nnx.merge(graph, weights)(tokens)
