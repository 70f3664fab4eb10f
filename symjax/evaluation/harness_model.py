"""A symjax model as EleutherAI's harness (lm_eval) asks for one."""

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

TOKENS = 256  # of an answer, where a task does not say
READ = "do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p"
WITHOUT_EFFECT = "use_cache", "pad_token_id"  # on an answer
# Options that change nothing if they are 1. Others change nothing if they are 0.
ONES = (
    *("num_beams", "num_beam_groups", "num_return_sequences", "n", "best_of"),
    *("repetition_penalty", "length_penalty", "typical_p"),
)


class Sampling(NamedTuple):
    """The options of a request that are the same for a whole batch."""

    count: int
    until: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float


class HarnessModel(TemplateLM):
    """Answers the three questions of the harness.

    A context is cut on the left where it and its continuation are longer than the
    model's length, and a continuation that is longer is read in windows of that length.
    Before an answer at least half of the length stays for the context. Whole texts are
    read in the same windows: the last one is as long as the others, so that a text of
    several windows has smaller losses than by `Loaded.losses`.

    A text without a context is scored after the token that preceded documents in
    training. If the model has not learned one, the first token of such a text is left
    out of the sums, which is said once on stderr.

    Answers end at the end of the document. Each sampled answer has different draws,
    which are the same in another run. Options of generation that symjax does not have
    are ignored, and each is named once on stderr.

    Args:
        loaded: a decoder with a tokenizer.
    Raises:
        ValueError: it is an encoder or has no tokenizer.
    """

    def __init__(self, loaded: Loaded):
        super().__init__()
        self.loaded, self.decoder = loaded, decoder_of(loaded.model)
        if loaded.tokenizer is None:
            raise ValueError("the model has no tokenizer: the harness gives it texts")
        self.text = loaded.tokenizer
        self.delimiters = loaded.delimiters
        self.asked = itertools.count()  # a number for each answer
        self.said = False  # that first tokens are left out
        self.ignored: set[str] = set()  # options of generation, named so far

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document; −1 where there is none."""
        return -1 if self.delimiters.end is None else self.delimiters.end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; after the token that begins every document (data.bos), if the
        model has learned one, unless `add_special_tokens` is False."""
        ids = self.text.encode(string)
        if self.delimiters.every and add_special_tokens is not False:
            ids = self.delimiters.begun(ids)
        return ids.tolist()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(Σ log p of the continuation, whether it is what greedy decoding writes).

        Raises:
            ValueError: nothing is left of a continuation without a context.
        """
        asked = []
        for context, wanted in _arguments(requests):
            if context:
                before, ids = self._encode_pair(context, wanted)
            else:
                before, ids = [], self.tok_encode(wanted, add_special_tokens=False)
            if not before:
                before, ids = self._without_context(ids)
            asked.append(((context, wanted), before, ids))
        return self._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm)

    def _without_context(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Return (tokens before a text, tokens of it to score).

        Raises:
            ValueError: nothing is left to score.
        """
        if self.delimiters.start is not None:
            return [self.delimiters.start], ids
        if len(ids) == 1:
            raise ValueError(
                f"{self.text.decode(ids)!r} has one token and no context: nothing is "
                "left to score, as the model has not learned how a document begins"
            )
        if ids and not self.said:
            self.said = True
            line = (
                "the model has not learned how a document begins: the first token of a "
                "text without a context is left out of the sums"
            )
            print(line, file=sys.stderr)
        return ids[:1], ids[1:]

    def _loglikelihood_tokens(
        self, requests: list, **_: Any
    ) -> list[tuple[float, bool]]:
        """(Σ log p of the continuation, whether it is what greedy decoding writes)."""
        length, rows, parts = self.loaded.config.model.length, [], []
        for number, (_, context, wanted) in enumerate(requests):
            ids = np.array([*context, *wanted], np.int32)
            for start in range(len(context), len(ids), length):
                end = min(start + length, len(ids))
                rows.append(ids[max(0, end - length - 1) : end])
                parts.append((number, end - start))
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        found = scores(self.decoder, rows)
        for (number, count), one in zip(parts, found, strict=True):
            totals[number] -= math.fsum(one.losses[-count:])
            greedy[number] &= bool(one.likeliest[-count:].all())
        return list(zip(totals, greedy, strict=True))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Σ log p of whole texts.

        Every token is scored once, after as many tokens as fit into the model's length,
        in the windows of lm_eval.
        """
        tokens = (self.tok_encode(*x.args, add_special_tokens=False) for x in requests)
        asked = [(None, *self._without_context(ids)) for ids in tokens]
        found = self._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm)
        return [total for total, _ in found]

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """The text that the model writes after each context, up to one of the task's
        strings or the end of the document.

        Raises:
            ValueError: a context is empty, and the model has not learned how a document
                begins; or a number of the task is outside its range.
        """
        del disable_tqdm
        answers, groups = [""] * len(requests), {}
        key = jax.random.key(0)
        for i, (context, wanted) in enumerate(_arguments(requests)):
            self._name_ignored(wanted)
            sampling = _sampling(wanted)
            one = self._context(context, sampling.count), next(self.asked)
            groups.setdefault(sampling, []).append((i, *one))
        ends = [] if self.delimiters.end is None else [self.delimiters.end]
        for sampling, asked in groups.items():
            places, contexts, numbers = zip(*asked, strict=True)
            found = texts(
                self.decoder,
                self.text,
                contexts,
                sampling.count,
                jax.vmap(partial(jax.random.fold_in, key))(np.array(numbers)),
                stop=[*ends, *sampling.until],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            for place, text in zip(places, found, strict=True):
                answers[place] = text
        return answers

    def _name_ignored(self, wanted: dict[str, Any]) -> None:
        """Print each option once that could change an answer and that symjax lacks."""
        ignored = [
            f"{name}={value!r}"
            for name, value in normalize_gen_kwargs(wanted, TOKENS).items()
            if name not in (*READ, *WITHOUT_EFFECT, *self.ignored)
            and value
            and not (name in ONES and value == 1)
        ]
        if ignored:
            self.ignored |= {x.partition("=")[0] for x in ignored}
            line = f"symjax ignores these options of generation: {', '.join(ignored)}"
            print(line, file=sys.stderr)

    def _context(self, text: str, count: int) -> np.ndarray:
        """Token ids of a context, cut on the left to leave room for `count` tokens."""
        ids = self.delimiters.prompt(self.text.encode(text))
        if not len(ids):
            raise ValueError(
                "a context is empty, and the model has not learned how a document "
                "begins: there is nothing to continue"
            )
        length = self.loaded.config.model.length
        return ids[-max(length - count, (length + 1) // 2) :]


def _arguments(requests: list[Instance]) -> list[Any]:
    """The arguments of each request."""
    return [request.args for request in requests]


def _sampling(wanted: dict[str, Any]) -> Sampling:
    """The options of a request, by the names and rules of lm_eval."""
    known: dict[str, Any] = {**normalize_gen_kwargs(wanted, TOKENS)}
    return Sampling(
        int(known["max_gen_toks"]),
        tuple(x for x in known["until"] if x),
        float(known.get("temperature", 0.0)) if known["do_sample"] else 0.0,
        int(known.get("top_k") or 0),
        1.0 if known.get("top_p") is None else float(known["top_p"]),
    )
