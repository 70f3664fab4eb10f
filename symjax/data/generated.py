"""Generated tasks with known answers (`GENERATORS`).

    mqar, needle, listops       in this file
    copy, reverse, sort, swap   in `rearranged`
    sets                        in `samples`

A row has `length` tokens and `length` targets. A target is the token to predict at its
place, or −1 if there is nothing to predict. `rows` makes all rows of a batch at once.
Each row is a pure function of the seed and its index.

A hash of the tokens of a row tells whether the row is held out; one row in eight is. So
no row is in both training and held-out data, for any seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from symjax import config
from symjax.data.draws import Draws, mix
from symjax.data.rearranged import ARRANGEMENTS, rearranged
from symjax.data.rows import NOTHING, Rows
from symjax.data.samples import sets

HELDOUT = 8  # one row in 8 is held out
ATTEMPTS = 5000  # most attempts to draw a row of the wanted split


class Generator(NamedTuple):
    """A generated task.

    Attributes:
        make: (options, length, draws) → rows.
        vocabulary: options → number of token types.
        least: options → length of the shortest possible row.
        answers: options → number of possible answers.
    """

    make: Callable[[config.Data, int, Draws], Rows]
    vocabulary: Callable[[config.Data], int]
    least: Callable[[config.Data], int]
    answers: Callable[[config.Data], int]


def rows(
    options: config.Data,
    length: int,
    *,
    seed: int,
    indices: np.ndarray,
    heldout: bool,
) -> Rows:
    """Make the rows of a task.

    Args:
        indices: [B], the numbers of the rows.
        heldout: whether to make held-out rows or training rows.
    Raises:
        ValueError: the length is too small, the options contradict each other, or the
            task has so few rows that none is in the wanted split.
    """
    generator = GENERATORS[options.source]
    check(options, length)
    indices = np.asarray(indices, np.int64)
    tokens = np.zeros((len(indices), length), np.int32)
    targets = np.full_like(tokens, NOTHING)
    waiting, attempt = np.arange(len(indices)), 0
    while len(waiting):
        if attempt == ATTEMPTS:
            side = "is held out" if heldout else "is left to train on"
            raise ValueError(
                f"data.source={options.source} with data.items {options.items} and "
                f"data.symbols {options.symbols} has so few different rows that none "
                f"{side}: choose more"
            )
        draws = Draws(seed, indices[waiting], attempt)
        drawn, answers = generator.make(options, length, draws)
        wanted = is_heldout(drawn) == heldout
        tokens[waiting[wanted]] = drawn[wanted]
        targets[waiting[wanted]] = answers[wanted]
        waiting, attempt = waiting[~wanted], attempt + 1
    return tokens, targets


def is_heldout(tokens: np.ndarray) -> np.ndarray:
    """Return bool [B]: whether each of the rows [B, T] is held out, by its tokens."""
    hashed = np.zeros(len(tokens), np.uint64)
    for column in np.asarray(tokens, np.int64).T.astype(np.uint64):
        hashed = mix(hashed ^ column)
    return hashed % np.uint64(HELDOUT) == 0


def check(options: config.Data, length: int) -> None:
    """Check that a task can have rows of a length.

    Raises:
        ValueError: it cannot; the message names the options or the length.
    """
    source = options.source
    if source in ("mqar", "needle") and options.items > options.symbols:
        raise ValueError(
            f"data.source={source}: data.items {options.items} different keys need as "
            f"many data.symbols, got {options.symbols}"
        )
    if source == "needle" and not 1 <= options.asked <= options.items:
        raise ValueError(
            f"data.asked {options.asked} must be from 1 to data.items {options.items}"
        )
    least = GENERATORS[source].least(options)
    if length < least:
        raise ValueError(
            f"data.source={source} with data.items {options.items} needs rows of "
            f"{least} tokens, model.length is {length}"
        )


def _mqar(options: config.Data, length: int, draws: Draws) -> Rows:
    """Multi-query associative recall: pairs of key and value, then the keys again.

        k₁ v₁ … kₙ vₙ  … kᵢ vᵢ … kⱼ vⱼ …

    Each key is repeated once, at a distance drawn from a power law. The target at the
    repeated key is its value. Other places hold random values. There are `symbols`
    different keys and as many different values.

    Source: Arora et al. 2023, arXiv:2312.04927, section 4 and appendix.
    """
    count, symbols = options.items, options.symbols
    keys = draws.distinct(symbols, count)
    values = symbols + draws.below(symbols, count)
    tokens = symbols + draws.below(symbols, length + 1)
    tokens[:, 0 : 2 * count : 2], tokens[:, 1 : 2 * count : 2] = keys, values
    slots = (length + 1 - 2 * count) // 2
    # Taking the largest u^(1/w) draws places without replacement, with weights w.
    weights = (1 + np.arange(slots)) ** (POWER - 1)
    chances = np.log(draws.uniform(slots) + 2.0**-54) / weights
    chosen = np.argsort(-chances, axis=1)[:, :count]
    places = 2 * count + 2 * chosen
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(tokens, places + 1, values, axis=1)
    targets = np.full((len(tokens), length), NOTHING)
    np.put_along_axis(targets, places, values, axis=1)
    return tokens[:, :length].astype(np.int32), targets.astype(np.int32)


# In `mqar` a key is repeated in slot i (from 1) with a weight i^(POWER − 1). The value
# is that of Zoology, the code of the paper.
POWER = 0.01


def _needle(options: config.Data, length: int, draws: Draws) -> Rows:
    """Needles (a mark, a key and its value) in hay, followed by questions.

        hay mark k v hay hay mark k v hay … ask kᵢ vᵢ ask kⱼ vⱼ

    The target at a key of a question is its value. Keys, values and hay have `symbols`
    different tokens each.
    """
    depths = draws.uniform(options.items)
    order = draws.distinct(options.items, options.asked)
    return plant(options, length, draws, depths, order)


def plant(
    options: config.Data,
    length: int,
    draws: Draws,
    depths: np.ndarray,
    order: np.ndarray,
) -> Rows:
    """Rows of `needle` with chosen depths and questions. Needles do not overlap.

    Args:
        depths: [B, items], from 0 (the beginning of the hay) to 1 (its end).
        order: [B, asked], the needles that the questions ask for.
    """
    count, asked, symbols = options.items, options.asked, options.symbols
    keys = draws.distinct(symbols, count)
    values = symbols + draws.below(symbols, count)
    mark, ask = 3 * symbols, 3 * symbols + 1
    room = length + 1 - 3 * asked
    free = room - 3 * count  # tokens of hay before the questions
    tokens = 2 * symbols + draws.below(symbols, length + 1)
    # A needle comes after its share of the hay and after the needles of smaller depth.
    ranks = np.argsort(np.argsort(depths, axis=1), axis=1)
    places = np.round(depths * free).astype(np.int64) + 3 * ranks
    start = room + 3 * np.arange(asked)[None].repeat(len(tokens), axis=0)
    asked_keys = np.take_along_axis(keys, order, axis=1)
    asked_values = np.take_along_axis(values, order, axis=1)
    for place, triple in (
        (places, (np.full_like(keys, mark), keys, values)),
        (start, (np.full_like(asked_keys, ask), asked_keys, asked_values)),
    ):
        for offset, part in enumerate(triple):
            np.put_along_axis(tokens, place + offset, part, axis=1)
    targets = np.full((len(tokens), length), NOTHING)
    np.put_along_axis(targets, start + 1, asked_values, axis=1)
    return tokens[:, :length].astype(np.int32), targets.astype(np.int32)


def example_places(options: config.Data, tokens: np.ndarray) -> np.ndarray:
    """Places [B, items, size] of the examples in rows of `mqar` and `needle`.

    Examples are pairs (size 2) or needles (size 3), in the order of the row. The last
    two places of an example hold its key and its value.
    """
    count = options.items
    if options.source == "mqar":
        return np.arange(2 * count).reshape(1, count, 2).repeat(len(tokens), axis=0)
    marks = np.nonzero(tokens == 3 * options.symbols)[1].reshape(-1, count, 1)
    return marks + np.arange(3)


def reordered(
    options: config.Data, tokens: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Rows [B, T] with example order[i] at the place of example i.

    All other tokens stay at their places.
    """
    places = example_places(options, tokens)
    changed, rows = tokens.copy(), np.arange(len(tokens))[:, None, None]
    changed[rows, places] = tokens[rows, places[:, order]]
    return changed


