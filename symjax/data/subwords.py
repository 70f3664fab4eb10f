"""Subword tokenizers: any `tokenizer.json` of Hugging Face, and byte-level BPE.

The package `tokenizers` does the work and is imported in this file only.
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

from symjax.data.post_processing import added_tokens, with_beginning
from symjax.optional import needed

REPLACEMENT = "\ufffd"  # for ids outside the vocabulary
END = "<|endoftext|>"  # ends a document in the vocabularies that are trained here
ENDS = (END, "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
PIECE_SIZE = 1 << 20  # default number of characters per piece in `pieces`
ENCODED_AT_ONCE = 1 << 16  # characters; the library takes 450 bytes for each
CONTEXT_WORD = "a"  # encoded before each piece of a text except the first
LEARNED_FROM = 1 << 28  # characters after which a vocabulary learns from no more text
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a token of byte fallback
FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


class Continuation(str):
    """A piece of a text that follows another piece of the same document."""


@dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer whose tokens are words or pieces of words.

    Text that spells a special token, such as "<|endoftext|>", is encoded as ordinary
    text. `encode` adds no token before or after a text.

    Attributes:
        definition: the content of `tokenizer.json`.
        end: the special token that ends a document; "" if there is none.
        bos: the token that begins every document and prompt; "" if there is none.
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
        """Return the id of a token, or None if the vocabulary does not have it."""
        return self._library.token_to_id(name)

    @functools.cached_property
    def document_begin(self) -> int | None:
        """The id of `bos`, or None."""
        return self.token_of(self.bos) if self.bos else None

    @functools.cached_property
    def document_end(self) -> int | None:
        """The id of `end`, or None."""
        return self.token_of(self.end) if self.end else None

    @functools.cached_property
    def added_before(self) -> list[str]:
        """The tokens that the post-processor of the file adds before a text."""
        return added_tokens(self._library)[0]

    def encode(self, text: str) -> np.ndarray:
        """Token ids [T], of the smallest unsigned type that holds the vocabulary.

        A text longer than `ENCODED_AT_ONCE` characters is cut at white space after a
        word. Each part but the first is encoded with `CONTEXT_WORD` before it, and the
        tokens of this word are removed. The result equals that of the whole text if no
        token crosses a cut.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        utf8(text, "strict")
        none = np.empty(0, np.min_scalar_type(self.vocabulary - 1))
        return np.concatenate([none, *self.encode_all(list(self.pieces([text])))])

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [T] of each piece of text, encoded on all cores.

        A `Continuation` is encoded with `CONTEXT_WORD` before it, and the tokens of
        this word are removed. Without the word, a tokenizer could add a prefix to the
        piece, or remove white space at its beginning.
        """
        dtype, word = np.min_scalar_type(self.vocabulary - 1), self._context_ids
        whole = [
            CONTEXT_WORD + x if word and isinstance(x, Continuation) else x
            for x in texts
        ]
        encoded = self._library.encode_batch_fast(whole, add_special_tokens=False)
        ids = [np.asarray(x.ids, dtype) for x in encoded]
        for place, text in enumerate(texts):
            if text is not whole[place]:
                before, after = np.split(ids[place], [len(word)])
                if before.tolist() != word:  # a token crosses the cut
                    after = self.encode_all([str(text)])[0]
                ids[place] = after
        return ids

    @functools.cached_property
    def _context_ids(self) -> list[int]:
        """The token ids of `CONTEXT_WORD`."""
        return self._library.encode(CONTEXT_WORD, add_special_tokens=False).ids

    def decode(self, ids: Any) -> str:
        """The text of token ids [T].

        Special tokens become their names, and ids outside the vocabulary U+FFFD.
        """
        ids = np.asarray(ids).reshape(-1).astype(np.int64)
        unknown = np.flatnonzero((ids < 0) | (ids >= self.vocabulary))
        decode = functools.partial(self._library.decode, skip_special_tokens=False)
        known = np.split(ids, unknown)  # each part but the first begins with an unknown
        parts = [known[0], *(part[1:] for part in known[1:])]
        return REPLACEMENT.join(decode(part.tolist()) for part in parts)

    def size_of(self, token: int, text: str = "") -> int:
        """Number of UTF-8 bytes of a token at the beginning of a text.

        A space that the tokenizer adds before a text is not counted.

        Args:
            text: the text; "" stands for any text that does not begin with a space.
        """
        spelled, shown = self._library.id_to_token(token), self._after_word([token])
        space = shown.startswith(" ") and self._adds_space(text[:1] == " ")
        if isinstance(self._library.decoder, _tokenizers().decoders.ByteLevel):
            return len(spelled) - space  # each letter of its alphabet is one byte
        if BYTE_TOKEN.fullmatch(spelled):
            return 1
        return len(shown.encode()) - space

    def _adds_space(self, spaced: bool) -> bool:
        """Return whether a space is added before a text.

        Args:
            spaced: the text begins with a space.
        """
        own = " " * spaced
        return self._after_word(self.encode(own + CONTEXT_WORD)).startswith(own + " ")

    def _after_word(self, ids: Any) -> str:
        """The text of token ids that follow `CONTEXT_WORD`.

        Without the word, a decoder may drop a space at the beginning of the text.
        """
        return self.decode([*self._context_ids, *ids])[
            len(self.decode(self._context_ids)) :
        ]

    @staticmethod
    def pieces(document: Iterable[str]) -> Iterator[str]:
        """Cut a document at white space into a first piece and `Continuation`s."""
        for number, piece in enumerate(pieces(document, ENCODED_AT_ONCE)):
            yield Continuation(piece) if number else piece

    def describe(self) -> dict[str, str]:
        """Return the dict of texts that `from_description` reads."""
        facts = {"kind": self.kind, "definition": self.definition, "end": self.end}
        return {**facts, "bos": self.bos} if self.bos else facts

    def files(self, length: int, *, trained: bool = True) -> dict[str, str]:
        """The files that `from_file` and AutoTokenizer of transformers read, by name.

        AutoTokenizer encodes a text as `bos` and the ids of `encode`.

        Args:
            length: the number of tokens that the model was trained to read.
            trained: whether the model was trained on the ids of `encode`. AutoTokenizer
                then also encodes the spelling of a special token as ordinary text.
        """
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            **({"eos_token": self.end} if self.end else {}),
            **({"bos_token": self.bos} if self.bos else {}),
            **({"split_special_tokens": True} if trained else {}),
        }
        definition = with_beginning(self.definition, self._library, self.bos)
        return {FILE: definition, CONFIG_FILE: json.dumps(about, indent=1) + "\n"}


def utf8(text: str, errors: str) -> bytes:
    """Encode a text as UTF-8.

    Args:
        errors: as in `str.encode`.
    Raises:
        ValueError: the text holds half of a surrogate pair.
    """
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {text[error.start]!r} at position {error.start} is half of a "
            "surrogate pair and has no UTF-8 bytes"
        ) from None


def pieces(parts: Iterable[str], size: int = PIECE_SIZE) -> Iterator[str]:
    """Cut a text into pieces of about `size` characters that begin at white space."""
    rest, searched = "", 1  # no place before `searched` in the rest is a word's end
    for part in parts:
        for start in range(0, len(part), size):
            rest += part[start : start + size]
            if len(rest) < size:
                continue
            if cut := _last_word_end(rest, searched):
                yield rest[:cut]
                rest, searched = rest[cut:], 1
            else:
                searched = len(rest)
    if rest:
        yield rest


def _last_word_end(text: str, first: int) -> int:
    """Return the best place to cut a text, from `first` on; 0 if there is none.

    The best place is the last space after a letter or digit, since tokens of some
    vocabularies cross other ends of words, such as "};\\n". The second best is the last
    newline after a letter or digit. The third is the last space or newline after any
    other character that is not white space.
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


