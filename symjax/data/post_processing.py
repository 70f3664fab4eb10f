"""Tokens that the post-processor of a `tokenizer.json` adds to every text."""

from __future__ import annotations

import json
from typing import Any

ADDS_NOTHING = ("ByteLevel",)  # post-processors that add no token


def added_tokens(library: Any) -> tuple[list[str], list[str]]:
    """Return the tokens that a `tokenizers.Tokenizer` adds before and after a text."""
    texts = ("a", *library.get_vocab())
    plain = ((x, library.encode(x, add_special_tokens=False).ids) for x in texts)
    text, ids = next((pair for pair in plain if pair[1]), ("", []))
    whole = library.encode(text)
    spans = (n for n in range(len(whole.ids)) if whole.ids[n : n + len(ids)] == ids)
    start = next(spans, 0)
    return whole.tokens[:start], whole.tokens[start + len(ids) :]


def with_beginning(definition: str, library: Any, bos: str) -> str:
    """Return a `tokenizer.json` that adds exactly `bos` to a text, at its beginning.

    It neither truncates nor pads texts.

    Args:
        definition: the `tokenizer.json` as it was read.
        library: the tokenizer of this definition.
        bos: the token; "" to add no token.
    """
    found = json.loads(definition)
    if added_tokens(library) != ([bos] if bos else [], []):
        known, token = found.get("post_processor"), library.token_to_id(bos)
        found["post_processor"] = _post_processor(known, bos, token)
    elif not found.get("truncation") and not found.get("padding"):
        return definition
    found["truncation"] = found["padding"] = None
    return json.dumps(found, ensure_ascii=False, indent=1)


def _post_processor(known: dict[str, Any] | None, bos: str, token: Any) -> Any:
    """Return the parts of `known` that add no token, with a part that adds `bos`."""
    parts = (known or {}).get("processors", [known] if known else [])
    kept = [part for part in parts if part["type"] in ADDS_NOTHING]
    if token is not None:
        kept.append(_template(bos, token))
    if len(kept) > 1:
        return {"type": "Sequence", "processors": kept}
    return kept[0] if kept else None


def _template(bos: str, token: int) -> dict[str, Any]:
    """A post-processor that puts a token before each of one or two texts."""
    single, second = (
        [
            {"SpecialToken": {"id": bos, "type_id": n}},
            {"Sequence": {"id": x, "type_id": n}},
        ]
        for n, x in enumerate("AB")
    )
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {bos: {"id": bos, "ids": [token], "tokens": [bos]}},
    }
