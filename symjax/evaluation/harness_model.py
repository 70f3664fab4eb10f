"""A symjax model as EleutherAI's harness (lm_eval) asks for one."""

import itertools
import math
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from symjax.data.corpus import SEPARATOR
from symjax.exchange import Loaded
from symjax.exchange.continued import continued, ended
from symjax.exchange.scores import scores
from symjax.models.build import decoder_of

TOKENS = 256  # of an answer, where a task does not say


class HarnessModel(TemplateLM):
    """Answers the three questions of the harness.

    A context is cut on the left where it and its continuation are longer than the
    model's length, and a continuation that is longer is read in windows of that length.
    Whole texts are read as by `Loaded.losses`, after the first token. Sampled answers
    are draws of their own, and the same in another run.

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
        self.first_token = self._first_token()
        self.asked = itertools.count()  # a number for each answer

    @property
    def eot_token_id(self) -> int:
        """What stands before a text without a context."""
        return self.first_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        del add_special_tokens  # there are none
        return self.text.encode(string).tolist()

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
        """Σ log p of whole texts."""
        del disable_tqdm
        texts = (self.tok_encode(*request.args) for request in requests)
        rows = ([self.first_token, *ids] for ids in texts)
        return [-math.fsum(self.loaded.losses(np.array(row))) for row in rows]

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """What the model writes after each context, up to one of the task's strings."""
        del disable_tqdm
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, wanted: dict[str, Any]) -> str:
        until = wanted.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        count = int(wanted.get("max_gen_toks", TOKENS))
        ids = np.array(self.tok_encode(context) or [self.first_token])
        if self.decoder.learned_positions:
            ids = ids[-max(1, self.decoder.length - count) :]
        warm = wanted.get("temperature", 0.0) if wanted.get("do_sample") else 0.0
        (row,) = continued(
            self.decoder,
            [ids],
            count,
            jax.random.fold_in(jax.random.key(0), next(self.asked)),
            temperature=warm,
            top_k=int(wanted.get("top_k", 0)),
            top_p=float(wanted.get("top_p", 1.0)),
        )
        return ended(row, self.text, stop)

    def _first_token(self) -> int:
        """The token that ends a document, a line's end, or the first of all."""
        if self.text.document_end is not None:
            return self.text.document_end
        for text in (SEPARATOR, "\n"):
            try:
                return int(self.text.encode(text)[-1])
            except ValueError:  # not in the alphabet
                continue
        return 0
