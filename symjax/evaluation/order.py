"""Whether answers depend on the order in which examples are shown."""

import numpy as np
from tqdm import tqdm

from symjax.data import generated
from symjax.data.draws import Draws
from symjax.evaluation.answers import answering, heldout, learned
from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Lines, Table
from symjax.evaluation.trained import Trained

PROMPTS = 100
ORDERS = 10  # at most, of the examples of every prompt
SPREAD = ("mean", "least", "greatest", "margin")


def order(trained: Trained, asked: Asked) -> Finding:
    """Accuracy over the orders of in-context examples; the margin is greatest − least.

    100 prompts of `mqar` or `needle` show their examples in ten orders, or in all there
    are; everything else, the questions too, stays where it is. Of all prompts together
    and of each with its own questions; and how accurate an answer is by the place of
    its example. Prompts are held out in the first of the orders.

    Source: Ye et al. 2024, arXiv:2410.05258, section 3.5.
    """
    options = trained.options.data
    if not learned(trained, "mqar", "needle"):
        text = "order: none, the model was not trained on data.source=mqar or needle"
        return Finding({"order": None}, [text])
    if options.items == 1:
        return Finding({"order": None}, ["order: none, one example has one order"])
    length = trained.options.model.length
    tokens, targets = heldout(options, length, PROMPTS, asked.seed)
    chosen = orders(options.items, asked.seed)
    say, there = answering(trained), targets >= 0
    said, places = [], []
    for some in tqdm(chosen, "orders", leave=False, disable=None):
        prompts = generated.reordered(options, tokens, some)
        said.append(say(prompts)[there])
        keys = generated.shown(options, prompts)[..., -2]
        places.append(_asked_about(np.take_along_axis(prompts, keys, 1), tokens, there))
    answers, where = np.stack(said), np.stack(places)  # [orders, questions]
    right = answers == targets[there]
    changed = float((answers != answers[:1]).any(axis=0).mean())
    by_prompt = right.reshape(len(chosen), PROMPTS, -1).mean(axis=-1)
    together, alone = spread(by_prompt.mean(axis=1)), spread(by_prompt).mean(axis=-1)
    by_place = [float(right[where == i].mean()) for i in range(options.items)]
    chance = 1 / options.symbols
    found = {
        "examples": options.items,
        "orders": len(chosen),
        "chance": chance,
        "together": dict(zip(SPREAD, together.tolist(), strict=True)),
        "prompt": dict(zip(SPREAD, alone.tolist(), strict=True)),
        "changed": changed,
        "by_place": by_place,
    }
    text = [
        f"{PROMPTS} prompts of {options.items} examples, each in {len(chosen)} orders: "
        f"{changed:.1%} of {right.shape[1]} answers change with the order",
        "accuracy by order, of all prompts together and of one (mean over prompts); "
        f"chance {chance:.4f}",
    ]
    cells = [("all prompts", *together.tolist()), ("one prompt", *alone.tolist())]
    numbers = list(range(1, options.items + 1))
    tables = (
        Table("order", ("accuracy of", *SPREAD), cells),
        Table(
            "order_by_place",
            ("place", "accuracy"),
            list(zip(numbers, by_place, strict=True)),
        ),
    )
    x = list(map(float, numbers))
    curves = {"accuracy": (x, by_place), "chance": (x, [chance] * len(x))}
    figure = Lines("order_by_place", "place of the example", "accuracy", curves)
    return Finding({"order": found}, text, tables, (figure,))


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
