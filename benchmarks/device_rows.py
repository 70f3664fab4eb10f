"""Rows of device.py, in the order in which they are measured, and their sizes.

ROWS at the end of the file has the order: the most important rows come first.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """One measurement."""

    part: str
    subject: str  # a mechanism, model or case of the part
    tokens: int = 0  # of the sequence, or of the context before decoding
    backward: bool = True  # forward + backward, or forward alone

    @property
    def name(self) -> str:
        words = [f"{self.part}: {self.subject}"]
        if self.tokens:
            words.append(f"{self.tokens} tokens")
        if not self.backward:
            words.append("forward")
        elif self.part in ("attention", "crossover"):
            words.append("forward + backward")
        return ", ".join(words)


class Sizes(NamedTuple):
    """Sizes of all parts. The defaults are for accelerators, SMALL is for CPUs."""

    side: int = 8192  # of the matrices of a product
    copied: int = 2**31  # bytes of a copy
    correctness: int = 200  # tokens; no multiple of a block or chunk size
    divisor: int = 1  # of the tokens of each row in ROWS
    row_tokens: int = 16384  # batch size × length of an attention row
    heads: int = 16
    head_size: int = 128
    rounds: int = 7
    patience: float = 0.05  # seconds of a turn of one function
    # Width, layers and heads of the models.
    models: tuple[tuple[str, tuple[int, int, int]], ...] = (
        ("125m", (768, 12, 12)),
        ("350m", (1024, 24, 16)),
    )
    vocabulary: int = 50304
    length: int = 2048  # tokens of a row of a training step
    batch: int = 16
    study: tuple[str, ...] = ("model.length=300", "batch_size=32")
    text: str | None = None  # the options of the study
    seeds: str = "0"
    steps: int = 30_000
    together: int = 4
    out: str = "runs/study"


SMALL = Sizes(
    side=256,
    copied=2**20,
    correctness=70,
    divisor=32,
    row_tokens=256,
    heads=2,
    head_size=16,
    rounds=2,
    patience=0.01,
    models=(("125m", (64, 2, 4)), ("350m", (64, 3, 4))),
    vocabulary=64,
    length=128,
    batch=2,
    study=("model.length=32", "batch_size=8", "model.width=32", "model.heads=2"),
    steps=3,
)

# Estimated seconds of the first row of each part. Later rows are estimated from earlier
# ones. A run of the study continues where it was stopped.
SECONDS = {
    "machine": 15,
    "attention": 30,
    "correctness": 25,
    "decode": 40,
    "steps": 80,
    "crossover": 30,
    "study": 60,
}
PARTS = tuple(SECONDS)
LONGEST = 150  # seconds after which a row (except of the study) is given up
RIVAL = 30  # seconds after which a function of another library is given up

MECHANISMS = (
    "softmax",
    "performer",
    "cosine",
    "linear",
    "delta, gated channels",
    "gated decay",
    "gated delta",
    "delta",
    "retention",
    "differential V1",
    "differential V2",
    "symmetric",
)
CHECKED_FIRST = (
    "performer × 1",
    "performer hyperbolic",
    "performer favor++",
    "performer favor#",
    "performer trigonometric × 0.5",
    "retention",
    "gated decay",
    "delta rule",
    "gated delta rule",
    "delta rule, gated channels",
    "performer, bidirectional",
    "performer × 0.5",
    "performer × 2",
    "performer × 4",
    "performer × 8",
)
CHECKED_LAST = tuple(
    name.format(causal)
    for causal in ("causal", "bidirectional")
    for name in (
        "softmax, {}",
        "softmax, {}, values + 4",
        "softmax, {}, rows",
        "softmax, {}, whole",
        "differential V1 over softmax, {}",
        "differential V1 over softmax, {}, documents",
        "differential V1 over softmax, {}, window",
        "differential V2, {}",
        "symmetric, {}",
        "pairwise symmetric, {}",
        "cosine, {}",
        "gau, {}",
        "flash, {}",
        "sparsemax, {}",
        "differential V1 over sparsemax, {}",
        "entmax15, {}",
        "differential V1 over entmax15, {}",
    )
) + (
    "linear elu",
    "linear relu",
    "linear relu2",
    "linear squared",
    "linear taylor",
    "linear elu, bidirectional",
    "hedgehog",
    "performer relu",
    "differential V1 over linear",
    "matrix function exp",
    "matrix function expm1",
    "matrix function resolvent",
    "matrix function resolventm1",
)
MODELS = ("gpt", "diff_sym", "performer", "gla", "delta")
DECODED = ("gpt", "diff", "performer", "delta")

Rows = Iterable[Row]


def attention(lengths: Iterable[int]) -> Rows:
    for length in lengths:
        for backward in (True, False):
            yield from (Row("attention", x, length, backward) for x in MECHANISMS)


ROWS = (
    Row("machine", "product of bfloat16 matrices"),
    Row("machine", "copy"),
    *attention([4096]),
    *(Row("correctness", x) for x in CHECKED_FIRST),
    *(Row("decode", x, context) for context in (8192, 512) for x in DECODED),
    *(Row("decode", x, context) for context in (32768, 2048) for x in DECODED),
    *(Row("steps", f"{model} 125m") for model in MODELS),
    *(Row("steps", f"{model} 350m") for model in MODELS),
    *(
        Row("crossover", x, length)
        for length in (8192, 16384, 32768)
        for x in ("performer", "delta")
    ),
    *(
        Row("attention", x, 4096)
        for x in ("softmax, documents", "differential V1, documents")
    ),
    *(Row("steps", f"{x} 350m") for x in ("diff", "retention")),
    *(Row("steps", f"{x} 350m, documents apart") for x in ("gpt", "diff_sym")),
    *(Row("correctness", x) for x in CHECKED_LAST),
    *(Row("study", f"{x}{y}") for x in ("3l", "6l", "8l") for y in ("", " at 3e-4")),
)
