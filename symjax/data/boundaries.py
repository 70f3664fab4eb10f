"""The tokens that packing writes before, between and after documents.

`boundaries` chooses them by the tokenizer, and `store.writer` writes them.
`delimiters.py` tells which of them a trained model has seen.
"""

from __future__ import annotations

from typing import NamedTuple

from symjax.data.tokens import Tokenizer

SEPARATOR = "\0"  # before and between documents, if the tokenizer has no such tokens
FORMAT = 2  # format of new packed texts; 1 has no token before the first document

Piece = str | int | None  # a text, a token, or nothing


class Boundaries(NamedTuple):
    """The pieces around the documents of a text.

    Attributes:
        first: written before the first document.
        between: written between two documents, not after the last one. It counts as
            the last token of the earlier document.
        before: written before each document but the first, as its first token.
        after: written after each document, as its last token.
        start: the token before every document, from which a model predicts the first
            token of the document; None if there is no such token.
        shared: whether `start` is also the last token of the previous document.
    """

    first: Piece = None
    between: Piece = None
    before: Piece = None
    after: Piece = None
    start: int | None = None
    shared: bool = False

    @property
    def overlap(self) -> int:
        """Number of tokens that two neighbouring sources of a mixture share.

        In the text "end A end B end" of two sources A and B, source A is "end A end"
        and source B is "end B end": they share one token. With other boundaries they
        share none.
        """
        return int(self.shared and self.after is not None)


def boundaries(
    tokenizer: Tokenizer, *, several: bool, format: int = FORMAT
) -> Boundaries:
    """Choose the boundaries of the documents of a text.

    =================  ==========================================================
    tokenizer has      three documents are packed as
    =================  ==========================================================
    end                end A end B end C end
    neither            NUL A NUL B NUL C
    begin              begin A begin B begin C
    begin and end      begin A end begin B end begin C end
    =================  ==========================================================

    In the first three rows one token is shared by two documents: it ends the earlier
    document and begins the later one. A text of one document has nothing before it,
    unless the tokenizer has `begin`. If the tokenizer has neither token and cannot
    encode NUL, there are no boundaries.

    Args:
        several: whether the text has several documents.
        format: format of the packed text; 1 has no token before the first document.
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