def files_hash(path: Path) -> str:
    """Return a hash of the files that `from_file` reads."""
    path = path / FILE if path.is_dir() else path
    files = [x for x in (path, path.with_name(CONFIG_FILE)) if x.is_file()]
    return hashlib.sha256(b"\0".join(x.read_bytes() for x in files)).hexdigest()


def from_file(path: Path, bos: str = "auto") -> SubwordTokenizer:
    """Make the tokenizer of a `tokenizer.json`.

    The token that ends a document is `eos_token` of the `tokenizer_config.json` in the
    same folder. If the vocabulary has no such token, it is the first of `ENDS` that the
    vocabulary has.

    Args:
        path: the file, or its folder.
        bos: as in `with_bos`.
    Raises:
        ValueError: the file cannot be read or is no tokenizer, no file tells the BOS
            token that `bos` asks for, or the package `tokenizers` is not installed.
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
    except Exception as error:  # the library raises no narrower class
        raise ValueError(
            f"data.tokenizer {str(path)!r} is no tokenizer.json of Hugging Face: "
            f"{' '.join(str(error).split())}"
        ) from None
    if not known:
        raise ValueError(f"data.tokenizer {str(path)!r} has an empty vocabulary")
    ends = (configured_token(path, "eos_token"), *ENDS)
    made = SubwordTokenizer(definition, next((x for x in ends if x in known), ""))
    return with_bos(made, bos, path)


def with_bos(tokenizer: SubwordTokenizer, bos: str, path: Path) -> SubwordTokenizer:
    """Return a tokenizer with the token that begins every document and prompt, if any.

    Args:
        bos: "auto": the token that its post-processor adds before a text, if it adds
            exactly one. "true": that token, or else `bos_token` of the
            `tokenizer_config.json` in the same folder. "false": no token.
        path: the file of the tokenizer.
    Raises:
        ValueError: bos is "true", and no file tells the token.
    """
    before = tokenizer.added_before
    found = before[0] if len(before) == 1 and bos != "false" else ""
    if bos == "true" and not found:
        found = configured_token(path, "bos_token")
        if tokenizer.token_of(found) is None:
            raise ValueError(
                f"data.bos true: {str(path)!r} does not say which token begins a text: "
                f"its post-processor adds {len(before)} before it, and bos_token of "
                f"{CONFIG_FILE} is {found!r}"
            )
    return dataclasses.replace(tokenizer, bos=found)


def configured_token(path: Path, name: str) -> str:
    """Return the token that `tokenizer_config.json` in a file's folder names, or "".

    Args:
        name: the key, such as "eos_token".
    """
    path = path.with_name(CONFIG_FILE)
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return ""
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""


def train_bpe(texts: Iterable[str], vocabulary: int) -> SubwordTokenizer:
    """Learn a byte-level BPE of at most `vocabulary` tokens from texts.

    All 256 bytes are tokens, so every text can be encoded. Words are split as in GPT-2.
    The same texts give the same tokens. A bar shows progress if stderr is a terminal.

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
    cut = (
        piece
        for text in _first_characters(texts, LEARNED_FROM)
        for piece in pieces([text], ENCODED_AT_ONCE)
    )
    made.train_from_iterator(cut, trainer)
    return SubwordTokenizer(made.to_str(), END)


def _first_characters(texts: Iterable[str], count: int) -> Iterator[str]:
    """Yield texts until they have `count` characters together."""
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
