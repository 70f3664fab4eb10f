"""Dependence of answers on the order of the examples in a prompt (task `order`)."""

import numpy as np

from symjax.data import generated
from symjax.data.draws import Draws
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.answers import draw_heldout, predictor
from symjax.evaluation.results import (
    Options,
    Result,
    Table,
    not_applicable,
    progress,
)
from symjax.figures import Lines

PROMPTS = 100
ORDERS = 10  # the most orders of the examples of a prompt
STATISTICS = ("mean", "least", "greatest", "margin")


def order(run: LoadedRun, options: Options) -> Result:
    """Measure how accuracy changes with the order of the in-context examples.

    100 prompts of `mqar` or `needle` show their examples in ten orders, or in all
    orders if there are fewer. Questions and other tokens keep their positions, so a
    model that retrieves the examples has the same accuracy in every order. In their
    first order the prompts are held-out rows.

    Returns:
        A result with three measurements. First, the mean, least and greatest accuracy
        over the orders, and the margin greatest − least. They are measured for all
        prompts together, and for each prompt alone, averaged over prompts. Second, the
        fraction of answers that change with the order. Third, the accuracy by the
        position of the example that a question asks for.

    Source: Ye et al. 2024, arXiv:2410.05258, section 3.5.
    """
    data = run.config.data
    if data.items == 1:
        return not_applicable("order", "one example has one order")
    length = run.config.model.length
    tokens, targets = draw_heldout(data, length, PROMPTS, options.seed)
    drawn = orders(data.items, options.seed)
    predict, questions = predictor(run), targets >= 0
    predicted, examples = [], []
    for new_order in progress(drawn, "orders"):
        prompts = generated.reordered(data, tokens, new_order)
        predicted.append(predict(prompts)[questions])
        positions = generated.example_places(data, prompts)[..., -2]
        keys = np.take_along_axis(prompts, positions, 1)
        examples.append(_asked_examples(keys, tokens, questions))
    answers, asked = np.stack(predicted), np.stack(examples)  # [orders, questions]
    right = answers == targets[questions]
    changed = float((answers != answers[:1]).any(axis=0).mean())
    by_prompt = right.reshape(len(drawn), PROMPTS, -1).mean(axis=-1)
    all_prompts = spread(by_prompt.mean(axis=1)).tolist()
    one_prompt = spread(by_prompt).mean(axis=-1).tolist()
    by_place = [float(right[asked == i].mean()) for i in range(data.items)]
    chance = 1 / data.symbols
    results = {
        "examples": data.items,
        "orders": len(drawn),
        "chance": chance,
        "together": dict(zip(STATISTICS, all_prompts, strict=True)),
        "prompt": dict(zip(STATISTICS, one_prompt, strict=True)),
        "changed": changed,
        "by_place": by_place,
    }
    text = [
        f"{PROMPTS} prompts of {data.items} examples, each in {len(drawn)} orders: "
        f"{changed:.1%} of {right.shape[1]} answers change with the order",
        "accuracy by order, of all prompts together and of one prompt (mean over "
        f"prompts); chance {chance:.4f}",
    ]
    cells = [("all prompts", *all_prompts), ("one prompt", *one_prompt)]
    numbered = list(enumerate(by_place, 1))
    tables = (
        Table("order", ("accuracy of", *STATISTICS), cells),
        Table("order_by_place", ("place", "accuracy"), numbered),
    )
    x = [float(place) for place, _ in numbered]
    curves = {"accuracy": (x, by_place), "chance": (x, [chance] * len(x))}
    title = "Accuracy by the place of the example that is asked for"
    figure = Lines(
        "order_by_place", "place of the example", "accuracy", curves, title=title
    )
    return Result({"order": results}, text, tables, (figure,))


def orders(count: int, seed: int) -> np.ndarray:
    """Return different orders [orders, count] of examples; the first is unchanged."""
    drawn = Draws(seed, np.arange(50 * ORDERS)).distinct(count, count)
    different = dict.fromkeys([tuple(range(count)), *map(tuple, drawn.tolist())])
    return np.array(list(different)[:ORDERS])


def spread(accuracy: np.ndarray) -> np.ndarray:
    """Return mean, least, greatest and margin over the first axis, the orders."""
    least, greatest = accuracy.min(axis=0), accuracy.max(axis=0)
    return np.stack([accuracy.mean(axis=0), least, greatest, greatest - least])


def _asked_examples(
    keys: np.ndarray, tokens: np.ndarray, questions: np.ndarray
) -> np.ndarray:
    """Return the index of the example that each question asks for [questions].

    Args:
        keys: the key of each example of each prompt [B items].
        questions: True at the key of each question [B T].
    """
    rows = np.nonzero(questions)[0]
    return (keys[rows] == tokens[questions][:, None]).argmax(axis=1)
