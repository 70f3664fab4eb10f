"""Text to token ids and back: bytes, characters of a known alphabet, or subwords."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from symjax.data import subwords
from symjax.data.subwords import REPLACEMENT, SubwordTokenizer, utf8

KINDS = ("byte", "char", "bpe")  # any other value of data.tokenizer is a path
ENCODED_AT_ONCE = 1 << 22  # characters; about 80 MB of memory


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokenizer with one token per byte of UTF-8; it needs no alphabet."""

    kind: ClassVar[str] = "byte"
    unit: ClassVar[str] = "byte"
    vocabulary: ClassVar[int] = 256
    document_begin: ClassVar[None] = None
    document_end: ClassVar[None] = None

    def encode(self, text: str) -> np.ndarray:
        """Token ids uint8 [T].

        Surrogate escapes, by which Python keeps undecodable bytes of a terminal, become
        these bytes again.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        return np.frombuffer(utf8(text, "surrogateescape"), np.uint8)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [T] of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        """The text of token ids [T].

        Bytes that are not UTF-8, and ids that are no bytes, become U+FFFD.
        """
        ids = np.asarray(ids).reshape(-1)
        ids = np.where((ids >= 0) & (ids < 256), ids, 255)  # 0xff is never UTF-8
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def size_of(self, token: int, text: str = "") -> int:
        """Number of UTF-8 bytes of a token."""
        return 1

    def describe(self) -> dict[str, str]:
        """Return the dict of texts that `from_description` reads."""
        return {"kind": self.kind}

    pieces = staticmethod(iter)


@dataclass(frozen=True)
class CharTokenizer:
    """Tokenizer with one token per character (Unicode code point) of an alphabet.

    Attributes:
        alphabet: all characters that it can encode, sorted.
    """

    alphabet: str
    kind: ClassVar[str] = "char"
    unit: ClassVar[str] = "character"
    document_begin: ClassVar[None] = None
    document_end: ClassVar[None] = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocabulary:,} characters)"

    @property
    def vocabulary(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> np.ndarray:
        """Token ids [T], of the smallest unsigned type that holds the alphabet.

        Raises:
            ValueError: a character is not in the alphabet.
        """
        known = _code_points(self.alphabet)
        dtype = np.min_scalar_type(len(known) - 1)
        ids = np.empty(len(text), dtype)
        for start in range(0, len(text), ENCODED_AT_ONCE):
            points = _code_points(text[start : start + ENCODED_AT_ONCE])
            found = np.searchsorted(known, points)
            missing = np.flatnonzero(known[found.clip(max=len(known) - 1)] != points)
            if missing.size:
                position = start + int(missing[0])
                raise ValueError(
                    f"character {text[position]!r} (U+{ord(text[position]):04X}) at "
                    f"position {position} is not among the {len(known)} characters of "
                    "the corpus"
                )
            ids[start : start + ENCODED_AT_ONCE] = found
        return ids

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [T] of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        """The text of token ids [T]; ids outside the alphabet become U+FFFD."""
        ids = np.asarray(ids).reshape(-1).astype(np.int64)
        known = _code_points(self.alphabet + REPLACEMENT)
        inside = (ids >= 0) & (ids < self.vocabulary)
        points = known[np.where(inside, ids, self.vocabulary)]
        return points.astype("<u4").tobytes().decode("utf-32-le")

    def size_of(self, token: int, text: str = "") -> int:
        """Number of UTF-8 bytes of a token."""
        return len(self.alphabet[token].encode("utf-8", "surrogatepass"))

    def describe(self) -> dict[str, str]:
        """Return the dict of texts that `from_description` reads."""
        return {"kind": self.kind, "alphabet": self.alphabet}

    pieces = staticmethod(iter)


Tokenizer = ByteTokenizer | CharTokenizer | SubwordTokenizer


def build(
    kind: str, texts: Iterable[str], *, vocabulary: int = 32000, bos: str = "auto"
) -> Tokenizer:
    """Make the tokenizer that `data.tokenizer` names.

    Args:
        kind: byte, char, bpe, or the path of a `tokenizer.json`.
        texts: char takes its alphabet from them, and bpe learns from them.
        vocabulary: the most tokens that bpe learns.
        bos: as in `subwords.with_bos`; used only for the path of a file.
    Raises:
        ValueError: the kind is unknown, the file is no tokenizer or does not tell the
            BOS token, or the package `tokenizers` is needed and not installed.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        alphabet: set[str] = set()
        for text in texts:
            alphabet.update(text)
        return CharTokenizer("".join(sorted(alphabet)))
    if kind == "bpe":
        return subwords.train_bpe(texts, vocabulary)
    path = Path(kind).expanduser()
    if not path.exists():
        raise ValueError(
            f"data.tokenizer {kind!r} is unknown: choose from byte, char, bpe, or give "
            "the path of a tokenizer.json"
        )
    return subwords.from_file(path, bos)


def file_hash(kind: str) -> str:
    """Return a hash of the files that `build` reads for a kind; "" for no files."""
    path = Path(kind).expanduser()
    return subwords.files_hash(path) if kind not in KINDS and path.exists() else ""


def from_description(description: Mapping[str, Any]) -> Tokenizer:
    """Make a tokenizer from the result of its `describe`; other keys are ignored.

    Raises:
        ValueError: the kind is unknown.
    """
    if description["kind"] == SubwordTokenizer.kind:
        bos = description.get("bos", "")
        return SubwordTokenizer(description["definition"], description["end"], bos)
    alphabet = [description["alphabet"]] if description["kind"] == "char" else []
    return build(description["kind"], alphabet)


def _code_points(text: str) -> np.ndarray:
    """Return the Unicode code points uint32 [T] of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
