"""A symjax model in the interface of EleutherAI's evaluation harness (lm_eval)."""

import itertools
import math
import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from symjax.exchange import Loaded
from symjax.exchange.continued import texts
from symjax.exchange.scores import scores
from symjax.models.build import decoder_of

MAX_TOKENS = 256  # the most tokens of an answer, if the task sets no limit
SUPPORTED = "do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p"
WITHOUT_EFFECT = "use_cache", "pad_token_id"  # they cannot change an answer
# Options that are off at the value 1. All other ignored options are off at 0.
OFF_AT_ONE = (
    *("num_beams", "num_beam_groups", "num_return_sequences", "n", "best_of"),
    *("repetition_penalty", "length_penalty", "typical_p"),
)


class Sampling(NamedTuple):
    """Options of generation; the requests of one batch share them."""

    count: int
    until: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float


class HarnessModel(TemplateLM):
    """The three request types of the harness, answered by a symjax decoder.

    Long inputs: if a context and its continuation exceed the model's length, the
    context is cut on the left. A continuation longer than the model's length is scored
    in windows of that length, and so is a whole text. The last window is as long as the
    others and overlaps the one before it. Its tokens therefore have more context than
    in `Loaded.losses`, whose last window is shorter. In generation, a context is cut to
    leave room for the answer, but keeps at least half of the model's length.

    Empty contexts: a text without a context is scored after the token that preceded
    documents in training. If the model has learned no such token, the first token of
    the text is left out of the sums, and one line on stderr says so.

    Generation: answers end at the end of the document. Each sampled answer has its own
    random key, and another run draws the same keys. Options of generation that symjax
    does not support are ignored. Those that could change an answer are named once on
    stderr.

    Args:
        loaded: a decoder with a tokenizer.
    Raises:
        ValueError: the model is an encoder or has no tokenizer.
    """

    def __init__(self, loaded: Loaded):
        super().__init__()
        self.loaded, self.decoder = loaded, decoder_of(loaded.model)
        if loaded.tokenizer is None:
            raise ValueError("the model has no tokenizer: the harness gives it texts")
        self.text_tokenizer = loaded.tokenizer
        self.delimiters = loaded.delimiters
        self.answer_numbers = itertools.count()  # folded into the random keys
        self.warned_first_tokens = False
        self.ignored: set[str] = set()  # ignored options that stderr has named

    @property
    def eot_token_id(self) -> int:
        """Token id of the end of a document; −1 if the model has none."""
        return -1 if self.delimiters.end is None else self.delimiters.end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a string.

        If all documents of training began with a token (data.bos), the ids begin with
        that token, unless `add_special_tokens` is False.
        """
        ids = self.text_tokenizer.encode(string)
        if self.delimiters.every and add_special_tokens is not False:
            ids = self.delimiters.with_start(ids)
        return ids.tolist()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return Σ log p of each continuation, and whether greedy decoding writes it.

        Raises:
            ValueError: a continuation without a context has no token to score.
        """
        encoded = []
        for context, continuation in _arguments(requests):
            if context:
                before, ids = self._encode_pair(context, continuation)
            else:
                ids = self.tok_encode(continuation, add_special_tokens=False)
                before = []
            if not before:
                before, ids = self._split_without_context(ids)
            encoded.append(((context, continuation), before, ids))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _split_without_context(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Return (tokens to condition on, tokens to score) of a text without a context.

        Raises:
            ValueError: no token is left to score.
        """
        if self.delimiters.start is not None:
            return [self.delimiters.start], ids
        if len(ids) == 1:
            text = self.text_tokenizer.decode(ids)
            raise ValueError(
                f"{text!r} has one token and no context: nothing is left to score, as "
                "the model has not learned how a document begins"
            )
        if ids and not self.warned_first_tokens:
            self.warned_first_tokens = True
            line = (
                "the model has not learned how a document begins: the first token of a "
                "text without a context is left out of the sums"
            )
            print(line, file=sys.stderr)
        return ids[:1], ids[1:]

    def _loglikelihood_tokens(
        self, requests: list, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return Σ log p of each continuation, and whether greedy decoding writes it.

        A window of `length` inputs scores at most `length` tokens of a continuation.

        Args:
            requests: (texts, token ids of the context, token ids of the continuation).
        """
        length, windows, parts = self.loaded.config.model.length, [], []
        for number, (_, context, continuation) in enumerate(requests):
            ids = np.array([*context, *continuation], np.int32)
            for start in range(len(context), len(ids), length):
                end = min(start + length, len(ids))
                windows.append(ids[max(0, end - length - 1) : end])
                parts.append((number, end - start))
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        scored = scores(self.decoder, windows)
        for (number, count), window in zip(parts, scored, strict=True):
            totals[number] -= math.fsum(window.losses[-count:])
            greedy[number] &= bool(window.likeliest[-count:].all())
        return list(zip(totals, greedy, strict=True))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return Σ log p of each whole text.

        Every token is scored once, with at most `model.length` tokens before it as its
        context. The first token is left out if the model has not learned how a document
        begins.
        """
        tokens = (self.tok_encode(*x.args, add_special_tokens=False) for x in requests)
        encoded = [(None, *self._split_without_context(ids)) for ids in tokens]
        answers = self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)
        return [total for total, _ in answers]

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Return the text that the model writes after each context.

        A text ends before the first stop string of its task, or at the end of the
        document.

        Raises:
            ValueError: a context is empty, and the model has not learned how a document
                begins; or an option of generation is outside its range.
        """
        del disable_tqdm
        answers, groups = [""] * len(requests), {}
        key = jax.random.key(0)
        for index, (context, options) in enumerate(_arguments(requests)):
            self._warn_of_ignored(options)
            sampling = _sampling(options)
            request = self._context(context, sampling.count), next(self.answer_numbers)
            groups.setdefault(sampling, []).append((index, *request))
        ends = [] if self.delimiters.end is None else [self.delimiters.end]
        for sampling, group in groups.items():
            indices, contexts, numbers = zip(*group, strict=True)
            written = texts(
                self.decoder,
                self.text_tokenizer,
                contexts,
                sampling.count,
                jax.vmap(partial(jax.random.fold_in, key))(np.array(numbers)),
                stop=[*ends, *sampling.until],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            for index, text in zip(indices, written, strict=True):
                answers[index] = text
        return answers

    def _warn_of_ignored(self, options: dict[str, Any]) -> None:
        """Print options that symjax ignores and that could change an answer, once."""
        ignored = [
            f"{name}={value!r}"
            for name, value in normalize_gen_kwargs(options, MAX_TOKENS).items()
            if name not in (*SUPPORTED, *WITHOUT_EFFECT, *self.ignored)
            and value
            and not (name in OFF_AT_ONE and value == 1)
        ]
        if ignored:
            self.ignored |= {x.partition("=")[0] for x in ignored}
            line = f"symjax ignores these options of generation: {', '.join(ignored)}"
            print(line, file=sys.stderr)

    def _context(self, text: str, count: int) -> np.ndarray:
        """Return token ids of a context, cut on the left to leave room for an answer.

        At least half of the model's length is left to the context.

        Args:
            count: the most tokens of the answer.

        Raises:
            ValueError: there is no token to continue.
        """
        ids = self.delimiters.prompt(self.text_tokenizer.encode(text))
        if not len(ids):
            raise ValueError(
                "a context is empty, and the model has not learned how a document "
                "begins: there is nothing to continue"
            )
        length = self.loaded.config.model.length
        return ids[-max(length - count, (length + 1) // 2) :]


def _arguments(requests: list[Instance]) -> list[Any]:
    """Return the arguments of each request."""
    return [request.args for request in requests]


def _sampling(options: dict[str, Any]) -> Sampling:
    """Return the options of a request, with the defaults of lm_eval."""
    chosen: dict[str, Any] = {**normalize_gen_kwargs(options, MAX_TOKENS)}
    return Sampling(
        int(chosen["max_gen_toks"]),
        tuple(x for x in chosen["until"] if x),
        float(chosen.get("temperature", 0.0)) if chosen["do_sample"] else 0.0,
        int(chosen.get("top_k") or 0),
        1.0 if chosen.get("top_p") is None else float(chosen["top_p"]),
    )
