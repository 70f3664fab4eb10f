"""`PARTS`: what each mechanism adds to its attention layer."""

from typing import Any

from symjax import config
from symjax.attention import MECHANISMS, ScoreMechanism
from symjax.layers.parts.decays import DECAY
from symjax.layers.parts.delta import DELTA
from symjax.layers.parts.features import COSINE, LINEAR, PERFORMER
from symjax.layers.parts.functions import MATRIX_FUNCTION, MESA
from symjax.layers.parts.part import Part, named_options
from symjax.layers.parts.scores import SCORES


def _options_of_gau(options: config.Model, mechanism: str) -> dict[str, Any]:
    """Return the divisor of weights, and the options that are configuration keys.

    A decoder divides by a constant, since its output may not depend on how long the
    text becomes. An encoder divides by the number of tokens.
    """
    divisor = options.length if config.is_causal(options) else "count"
    return {"divisor": divisor} | named_options(options, mechanism)


def _gau_converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Rescale the output projection of a decoder block to another model.length."""
    if not config.is_causal(target):
        return weights
    kernel = weights["out"]["kernel"] / (source.length / target.length)
    return weights | {"out": weights["out"] | {"kernel": kernel}}


def _flops_of_flash(mixer: Any, chosen: config.Attention, length: int) -> float:
    """Return the operations per token of pairs in a group and of the state [H V]."""
    size, hidden = mixer.sizes.head_size, mixer.sizes.value_size
    pairs = dict(mixer.options)["group_size"] * (size + hidden)
    return pairs * (1 if mixer.causal else 2) + 4 * size * hidden


PARTS = {
    "softmax": SCORES._replace(exponential=True),
    "cosine": COSINE,
    "decay": DECAY,
    "delta": DELTA,
    "linear": LINEAR,
    "performer": PERFORMER,
    "gau": Part(options=_options_of_gau, convert=_gau_converted),
    "flash": Part(
        options=lambda options, _: {"group_size": options.attention.chunk_size},
        keys=lambda chosen: ("chunk_size",),
        flops=_flops_of_flash,
    ),
    "matrix_function": MATRIX_FUNCTION,
    "mesa": MESA,
}


def part_of(mechanism: str) -> Part:
    """Return the part of a mechanism.

    A mechanism that is not in the table has the part `SCORES` if it computes scores,
    and otherwise an empty part.
    """
    if mechanism in PARTS:
        return PARTS[mechanism]
    is_score = isinstance(MECHANISMS[mechanism].attend, ScoreMechanism)
    return SCORES if is_score else Part()
