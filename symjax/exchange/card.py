"""The model card of a folder of weights: use, facts about the model, and results."""

import json
import os
from typing import Any

import jax

from symjax.checkpoints.checksum import checksum_of
from symjax.data.subwords import SubwordTokenizer
from symjax.exchange.loaded import Loaded
from symjax.models.build import weights_and_constants
from symjax.storage import resolve_url, store_errors

SHOWN = ("loss", "perplexity", "bits_per_byte", "accuracy")
USE = {
    "symjax": "model = symjax.load_pretrained(FOLDER)",
    "transformers": "model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)",
}


def read_results(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Read the results of `eval.py --json`; without a path, return an empty dict.

    Raises:
        ValueError: the file cannot be read or is not of that form.
    """
    if path is None:
        return {}
    try:
        with store_errors(where := resolve_url(path)):
            found = json.loads(where.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"results {str(path)!r} cannot be read: {error}") from None
    known = {"step", "parameters"}
    if not isinstance(found, dict) or not known <= found.keys():
        raise ValueError(f"results {str(path)!r} are not the JSON of eval.py")
    return found


def no_tokenizer(loaded: Loaded) -> str:
    """Return a sentence that AutoTokenizer finds no tokenizer; "" if it finds one."""
    if isinstance(loaded.tokenizer, SubwordTokenizer):
        return ""
    line = "AutoTokenizer of transformers finds no tokenizer in this folder"
    if loaded.tokenizer is None:
        return f"{line}: give the model token ids."
    return (
        f"{line}: the tokens are those of data.tokenizer={loaded.config.data.tokenizer}"
        ", which symjax.load_pretrained reads."
    )


def to_card(loaded: Loaded, reason: str, results: dict[str, Any]) -> str:
    """Return the model card in Markdown.

    Args:
        reason: why transformers cannot load the folder; "" if it can.
        results: the return value of `read_results`.
    Raises:
        ValueError: the results were measured on other weights.
    """
    model, source = loaded.config.model, loaded.config.data.source
    params, _ = weights_and_constants(loaded.model)
    count = sum(x.size for x in jax.tree.leaves(params))
    if results:
        about = {"step": loaded.step, "ema": loaded.ema, "parameters": count}
        _check(results, about | {"weights": checksum_of(params)})
    chosen = model.attention
    mechanism = ", ".join(dict.fromkeys(model.pattern)) or chosen.mechanism
    tokens = loaded.config.data.tokenizer if loaded.tokenizer else "ids"
    rows = {
        "kind": model.kind,
        "mechanism": mechanism,
        "symmetric": chosen.symmetric,
        "differential": chosen.differential,
        "parameters": f"{count:,}",
        "width, depth, heads": f"{model.width}, {model.depth}, {model.heads}",
        "context": f"{model.length} tokens",
        "tokens": f"{tokens}, {model.vocabulary} types",
        "trained on": f"data.source={source}, {loaded.step} steps",
    }
    if loaded.ema:
        decay = loaded.config.optimizer.ema
        rows["weights"] = f"moving average, optimizer.ema={decay:g}"
    library = "symjax" if reason else "transformers"
    head = [
        *("---", f"library_name: {library}", "---"),
        "",
        "# A model of symjax",
        "",
        *("```python", USE[library], "```", ""),
    ]
    if reason:
        head += [f"transformers does not load this folder: {reason}.", ""]
    elif line := no_tokenizer(loaded):
        head += [line, ""]
    table = ["| | |", "|---|---|", *(f"| {x} | {y} |" for x, y in rows.items())]
    return "\n".join([*head, *table, "", *_numbers(results)])


def _check(results: dict[str, Any], about: dict[str, Any]) -> None:
    """Refuse results that eval.py measured on other weights.

    Only the facts in `about` that the results contain are compared.

    Raises:
        ValueError: a fact differs.
    """
    for name, value in about.items():
        said = ({"ema": False} | results).get(name, value)
        if said != value:
            raise ValueError(
                f"the results are of {name} {said}, the model is of {name} {value}"
            )


def _numbers(results: dict[str, Any]) -> list[str]:
    """Return the lines of the card with losses of the model and of n-gram tables."""
    heldout = results.get("heldout") or {}
    text = "given text" if "text" in results else "held-out"
    rows = [(f"{text} {x}", heldout[x]) for x in SHOWN if x in heldout]
    rows += [(f"{x} table", y) for x, y in heldout.get("ngrams", {}).items()]
    rows = [(name, value) for name, value in rows if value is not None]
    if not rows:
        return []
    lines = (f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in rows)
    unit = "Losses are in nats per token."
    head = ["## Evaluation", "", unit, "", "| | |", "|---|---|"]
    return [*head, *lines, ""]