MAXIMUM, MINIMUM, MEDIAN, SUM, CLOSE, EQUALS, BLANK = range(10, 17)
ARGUMENTS = 5  # most arguments of an operator; an operator has at least 2
DEPTH = 4  # most nested operators


def _listops(options: config.Data, length: int, draws: Draws) -> Rows:
    """ListOps: nested lists of digits, each with an operator.

        [MAX 2 9 [MIN 4 7] 0] = 9

    The target at "=" is the value. MED is the lower median, SM the sum modulo 10. All
    rows are written at once, token by token. An operator opens only if there is room to
    close it again. Rows with shorter expressions begin with blanks.

    Source: Nangia & Bowman 2018, arXiv:1804.06028.
    """
    batch = np.arange(len(draws.bits(1)))
    budget = length - 1  # the last place is "="
    written = np.full((len(batch), budget), BLANK)
    operators = np.zeros((len(batch), DEPTH), np.int64)
    counts = np.zeros((len(batch), DEPTH + 1), np.int64)
    arguments = np.zeros((len(batch), DEPTH, ARGUMENTS), np.int64)
    depth = np.zeros(len(batch), np.int64)
    result = np.full(len(batch), NOTHING)
    for place in range(budget):
        room_left = budget - place
        choice = draws.uniform(1)[:, 0]
        operator = MAXIMUM + draws.below(4, 1)[:, 0]
        digit = draws.below(10, 1)[:, 0]
        done, inner = result != NOTHING, np.maximum(depth - 1, 0)
        count = counts[batch, inner]
        # Tokens needed to close all lists: missing second arguments, and "]" of each.
        level = np.arange(DEPTH)
        missing = np.maximum(2 - counts[:, :DEPTH] - (level < inner[:, None]), 0)
        needed = ((missing + 1) * (level < depth[:, None])).sum(axis=1)
        room = (depth < DEPTH) & (count < ARGUMENTS) & (room_left >= needed + 4)
        opens = ~done & ((depth == 0) | (room & (choice < 0.3)))
        full = (count == ARGUMENTS) | (room_left <= needed + 1)
        enough = full | (choice > np.where(depth == 1, 0.97, 0.75))
        closes = ~done & ~opens & (count >= 2) & enough
        digits = ~done & ~opens & ~closes
        tokens = [operator, CLOSE, digit]
        written[:, place] = np.select([opens, closes, digits], tokens, BLANK)
        operators[batch[opens], depth[opens]] = operator[opens]
        counts[batch[opens], depth[opens]] = 0
        depth = depth + opens
        closed = _evaluate(operators[batch, inner], arguments[batch, inner], count)
        depth = depth - closes
        result = np.where(closes & (depth == 0), closed, result)
        finished = digits | (closes & (depth > 0))
        parent = np.maximum(depth - 1, 0)
        value = np.where(closes, closed, digit)
        where = batch[finished], parent[finished], counts[batch, parent][finished]
        arguments[where] = value[finished]
        counts[batch[finished], parent[finished]] += 1
    return _completed(written, result, length)


