"""The table of mechanisms: their forms, and what they take. One line a mechanism."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from symjax.attention.core.options import Option
from symjax.attention.cosine import cosine, cosine_causal, cosine_state, cosine_step
from symjax.attention.delta_rule import delta_causal, delta_state, delta_step
from symjax.attention.features import PLAIN
from symjax.attention.flash import flash, flash_causal, flash_state, flash_step
from symjax.attention.gated_linear import decay_causal, decay_state, decay_step
from symjax.attention.gau import gau
from symjax.attention.linear import linear, linear_causal, linear_state, linear_step
from symjax.attention.matrix_function import matrix_function
from symjax.attention.performer import (
    performer,
    performer_causal,
    performer_state,
    performer_step,
)
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.attention.softmax import softmax
from symjax.attention.sparse import entmax15, sparsemax
from symjax.tables import aligned


class Mechanism(NamedTuple):
    """One mechanism's functions and what they take, declared.

    A score mechanism takes `is_causal` and decodes against cached keys and values. One
    with a state has a causal form, a step and an empty state; all take its options,
    save that `chunk_size` belongs to the causal form alone.

    Attributes:
        attend: over all keys.
        causal: over a token itself and its past; equal to `attend` where there is no
            other form.
        options: keywords that a model, or code around the function, may choose.
        own: more keywords, which the mechanism declares with type, default and
            meaning: keys model.attention.options.NAME of a run. All forms take them.
            A score mechanism has its own in its `own`, and none here.
        choices: option → the words that it may be. (`symjax.layers` has learned
            feature maps besides.)
        operands: arrays beside query, key and value.
        required: the operands that have no default.
        is_causal: `attend` has such an option.
        bidirectional: it can read both sides.
        mask: "pairs", one for each query and key, or "keys", one for each key.
        grouped: a key head may serve several query heads.
        lengths: there may be more or fewer keys than queries.
        segments: it takes `segment_ids`.
        keys: False where queries stand for keys too, and there is no such argument.
        gated: a whole block, not a choice of the attention layer.
        kernel: a kernel for TPUs or GPUs computes some of its calls.
        sparse: a weight may be exactly zero.
        time, memory: of a head: operations for T tokens, numbers kept to decode.
            Letters are those of the shapes, G a group and C a chunk of tokens.
    """

    attend: Callable
    causal: Callable | None = None
    step: Callable | None = None
    state: Callable | None = None
    options: tuple[str, ...] = ()
    choices: Mapping[str, Collection[str]] = MappingProxyType({})
    operands: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    is_causal: bool = False
    bidirectional: bool = True
    mask: str = "keys"
    grouped: bool = True
    lengths: bool = True
    segments: bool = True
    keys: bool = True
    gated: bool = False
    kernel: bool = False
    sparse: bool = False
    time: str = "T S (H + V)"
    memory: str = "S (H + V)"
    own: Mapping[str, Option] = MappingProxyType({})

    @property
    def implementations(self) -> tuple[str, ...]:
        """What `implementation` may name; nothing where it is no score mechanism."""
        return getattr(self.attend, "implementations", ())

    @property
    def declared(self) -> dict[str, Option]:
        """Options of the mechanism alone, by name."""
        return {**getattr(self.attend, "own", {}), **self.own}


SCORED = Mechanism(
    softmax,
    options=("scale", "window", "length_base", "mask_self", "implementation"),
    operands=("bias",),
    is_causal=True,
    mask="pairs",
    kernel=True,
)
SPARSE = SCORED._replace(kernel=False, sparse=True, time="T S (H + V + log S)")

MECHANISMS = {
    "softmax": SCORED,
    "sparsemax": SPARSE._replace(attend=sparsemax),
    "entmax15": SPARSE._replace(attend=entmax15),
    "cosine": Mechanism(
        *(cosine, cosine_causal, cosine_step, cosine_state),
        options=("chunk_size",),
        is_causal=True,
        kernel=True,
        time="T (H V + C (H + V))",
        memory="(H + 1) (V + 1)",
    ),
    "decay": Mechanism(
        *(decay_causal, decay_causal, decay_step, decay_state),
        options=("chunk_size",),
        operands=("log_decay",),
        required=("log_decay",),
        bidirectional=False,
        lengths=False,
        kernel=True,
        time="T (H V + C (H + V))",
        memory="H V",
    ),
    "delta": Mechanism(
        *(delta_causal, delta_causal, delta_step, delta_state),
        options=("chunk_size",),
        operands=("beta", "log_decay"),
        required=("beta",),
        bidirectional=False,
        lengths=False,
        kernel=True,
        time="T (H V + C (H + V + C))",
        memory="H V",
    ),
    "linear": Mechanism(
        *(linear, linear_causal, linear_step, linear_state),
        options=("features", "chunk_size"),
        choices={"features": PLAIN},
        kernel=True,
        time="T (M V + C (M + V))",
        memory="M (V + 1)",
    ),
    "performer": Mechanism(
        *(performer, performer_causal, performer_step, performer_state),
        options=("features", "scale", "chunk_size"),
        choices={"features": RANDOM_FEATURES},
        operands=("projection", "statistics"),
        kernel=True,
        time="T (M (H + V) + C (M + V))",
        memory="M (V + 2)",
    ),
    "gau": SCORED._replace(
        attend=gau,
        options=("window", "implementation"),
        kernel=False,
        gated=True,
        sparse=True,
    ),
    "flash": Mechanism(
        *(flash, flash_causal, flash_step, flash_state),
        options=("group_size",),
        operands=("linear_query", "linear_key"),
        required=("linear_query", "linear_key"),
        is_causal=True,
        lengths=False,
        gated=True,
        time="T (G (H + V) + M V)",
        memory="G (H + M + V) + M V",
    ),
    "matrix_function": Mechanism(
        matrix_function,
        options=("function", "scale", "alpha"),
        grouped=False,
        lengths=False,
        segments=False,
        keys=False,
        time="T H (H + V)",
        memory="-",
    ),
}

# Those without any causal form: they are choices of encoders only.
BIDIRECTIONAL = {
    name: mechanism
    for name, mechanism in MECHANISMS.items()
    if mechanism.causal is None and not mechanism.is_causal
}


def capabilities(mechanism: Mechanism) -> dict[str, bool | str]:
    """The claims of `table`; what a mechanism does not take, it refuses by name."""
    return {
        "causal": mechanism.is_causal or mechanism.causal is not None,
        "bidirectional": mechanism.bidirectional,
        "mask": mechanism.mask,
        "bias": "bias" in mechanism.operands,
        "window": "window" in mechanism.options,
        "grouped": mechanism.grouped,
        "lengths": mechanism.lengths,
        "segments": mechanism.segments,
        "steps": mechanism.step is not None,
        "kernel": mechanism.kernel,
    }


def table() -> str:
    """The capability matrix, a row a mechanism, as text.

    Symmetric keys and differential maps go over any of these, with the capabilities
    of the one they go over; symmetric keys are not grouped.
    """
    names = capabilities(SCORED)
    rows = [("mechanism", *names, "time a head", "memory to decode")]
    for name, mechanism in MECHANISMS.items():
        claims = capabilities(mechanism).values()
        cells = (("-", "yes")[x] if isinstance(x, bool) else x for x in claims)
        rows.append((name, *cells, mechanism.time, mechanism.memory))
    return "\n".join(aligned(rows))
