"""Keys of the training data."""

from __future__ import annotations

from dataclasses import dataclass

from symjax.config.keys import Keys, key


@dataclass(frozen=True, repr=False)
class Data(Keys):
    """Keys of the training data."""

    source: str = key(
        "stdlib",
        "source of examples. stdlib: Python's own standard library; text: files; hub: "
        "a Hugging Face data set; packages: files of the standard library, labelled by "
        "package; digits: images of scikit-learn; the others are generated tasks",
        (
            *("stdlib", "text", "hub", "packages", "digits"),
            *("mqar", "needle", "copy", "reverse", "sort", "swap", "sets", "listops"),
        ),
    )
    path: str = key("", "source=text: a file, a folder, a glob, or several")
    name: str = key(
        "", "source=hub: owner/name, or a local folder of parquet, json or text files"
    )
    mixture: str = key(
        "",
        "source=text or hub: several sources with their shares of the training rows "
        "(PATH:0.7,PATH:0.3 or NAME:0.7,NAME:0.3)",
    )
    subset: str = key("", "source=hub: name of the subset, if the data set has several")
    column: str = key("text", "source=hub: the column that holds the text, or images")
    label: str = key(
        "", "source=hub: the column that holds the labels, if there is one"
    )
    tokenizer: str = key(
        "byte",
        "tokenizer: byte, char, bpe (subwords learned from the training text), or the "
        "path of a Hugging Face tokenizer.json",
    )
    vocabulary: int = key(
        32000, "tokenizer=bpe: largest number of tokens", least=257, most=2**20
    )
    documents: str = key(
        "auto",
        "documents in a row of a decoder. joined: a token also sees the documents "
        "before its own; separate: it does not; auto: separate if the text has several "
        "documents",
        ("auto", "separate", "joined"),
    )
    bos: str = key(
        "auto",
        "whether documents and prompts begin with the BOS token of the tokenizer.json; "
        "auto: as the file says",
        ("auto", "true", "false"),
    )
    streaming: bool = key(
        False, "source=hub: train while the data set is being read and packed"
    )
    tokens: int = key(
        0, "data.streaming: largest number of training tokens", least=0, most=2**50
    )
    cache: str = key(
        "",
        "folder of packed corpora, which runs share; empty: symjax/data in the user's "
        "cache",
    )
    items: int = key(
        8,
        "generated tasks: number of pairs (mqar), needles (needle) or symbols (copy, "
        "reverse, sort, swap)",
        least=1,
    )
    symbols: int = key(
        64,
        "generated tasks except listops: number of different symbols",
        least=2,
        most=2**16,
    )
    asked: int = key(2, "needle: number of needles that are asked for", least=1)
