"""Subword tokenizers: any `tokenizer.json` of Hugging Face, and byte-level BPE.

The package `tokenizers` does the work and is imported only here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from symjax.optional import needed

REPLACEMENT = "\ufffd"  # for ids outside the vocabulary
END = "<|endoftext|>"  # of documents, in the vocabularies that are trained here
ENDS = (END, "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
PIECE = 1 << 20  # characters of a piece of a corpus
CUT = 1 << 16  # encoded or learned at a time: the library takes 450 bytes for each
SAMPLE = 1 << 28  # characters that a vocabulary is learned from, at most
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of byte fallback
FILE, ABOUT = "tokenizer.json", "tokenizer_config.json"  # as Hugging Face names them


@dataclass(frozen=True)
class SubwordTokenizer:
    """One token a piece of a word.

    Text that spells a special token, such as "<|endoftext|>", is encoded as ordinary
    text. No token is added before or after a text.

    Attributes:
        definition: the content of `tokenizer.json`.
        end: the special token that ends a document; empty: there is none.
    """

    definition: str
    end: str
    kind: ClassVar[str] = "subword"
    unit: ClassVar[str] = "token"

    def __repr__(self) -> str:
        size = f"{len(self.definition):,} characters of {FILE}"
        return f"{type(self).__name__}({size}, end={self.end!r})"

    @functools.cached_property
    def _library(self) -> Any:
        loaded = _tokenizers().Tokenizer.from_str(self.definition)
        loaded.no_truncation()
        loaded.no_padding()
        loaded.encode_special_tokens = True
        return loaded

    @functools.cached_property
    def vocabulary(self) -> int:
        return max(self._library.get_vocab().values()) + 1

    @functools.cached_property
    def document_end(self) -> int | None:
        """The id of `end`."""
        return self._library.token_to_id(self.end) if self.end else None

    def encode(self, text: str) -> np.ndarray:
        """Token ids [T], of the smallest unsigned type that holds the vocabulary.

        A text longer than `CUT` characters is cut where white space follows a word,
        which for byte-level BPE gives the tokens of the whole text.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        utf8(text, "strict")
        none = np.empty(0, np.min_scalar_type(self.vocabulary - 1))
        return np.concatenate([none, *self.encode_all(list(self.pieces([text])))])

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [T] of each of some pieces of text, on all cores."""
        dtype = np.min_scalar_type(self.vocabulary - 1)
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(x.ids, dtype) for x in found]

    def decode(self, ids: Any) -> str:
        """The text of token ids [T], special tokens by their names; ids outside the
        vocabulary become U+FFFD."""
        ids = np.asarray(ids).reshape(-1).astype(np.int64)
        unknown = np.flatnonzero((ids < 0) | (ids >= self.vocabulary))
        decode = functools.partial(self._library.decode, skip_special_tokens=False)
        known = np.split(ids, unknown)  # each part but the first begins with an unknown
        parts = [known[0], *(part[1:] for part in known[1:])]
        return REPLACEMENT.join(decode(part.tolist()) for part in parts)

    def size_of(self, token: int) -> int:
        """The bytes of UTF-8 that a token at the beginning of a text stands for."""
        spelled = self._library.id_to_token(token)
        if isinstance(self._library.decoder, _tokenizers().decoders.ByteLevel):
            return len(spelled)  # a letter of its alphabet is a byte
        if BYTE.fullmatch(spelled):
            return 1
        return len(self.decode([token]).encode())

    @staticmethod
    def pieces(document: Iterable[str]) -> Iterator[str]:
        """A document cut where no token is, as far as `encode` does."""
        return pieces(document, CUT)

    def describe(self) -> dict[str, str]:
        """What `from_description` needs, as JSON."""
        return {"kind": self.kind, "definition": self.definition, "end": self.end}

    def files(self, length: int) -> dict[str, str]:
        """The files that `from_file` and AutoTokenizer of transformers read, by name.

        Args:
            length: the tokens that the model beside them was trained to see.
        """
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            **({"eos_token": self.end} if self.end else {}),
        }
        return {FILE: self.definition, ABOUT: json.dumps(about, indent=1) + "\n"}


def utf8(text: str, errors: str) -> bytes:
    """Raises: ValueError: the text holds half of a surrogate pair."""
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {text[error.start]!r} at position {error.start} is half of a "
            "surrogate pair and has no UTF-8 bytes"
        ) from None


def pieces(parts: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """A text in pieces of about `size` characters, which begin at white space."""
    rest, seen = "", 1
    for part in parts:
        for start in range(0, len(part), size):
            rest += part[start : start + size]
            if len(rest) < size:
                continue
            if cut := _last_word_end(rest, seen):
                yield rest[:cut]
                rest, seen = rest[cut:], 1
            else:
                seen = len(rest)
    if rest:
        yield rest


def _last_word_end(text: str, first: int) -> int:
    """Where white space follows the last time, from a place on; 0: nowhere."""
    for place in range(len(text) - 1, first - 1, -1):
        if text[place] in " \n" and not text[place - 1].isspace():
            return place
    return 0


def state(path: Path) -> str:
    """A hash of the files that `from_file` reads."""
    path = path / FILE if path.is_dir() else path
    files = [x for x in (path, path.with_name(ABOUT)) if x.is_file()]
    return hashlib.sha256(b"\0".join(x.read_bytes() for x in files)).hexdigest()


def from_file(path: Path) -> SubwordTokenizer:
    """The tokenizer of a `tokenizer.json`, or of the folder that it is in.

    The end of documents is `eos_token` of the `tokenizer_config.json` beside it, else
    the first of `ENDS` that the vocabulary has.

    Raises:
        ValueError: the file cannot be read or is no tokenizer, or the package
            `tokenizers` is not installed.
    """
    path = path / FILE if path.is_dir() else path
    try:
        definition = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.tokenizer {str(path)!r} cannot be read: {error}"
        ) from None
    library = _tokenizers()
    try:
        known = library.Tokenizer.from_str(definition).get_vocab()
    except Exception as error:  # the library has no other kind
        raise ValueError(
            f"data.tokenizer {str(path)!r} is no tokenizer.json of Hugging Face: "
            f"{' '.join(str(error).split())}"
        ) from None
    if not known:
        raise ValueError(f"data.tokenizer {str(path)!r} has an empty vocabulary")
    ends = (_stated_end(path.with_name(ABOUT)), *ENDS)
    return SubwordTokenizer(definition, next((x for x in ends if x in known), ""))


def _stated_end(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""


def train_bpe(texts: Iterable[str], vocabulary: int) -> SubwordTokenizer:
    """Byte-level BPE of at most `vocabulary` tokens, learned from texts.

    Every text can be encoded: all 256 bytes are tokens. Words are split as in GPT-2.
    The same texts give the same tokens. Bars on a terminal only.

    Raises:
        ValueError: the package `tokenizers` is not installed.
    Source: Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019.
    """
    library = _tokenizers()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    cut = (piece for text in _first(texts, SAMPLE) for piece in pieces([text], CUT))
    made.train_from_iterator(cut, trainer)
    return SubwordTokenizer(made.to_str(), END)


def _first(texts: Iterable[str], count: int) -> Iterator[str]:
    """Texts until they have so many characters."""
    for text in texts:
        yield text
        count -= len(text)
        if count <= 0:
            return


def _tokenizers() -> Any:
    return needed(
        "tokenizers",
        "data.tokenizer: bpe and tokenizer.json need the package tokenizers: "
        "pip install tokenizers",
    )
