"""Subword tokenizers: any `tokenizer.json` of Hugging Face, and byte-level BPE.

The package `tokenizers` does the work and is imported only here.
"""

from __future__ import annotations

import dataclasses
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

from symjax.data.post_processing import added, processed
from symjax.optional import needed

REPLACEMENT = "\ufffd"  # for ids outside the vocabulary
END = "<|endoftext|>"  # of documents, in the vocabularies that are trained here
ENDS = (END, "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
PIECE = 1 << 20  # characters of a piece of a corpus
CUT = 1 << 16  # encoded or learned at a time: the library takes 450 bytes for each
WORD = "a"  # before a piece that is not the first one of its text
SAMPLE = 1 << 28  # characters that a vocabulary is learned from, at most
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of byte fallback
FILE, ABOUT = "tokenizer.json", "tokenizer_config.json"  # as Hugging Face names them


class Rest(str):
    """A piece of a text that follows another one."""


@dataclass(frozen=True)
class SubwordTokenizer:
    """One token a piece of a word.

    Text that spells a special token, such as "<|endoftext|>", is encoded as ordinary
    text. `encode` adds no token before or after it.

    Attributes:
        definition: the content of `tokenizer.json`.
        end: the special token that ends a document; empty: there is none.
        bos: the token that begins every document and prompt; empty: there is none.
    """

    definition: str
    end: str
    bos: str = ""
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

    def token_of(self, name: str) -> int | None:
        """The id of a token of the vocabulary; None if there is no such token."""
        return self._library.token_to_id(name)

    @functools.cached_property
    def document_begin(self) -> int | None:
        """The id of `bos`."""
        return self.token_of(self.bos) if self.bos else None

    @functools.cached_property
    def document_end(self) -> int | None:
        """The id of `end`."""
        return self.token_of(self.end) if self.end else None

    @functools.cached_property
    def added_before(self) -> list[str]:
        """The tokens that the post-processor of the file adds before a text."""
        return added(self._library)[0]

    def encode(self, text: str) -> np.ndarray:
        """Token ids [T], of the smallest unsigned type that holds the vocabulary.

        A text longer than `CUT` characters is cut where white space follows a word, and
        each part is encoded after a word, which gives the tokens of the whole text
        where no token crosses the beginning of white space.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        utf8(text, "strict")
        none = np.empty(0, np.min_scalar_type(self.vocabulary - 1))
        return np.concatenate([none, *self.encode_all(list(self.pieces([text])))])

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [T] of each of some pieces of text, on all cores.

        A `Rest` is encoded after a word, whose tokens are left out: a tokenizer may
        add a prefix to a text, or remove the white space that it begins with.
        """
        dtype, word = np.min_scalar_type(self.vocabulary - 1), self._word
        whole = [WORD + x if word and isinstance(x, Rest) else x for x in texts]
        found = self._library.encode_batch_fast(whole, add_special_tokens=False)
        ids = [np.asarray(x.ids, dtype) for x in found]
        for place, text in enumerate(texts):
            if text is not whole[place]:
                before, own = np.split(ids[place], [len(word)])
                if before.tolist() != word:  # a token crosses the cut
                    own = self.encode_all([str(text)])[0]
                ids[place] = own
        return ids

    @functools.cached_property
    def _word(self) -> list[int]:
        """The tokens of `WORD`."""
        return self._library.encode(WORD, add_special_tokens=False).ids

    def decode(self, ids: Any) -> str:
        """The text of token ids [T], special tokens by their names; ids outside the
        vocabulary become U+FFFD."""
        ids = np.asarray(ids).reshape(-1).astype(np.int64)
        unknown = np.flatnonzero((ids < 0) | (ids >= self.vocabulary))
        decode = functools.partial(self._library.decode, skip_special_tokens=False)
        known = np.split(ids, unknown)  # each part but the first begins with an unknown
        parts = [known[0], *(part[1:] for part in known[1:])]
        return REPLACEMENT.join(decode(part.tolist()) for part in parts)

    def size_of(self, token: int, text: str = "") -> int:
        """The bytes of UTF-8 that a token at the beginning of a text stands for.

        A space that the tokenizer adds before a text is none of its bytes.

        Args:
            text: the text; empty: any that begins with no space.
        """
        spelled, shown = self._library.id_to_token(token), self._after_word([token])
        added = shown.startswith(" ") and self._adds_space(text[:1] == " ")
        if isinstance(self._library.decoder, _tokenizers().decoders.ByteLevel):
            return len(spelled) - added  # a letter of its alphabet is a byte
        if BYTE.fullmatch(spelled):
            return 1
        return len(shown.encode()) - added

    def _adds_space(self, spaced: bool) -> bool:
        """Return whether a space is added before a text.

        Args:
            spaced: the text begins with a space.
        """
        own = " " * spaced
        return self._after_word(self.encode(own + WORD)).startswith(own + " ")

    def _after_word(self, ids: Any) -> str:
        """The text of token ids after a word; before one, decoders may drop a space."""
        return self.decode([*self._word, *ids])[len(self.decode(self._word)) :]

    @staticmethod
    def pieces(document: Iterable[str]) -> Iterator[str]:
        """A document cut where no token is, as far as `encode` does: its first piece,
        and each `Rest`."""
        for number, piece in enumerate(pieces(document, CUT)):
            yield Rest(piece) if number else piece

    def describe(self) -> dict[str, str]:
        """Return what `from_description` needs, as JSON."""
        known = {"kind": self.kind, "definition": self.definition, "end": self.end}
        return {**known, "bos": self.bos} if self.bos else known

    def files(self, length: int, *, trained: bool = True) -> dict[str, str]:
        """The files that `from_file` and AutoTokenizer of transformers read, by name.

        AutoTokenizer gives a text the ids of `encode`, after `bos`.

        Args:
            length: the tokens that the model beside them was trained to see.
            trained: with `encode`, so that text that spells a special token is text.
        """
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            **({"eos_token": self.end} if self.end else {}),
            **({"bos_token": self.bos} if self.bos else {}),
            **({"split_special_tokens": True} if trained else {}),
        }
        definition = processed(self.definition, self._library, self.bos)
        return {FILE: definition, ABOUT: json.dumps(about, indent=1) + "\n"}


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
    """Find the best end of a word to cut a text at, from a place on; 0: there is none.

    The best is the last space after a letter or digit: tokens of some vocabularies
    cross other ends of words, such as "};\\n". The next best is the last new line
    after a letter or digit, and then the last white space after anything else.
    """
    best, found = 0, 0
    for place in range(len(text) - 1, first - 1, -1):
        if text[place] in " \n" and not text[place - 1].isspace():
            rank = 1 + text[place - 1].isalnum() * (1 + (text[place] == " "))
            if rank > best:
                best, found = rank, place
            if best == 3:
                break
    return found


