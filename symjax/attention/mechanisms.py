"""The table of mechanisms: their functions, options, and capabilities.

`MECHANISMS` has one `Mechanism` for each value of model.attention.mechanism. A test
checks that each mechanism accepts the arguments that its entry declares, and that the
error for any other argument has the name of this argument.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from symjax.attention.causal_matrix_function import (
    matrix_function_causal,
    matrix_function_state,
    matrix_function_step,
)
from symjax.attention.core.options import Option
from symjax.attention.cosine import cosine, cosine_causal, cosine_state, cosine_step
from symjax.attention.delta_rule import delta_causal, delta_state, delta_step
from symjax.attention.features import PLAIN
from symjax.attention.flash import flash, flash_causal, flash_state, flash_step
from symjax.attention.gated_linear import (
    LOG_DECAYS,
    decay_causal,
    decay_state,
    decay_step,
)
from symjax.attention.gau import gau
from symjax.attention.linear import linear, linear_causal, linear_state, linear_step
from symjax.attention.matrix_function import FUNCTIONS, NORMALISE, matrix_function
from symjax.attention.mesa_layer import mesa_causal, mesa_state, mesa_step
from symjax.attention.performer import (
    performer,
    performer_causal,
    performer_state,
    performer_step,
)
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.attention.softmax import softmax
from symjax.attention.softpick import softpick
from symjax.attention.sparse import entmax15, sparsemax
from symjax.tables import aligned


class Mechanism(NamedTuple):
    """Functions of one mechanism, and the arguments that they take.

    A score mechanism has one function, with the option `is_causal`, and decodes with
    cached keys and values. A recurrence also has a causal form, a step and an empty
    state. Each function takes only the options that it needs: only the causal form
    takes `chunk_size`.

    Attributes:
        attend: attention to all keys. A mechanism that is always causal has its causal
            form here too.
        causal: attention of each token to itself and its past, or None.
        step: the causal form for one more token, or None.
        state: the empty state of the recurrence, or None.
        options: keywords that layers set, most of them from the key of model.attention
            with the same name.
        own: further keywords, with their `Option`. A run sets them by
            model.attention.options.NAME. All functions of the mechanism take all of
            them. Score mechanisms declare such keywords in `ScoreMechanism.own`.
        choices: option → the values that it may have. For features, `symjax.layers`
            adds learned feature maps.
        operands: names of arrays besides query, key and value.
        required: operands that have no default.
        is_causal: whether `attend` takes the argument `is_causal`. If it does not,
            `causal` is the only causal form.
        bidirectional: whether a token may attend to later tokens.
        mask: "pairs" if a mask has an entry per query and key, "keys" if per key.
        grouped: whether several query heads may share a key head.
        lengths: whether `attend` takes different numbers of keys and queries.
        segments: whether `causal` takes `segment_ids`, or `attend` if `causal` is None.
        keys: whether its functions take an argument `key`; otherwise the queries are
            the keys.
        gated: whether its layer is a whole gated block (GAU, FLASH), not an attention
            layer.
        kernel: whether a kernel for TPUs or GPUs computes some of its calls.
        sparse: whether a weight may be exactly zero.
        time, memory: operations per head for T tokens, and numbers per head that are
            stored to decode. The letters are those of `symjax.attention`; a group has G
            tokens, a chunk C.
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
        """Implementations of a `ScoreMechanism`; empty for other functions.

        `symjax.layers.validate` has the values for layers of other mechanisms.
        """
        return getattr(self.attend, "implementations", ())

    @property
    def declared(self) -> dict[str, Option]:
        """Options that the mechanism declares itself, by name."""
        return {**getattr(self.attend, "own", {}), **self.own}


# Common entry of score mechanisms; `_replace` sets the differences.
SCORED = Mechanism(
    softmax,
    options=(
        *("scale", "window", "length_base", "length_scale"),
        *("mask_self", "implementation"),
    ),
    operands=("bias", "log_decay", "sink"),
    is_causal=True,
    mask="pairs",
)
SPARSE = SCORED._replace(sparse=True, time="T S (H + V + log S)")

MECHANISMS = {
    "softmax": SCORED._replace(kernel=True),
    "sparsemax": SPARSE._replace(attend=sparsemax),
    "entmax15": SPARSE._replace(attend=entmax15),
    "softpick": SCORED._replace(attend=softpick, sparse=True),
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
        options=("chunk_size", "implementation"),
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
        options=("chunk_size", "implementation"),
        operands=("beta", "log_decay", "erase"),
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
        operands=("bias",),
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
        *(matrix_function, matrix_function_causal),
        *(matrix_function_step, matrix_function_state),
        options=("function", "scale", "alpha", "normalise", "chunk_size"),
        choices={"function": FUNCTIONS, "normalise": NORMALISE},
        grouped=False,
        lengths=False,
        keys=False,
        time="T (H (H + V) + C (H + V + C))",
        memory="H (H + V)",
    ),
    "mesa": Mechanism(
        *(mesa_causal, mesa_causal, mesa_step, mesa_state),
        options=("chunk_size",),
        operands=("ridge",),
        bidirectional=False,
        lengths=False,
        time="T (H (H + V) + C (H + V + C))",
        memory="H (H + V)",
    ),
}

# Kind of name → the tables of these names. A user's file may add entries to the tables.
TABLES: dict[str, tuple[dict[str, Any], ...]] = {
    "mechanism": (MECHANISMS,),
    "features": (PLAIN, RANDOM_FEATURES),
    "decay": (LOG_DECAYS,),
}
# Kind of name → the names that the library itself has.
BUILT_IN = {
    kind: frozenset(name for table in tables for name in table)
    for kind, tables in TABLES.items()
}


def capabilities(mechanism: Mechanism) -> dict[str, bool | str]:
    """Return the columns of `table` for one mechanism."""
    return {
        "causal": mechanism.is_causal or mechanism.causal is not None,
        "bidirectional": mechanism.bidirectional,
        "mask": mechanism.mask,
        "bias": "bias" in mechanism.operands,
        "gates": "log_decay" in mechanism.operands,
        "sink": "sink" in mechanism.operands,
        "window": "window" in mechanism.options,
        "grouped": mechanism.grouped,
        "lengths": mechanism.lengths,
        "segments": mechanism.segments,
        "steps": mechanism.step is not None,
        "kernel": mechanism.kernel,
    }


def table() -> str:
    """Return a table of the capabilities of all mechanisms as text, one row for each.

    The functions `symmetric` and `differential` have no rows, since they are no
    mechanisms: they take one as argument. They take every mechanism except flash and
    matrix_function, which have other arguments than (query, key, value). Layers have
    other limits (docs/training.md).
    """
    names = capabilities(SCORED)
    rows = [("mechanism", *names, "time per head", "memory to decode")]
    for name, mechanism in MECHANISMS.items():
        values = capabilities(mechanism).values()
        cells = (("-", "yes")[x] if isinstance(x, bool) else x for x in values)
        rows.append((name, *cells, mechanism.time, mechanism.memory))
    return "\n".join(aligned(rows))
