"""RoPE in a config.json of Hugging Face.

Version 4 of transformers writes {"rope_theta": …, "rope_scaling": {"rope_type": …}},
with "type" for "rope_type" in older versions. Version 5 writes
{"rope_parameters": {"rope_theta": …, "rope_type": …}}.
"""

import math
from functools import partial
from typing import Any

from symjax import config
from symjax.attention.rope_scaling import OF_A_LENGTH, SCALED
from symjax.models.huggingface.files import (
    check_all,
    check_choice,
    check_settings,
    number,
    whole,
)

ORIGINAL = "original_max_position_embeddings"
# Kind of scaling → settings of config.json → keys of model.rope_scaling.
NUMBERS = {
    "llama3": {
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}
KINDS = ("default", *SCALED)
ONLY = {"partial_rotary_factor": 1.0}


def rope_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return rope_base and rope_scaling of symjax's configuration for a config.json.

    Raises:
        ValueError: a kind or a value that symjax's decoder does not support.
    """
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(
        isinstance(x, dict) for x in scaling.values()
    ):
        raise ValueError(
            f"rope_scaling must be one object for all layers, got {scaling}"
        )
    scaling = {name: x for name, x in scaling.items() if x is not None}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    check_all(
        partial(check_settings, settings, ONLY),
        partial(check_settings, scaling, ONLY),
        partial(check_choice, "rope_type", kind, KINDS),
    )
    theta = {"rope_theta": settings.get("rope_theta") or 10000.0}
    keys: dict[str, Any] = {"rope_base": number(theta | scaling, "rope_theta")}
    if kind == "default":
        return keys
    chosen: dict[str, Any] = {"kind": kind}
    if kind in OF_A_LENGTH:
        length = whole(settings, "max_position_embeddings", 2048)
        groups = () if kind == "dynamic" else (settings, scaling)
        lengths = [x[ORIGINAL] for x in groups if x.get(ORIGINAL)]  # the first counts
        chosen["original_length"] = whole({ORIGINAL: [*lengths, length][0]}, ORIGINAL)
    if kind == "yarn":
        scaling = {"factor": length / chosen["original_length"]} | scaling
        scaling |= _attention_factor(scaling)
        chosen["truncate"] = scaling.get("truncate", True)
    chosen["factor"] = number(scaling, "factor")
    for theirs, ours in NUMBERS.get(kind, {}).items():
        if kind == "llama3" or theirs in scaling:
            chosen[ours] = number(scaling, theirs)
    return keys | {"rope_scaling": config.RopeScaling(**chosen)}


def _attention_factor(scaling: dict[str, Any]) -> dict[str, float]:
    """Return yarn's attention factor from two settings of DeepSeek's models, if set."""
    names = "mscale", "mscale_all_dim"
    if "attention_factor" in scaling or not all(scaling.get(x) for x in names):
        return {}
    log_factor = math.log(number(scaling, "factor"))
    numerator, divisor = (0.1 * number(scaling, x) * log_factor + 1 for x in names)
    return {"attention_factor": numerator / divisor}


def settings_of_rope(options: config.Model) -> dict[str, Any]:
    """Return settings of RoPE and the text length, for transformers 4 and 5."""
    chosen, length = options.rope_scaling, options.length
    if chosen.kind == "none":
        parameters: dict[str, Any] = {"rope_type": "default"}
    else:
        parameters = {"rope_type": chosen.kind, "factor": chosen.factor}
    if chosen.kind in ("yarn", "llama3"):
        parameters[ORIGINAL] = chosen.original_length
    if chosen.kind == "dynamic":  # max_position_embeddings is the original length
        length = chosen.original_length
    elif chosen.kind == "yarn":  # version 4 takes the ratio of both lengths as factor
        length = round(chosen.factor * chosen.original_length)
        parameters["truncate"] = chosen.truncate
    for theirs, ours in NUMBERS.get(chosen.kind, {}).items():
        if value := getattr(chosen, ours):
            parameters[theirs] = value
    settings: dict[str, Any] = {
        "rope_theta": options.rope_base,
        "rope_parameters": {"rope_theta": options.rope_base, **parameters},
        "max_position_embeddings": length,
    }
    if chosen.kind != "none":
        settings["rope_scaling"] = parameters
    return settings
