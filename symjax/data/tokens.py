"""Text to token ids and back: bytes, characters of a known alphabet, or subwords."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from symjax.data import subwords
from symjax.data.subwords import REPLACEMENT, SubwordTokenizer, utf8

KINDS = ("byte", "char", "bpe")  # all others are paths of files
CHUNK = 1 << 22  # characters looked up at a time: about 80 MB


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte of UTF-8; knows every text."""

    kind: ClassVar[str] = "byte"
    unit: ClassVar[str] = "byte"
    vocabulary: ClassVar[int] = 256
    document_begin: ClassVar[None] = None
    document_end: ClassVar[None] = None

    def encode(self, text: str) -> np.ndarray:
        """Token ids uint8 [T].

        Bytes that a terminal passed on undecoded (surrogate escapes) are kept.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        return np.frombuffer(utf8(text, "surrogateescape"), np.uint8)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [T] of each of some texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        """The text of token ids [T]; what is not UTF-8, or no byte, becomes U+FFFD."""
        ids = np.asarray(ids).reshape(-1)
        ids = np.where((ids >= 0) & (ids < 256), ids, 255)  # 0xff is never UTF-8
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def size_of(self, token: int, text: str = "") -> int:
        """The bytes of UTF-8 that a token stands for."""
        return 1

    def describe(self) -> dict[str, str]:
        """Return what `from_description` needs, as JSON."""
        return {"kind": self.kind}

    pieces = staticmethod(iter)


@dataclass(frozen=True)
class CharTokenizer:
    """One token a character (Unicode code point) of a fixed, sorted alphabet."""

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
        known = _points(self.alphabet)
        dtype = np.min_scalar_type(len(known) - 1)
        ids = np.empty(len(text), dtype)
        for start in range(0, len(text), CHUNK):
            points = _points(text[start : start + CHUNK])
            found = np.searchsorted(known, points)
            missing = np.flatnonzero(known[found.clip(max=len(known) - 1)] != points)
            if missing.size:
                position = start + int(missing[0])
                raise ValueError(
                    f"character {text[position]!r} (U+{ord(text[position]):04X}) at "
                    f"position {position} is not among the {len(known)} characters of "
                    "the corpus"
                )
            ids[start : start + CHUNK] = found
        return ids

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [T] of each of some texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        """The text of token ids [T]; ids outside the alphabet become U+FFFD."""
        ids = np.asarray(ids).reshape(-1).astype(np.int64)
        known = _points(self.alphabet + REPLACEMENT)
        inside = (ids >= 0) & (ids < self.vocabulary)
        points = known[np.where(inside, ids, self.vocabulary)]
        return points.astype("<u4").tobytes().decode("utf-32-le")

    def size_of(self, token: int, text: str = "") -> int:
        """The bytes of UTF-8 that a token stands for."""
        return len(self.alphabet[token].encode("utf-8", "surrogatepass"))

    def describe(self) -> dict[str, str]:
        """Return what `from_description` needs, as JSON."""
        return {"kind": self.kind, "alphabet": self.alphabet}

    pieces = staticmethod(iter)


Tokenizer = ByteTokenizer | CharTokenizer | SubwordTokenizer


def build(
    kind: str, texts: Iterable[str], *, vocabulary: int = 32000, bos: str = "auto"
) -> Tokenizer:
    """The tokenizer of a corpus: data.tokenizer as it is written.

    The alphabet of char is every character of its texts; bpe learns from them.

    Args:
        kind: byte, char, bpe, or the path of a `tokenizer.json`.
        vocabulary: of bpe.
        bos: of a file, as `subwords.from_file`.
    Raises:
        ValueError: the kind is unknown, or the file is no tokenizer.
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


def state(kind: str) -> str:
    """A hash of the file that `build` would read for a kind; "" where it reads none."""
    path = Path(kind).expanduser()
    return subwords.state(path) if kind not in KINDS and path.exists() else ""


def from_description(description: Mapping[str, Any]) -> Tokenizer:
    """The inverse of `describe`; other keys are not read.

    Raises:
        ValueError: the kind is unknown.
    """
    if description["kind"] == SubwordTokenizer.kind:
        bos = description.get("bos", "")
        return SubwordTokenizer(description["definition"], description["end"], bos)
    alphabet = [description["alphabet"]] if description["kind"] == "char" else []
    return build(description["kind"], alphabet)


def _points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
