"""Whether answers depend on the order in which examples are shown."""

import numpy as np

from symjax.data import generated
from symjax.data.draws import Draws
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.answers import heldout, predictor
from symjax.evaluation.results import Options, Result, Table, none, progress
from symjax.figures import Lines

PROMPTS = 100
ORDERS = 10  # at most, of the examples of every prompt
SPREAD = ("mean", "least", "greatest", "margin")


def order(run: LoadedRun, options: Options) -> Result:
    """Accuracy over the orders of in-context examples; the margin is greatest − least.

    100 prompts of `mqar` or `needle` show their examples in ten orders, or in all there
    are; everything else, the questions too, stays where it is. Of all prompts together
    and of each with its own questions; and how accurate an answer is by the place of
    its example. Prompts are held out in the first of the orders.

    Source: Ye et al. 2024, arXiv:2410.05258, section 3.5.
    """
    data = run.config.data
    if data.items == 1:
        return none("order", "one example has one order")
    tokens, targets = heldout(data, run.config.model.length, PROMPTS, options.seed)
    chosen = orders(data.items, options.seed)
    predict, there = predictor(run), targets >= 0
    predicted, places = [], []
    for some in progress(chosen, "orders"):
        prompts = generated.reordered(data, tokens, some)
        predicted.append(predict(prompts)[there])
        keys = generated.shown(data, prompts)[..., -2]
        places.append(_asked_about(np.take_along_axis(prompts, keys, 1), tokens, there))
    answers, where = np.stack(predicted), np.stack(places)  # [orders, questions]
    right = answers == targets[there]
    changed = float((answers != answers[:1]).any(axis=0).mean())
    by_prompt = right.reshape(len(chosen), PROMPTS, -1).mean(axis=-1)
    together = spread(by_prompt.mean(axis=1)).tolist()
    alone = spread(by_prompt).mean(axis=-1).tolist()
    by_place = [float(right[where == i].mean()) for i in range(data.items)]
    chance = 1 / data.symbols
    found = {
        "examples": data.items,
        "orders": len(chosen),
        "chance": chance,
        "together": dict(zip(SPREAD, together, strict=True)),
        "prompt": dict(zip(SPREAD, alone, strict=True)),
        "changed": changed,
        "by_place": by_place,
    }
    text = [
        f"{PROMPTS} prompts of {data.items} examples, each in {len(chosen)} orders: "
        f"{changed:.1%} of {right.shape[1]} answers change with the order",
        "accuracy by order, of all prompts together and of one (mean over prompts); "
        f"chance {chance:.4f}",
    ]
    cells = [("all prompts", *together), ("one prompt", *alone)]
    numbered = list(enumerate(by_place, 1))
    tables = (
        Table("order", ("accuracy of", *SPREAD), cells),
        Table("order_by_place", ("place", "accuracy"), numbered),
    )
    x = [float(place) for place, _ in numbered]
    curves = {"accuracy": (x, by_place), "chance": (x, [chance] * len(x))}
    title = "Accuracy by the place of the example that is asked for"
    figure = Lines(
        "order_by_place", "place of the example", "accuracy", curves, title=title
    )
    return Result({"order": found}, text, tables, (figure,))


def orders(count: int, seed: int) -> np.ndarray:
    """Different orders [orders, count] of so many examples, the first as they are."""
    drawn = Draws(seed, np.arange(50 * ORDERS)).distinct(count, count)
    kept = dict.fromkeys([tuple(range(count)), *map(tuple, drawn.tolist())])
    return np.array(list(kept)[:ORDERS])


def spread(accuracy: np.ndarray) -> np.ndarray:
    """Mean, least, greatest and margin over the first axis, the orders."""
    least, greatest = accuracy.min(axis=0), accuracy.max(axis=0)
    return np.stack([accuracy.mean(axis=0), least, greatest, greatest - least])


def _asked_about(keys: np.ndarray, tokens: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Which of the keys [B, items] every question [questions] is about."""
    rows = np.nonzero(there)[0]
    return (keys[rows] == tokens[there][:, None]).argmax(axis=1)