def state(path: Path) -> str:
    """A hash of the files that `from_file` reads."""
    path = path / FILE if path.is_dir() else path
    files = [x for x in (path, path.with_name(ABOUT)) if x.is_file()]
    return hashlib.sha256(b"\0".join(x.read_bytes() for x in files)).hexdigest()


def from_file(path: Path, bos: str = "auto") -> SubwordTokenizer:
    """The tokenizer of a `tokenizer.json`, or of the folder that it is in.

    The end of documents is `eos_token` of the `tokenizer_config.json` beside it, else
    the first of `ENDS` that the vocabulary has.

    Args:
        bos: as `with_bos`.
    Raises:
        ValueError: the file cannot be read or is no tokenizer, it does not say which
            token begins a text, or the package `tokenizers` is not installed.
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
    ends = (stated(path, "eos_token"), *ENDS)
    made = SubwordTokenizer(definition, next((x for x in ends if x in known), ""))
    return with_bos(made, bos, path)


def with_bos(tokenizer: SubwordTokenizer, bos: str, path: Path) -> SubwordTokenizer:
    """The tokenizer with or without a token that begins every document and prompt.

    Args:
        bos: "auto": as its post-processor does, if it adds one token before a text;
            "false": without; "true": with that token, or else with `bos_token` of the
            `tokenizer_config.json` beside it.
        path: of its file.
    Raises:
        ValueError: it is to have one, and nothing says which.
    """
    before = tokenizer.added_before
    found = before[0] if len(before) == 1 and bos != "false" else ""
    if bos == "true" and not found:
        found = stated(path, "bos_token")
        if tokenizer.token_of(found) is None:
            raise ValueError(
                f"data.bos true: {str(path)!r} does not say which token begins a text: "
                f"its post-processor adds {len(before)} before it, and bos_token of "
                f"{ABOUT} is {found!r}"
            )
    return dataclasses.replace(tokenizer, bos=found)


def stated(path: Path, name: str) -> str:
    """The token of a name in the `tokenizer_config.json` beside a file, or ""."""
    path = path.with_name(ABOUT)
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(name)
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
