"""The tokens that stand before, between and after the documents of a packed text."""

from __future__ import annotations

from typing import NamedTuple

from symjax.data.tokens import Tokenizer

SEPARATOR = "\0"  # between documents, for a tokenizer without a token that ends them
FORMAT = 2  # of a packed text; in format 1 nothing stood before the first document

Piece = str | int | None  # a text, a token, or nothing


class Boundaries(NamedTuple):
    """
    Attributes:
        first: before the first document.
        between: before each later one; it is also the last of the document before.
        before: before each later one, after `between`; of that document alone.
        after: after each document, as its last token.
        start: the token before a document that its first token is predicted from;
            None: nothing is.
        shared: that token is also the last one of the document before.
    """

    first: Piece = None
    between: Piece = None
    before: Piece = None
    after: Piece = None
    start: int | None = None
    shared: bool = False

    @property
    def overlap(self) -> int:
        """Tokens before a part of a text that its first document begins with."""
        return int(self.shared and self.after is not None)


def boundaries(
    tokenizer: Tokenizer, *, several: bool, format: int = FORMAT
) -> Boundaries:
    """The boundaries of documents in a text.

    A tokenizer with a token that ends documents has it after each, and another one has
    a NUL between two. Where there are several documents, that token or a NUL stands
    before the first one, too. With a token that begins documents, each begins with it;
    it also ends the one before where no other token does.

    Args:
        several: whether the text has several documents.
        format: of the packed text.
    """
    end = tokenizer.document_end
    if format == 1:
        between = SEPARATOR if end is None else None
        return Boundaries(between=between, after=end)
    begin = tokenizer.document_begin
    if begin is not None and end is None:
        return Boundaries(begin, begin, start=begin, shared=True)
    if begin not in (None, end):
        return Boundaries(begin, before=begin, after=end, start=begin)
    if not several and begin is None:
        return Boundaries(after=end)
    if end is not None:
        return Boundaries(first=end, after=end, start=end, shared=True)
    found = tokenizer.encode(SEPARATOR)
    if not len(found):  # a tokenizer that drops control characters
        return Boundaries()
    start = int(found[-1])
    return Boundaries(SEPARATOR, SEPARATOR, start=start, shared=True)