def _evaluate(
    operator: np.ndarray, arguments: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """The value [B] of an operator over its first `count` arguments [B, ARGUMENTS]."""
    there = np.arange(ARGUMENTS)[None] < count[:, None]
    ordered = np.sort(np.where(there, arguments, 99), axis=1)
    middle = np.maximum(count - 1, 0) // 2
    values = {
        MAXIMUM: np.where(there, arguments, -1).max(axis=1),
        MINIMUM: ordered[:, 0],
        MEDIAN: ordered[np.arange(len(count)), middle],
        SUM: np.where(there, arguments, 0).sum(axis=1) % 10,
    }
    return np.select([operator == x for x in values], list(values.values()))


def _completed(written: np.ndarray, result: np.ndarray, length: int) -> Rows:
    """Move blanks to the front, and append "=" with the result as its target."""
    blanks = written == BLANK
    order = np.argsort(~blanks, axis=1, kind="stable")
    tokens = np.full((len(written), length), EQUALS)
    tokens[:, :-1] = np.take_along_axis(written, order, axis=1)
    targets = np.full((len(written), length), NOTHING)
    targets[:, -1] = result
    return tokens.astype(np.int32), targets.astype(np.int32)


GENERATORS = {
    "mqar": Generator(
        _mqar,
        vocabulary=lambda options: 2 * options.symbols,
        least=lambda options: 4 * options.items,
        answers=lambda options: options.symbols,
    ),
    "needle": Generator(
        _needle,
        vocabulary=lambda options: 3 * options.symbols + 2,
        least=lambda options: 3 * (options.items + options.asked),
        answers=lambda options: options.symbols,
    ),
    **{
        name: Generator(
            partial(rearranged, arrange),
            vocabulary=lambda options: options.symbols + 1,
            least=lambda options: 2 * options.items,
            answers=lambda options: options.symbols,
        )
        for name, arrange in ARRANGEMENTS.items()
    },
    "sets": Generator(
        sets,
        vocabulary=lambda options: options.symbols,
        least=lambda options: 1,
        answers=lambda options: options.symbols,
    ),
    "listops": Generator(
        _listops,
        vocabulary=lambda options: BLANK + 1,
        least=lambda options: 5,  # an operator, two digits, "]" and "="
        answers=lambda options: 10,
    ),
}
