"""Generated tasks: answers are recomputed from the rows alone."""

from dataclasses import replace

import numpy as np
import pytest

from symjax import config
from symjax.data import generated
from symjax.data.draws import Draws
from symjax.data.examples import generated_examples
from symjax.data.generated import NOTHING, rows

OPTIONS = {
    "mqar": config.Data(source="mqar", items=5, symbols=13),
    "needle": config.Data(source="needle", items=4, symbols=9, asked=3),
    **{
        name: config.Data(source=name, items=11, symbols=7)
        for name in ("copy", "reverse", "sort", "swap")
    },
    "sets": config.Data(source="sets", symbols=3),
    "listops": config.Data(source="listops"),
}
LENGTH = 37


def some(name, *, heldout=False, count=200, seed=3, length=LENGTH, first=0):
    indices = np.arange(first, first + count)
    options = OPTIONS[name]
    return rows(options, length, seed=seed, indices=indices, heldout=heldout)


def test_every_key_of_mqar_is_asked_once_and_its_value_was_said_before():
    for tokens, targets in zip(*some("mqar"), strict=True):
        values = dict(zip(tokens[0:10:2], tokens[1:10:2], strict=True))
        assert len(values) == 5 and max(values) < 13 <= min(values.values())
        places = np.flatnonzero(targets != NOTHING)
        assert sorted(tokens[places]) == sorted(values) and places.min() >= 10
        assert all(values[tokens[p]] == targets[p] for p in places)
        there = places[places + 1 < LENGTH]
        np.testing.assert_array_equal(tokens[there + 1], targets[there])
        between = np.delete(tokens[10:], places - 10)
        assert between.min() >= 13 and between.max() < 26


def test_needles_are_marked_in_the_hay_and_asked_at_the_end():
    for tokens, targets in zip(*some("needle"), strict=True):
        marks = np.flatnonzero(tokens == 27)
        values = dict(zip(tokens[marks + 1], tokens[marks + 2], strict=True))
        assert len(marks) == len(values) == 4
        places = np.flatnonzero(targets != NOTHING)
        assert (tokens[places - 1] == 28).all() and len(set(tokens[places])) == 3
        assert [values[tokens[p]] for p in places] == list(targets[places])
        assert places[-1] == LENGTH - 1 and marks.max() + 2 < places[0] - 1
        needles = {int(m) + i for m in marks for i in range(3)}
        hay = [t for i, t in enumerate(tokens[: places[0] - 1]) if i not in needles]
        assert min(hay) >= 18 and max(hay) < 27


def test_a_needle_lies_at_the_depth_it_was_given():
    options = config.Data(source="needle", items=1, symbols=5, asked=1)
    depths = np.array([[0.0], [0.5], [1.0]])
    draws = Draws(0, np.arange(3))
    tokens, _ = generated.plant(options, 27, draws, depths, np.zeros((3, 1), int))
    # 28 tokens with the answer: 3 asked, 3 of the needle, 22 of hay
    np.testing.assert_array_equal(np.argmax(tokens == 15, axis=1), [0, 11, 22])


REARRANGED = {
    "copy": lambda said: said,
    "reverse": lambda said: list(reversed(said)),
    "sort": sorted,
    "swap": lambda said: said[5:] + said[:5],  # halves of 5 and 6 symbols
}


@pytest.mark.parametrize("name", REARRANGED)
def test_what_was_said_is_asked_for_in_another_order(name):
    for tokens, targets in zip(*some(name), strict=True):
        said = tokens[LENGTH - 22 : LENGTH - 11]
        assert (tokens[: LENGTH - 22] == 7).all() and tokens[LENGTH - 11] == 7
        np.testing.assert_array_equal(targets[-11:], REARRANGED[name](list(said)))
        np.testing.assert_array_equal(targets[-11:-1], tokens[-10:])
        assert (targets[:-11] == NOTHING).all() and said.max() < 7


def test_the_majority_of_a_set_is_the_symbol_that_was_said_most_often():
    ties = 0
    for tokens, targets in zip(*some("sets", count=50), strict=True):
        for place, target in enumerate(targets):
            counts = np.bincount(tokens[: place + 1], minlength=3)
            leaders = np.flatnonzero(counts == counts.max())
            assert target == (leaders[0] if len(leaders) == 1 else NOTHING)
            ties += len(leaders) > 1
    assert ties > 100
    drawn = some("sets", count=400)[0]
    shares = np.bincount(drawn.ravel(), minlength=3) / drawn.size
    np.testing.assert_allclose(shares, 1 / 3, atol=0.02)


def evaluated(tokens):
    """Return (value, rest of the tokens) of a nested list, by recursion."""
    head, *rest = tokens
    if head < 10:
        return head, rest
    values = []
    while rest[0] != generated.CLOSE:
        value, rest = evaluated(rest)
        values.append(value)
    assert 2 <= len(values) <= generated.ARGUMENTS
    operations = {
        generated.MAXIMUM: max,
        generated.MINIMUM: min,
        generated.MEDIAN: lambda x: sorted(x)[(len(x) - 1) // 2],
        generated.SUM: lambda x: sum(x) % 10,
    }
    return operations[head](values), rest[1:]


@pytest.mark.parametrize("length", [5, 12, LENGTH])
def test_lists_are_whole_and_have_their_value(length):
    deepest, used = 0, set()
    for tokens, targets in zip(*some("listops", length=length), strict=True):
        written = [int(t) for t in tokens if t != generated.BLANK]
        value, rest = evaluated(written[:-1])
        assert rest == [] and written[-1] == generated.EQUALS
        assert targets[-1] == value and (targets[:-1] == NOTHING).all()
        assert (tokens[: length - len(written)] == generated.BLANK).all()
        opened = np.cumsum([(10 <= t < 14) - (t == generated.CLOSE) for t in written])
        deepest, used = max(deepest, opened.max()), used | set(written)
    assert deepest == (1 if length == 5 else min(generated.DEPTH, length // 4))
    assert used >= set(range(16))


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_depend_on_seed_and_index_alone(name):
    whole = some(name)
    part = some(name, first=50, count=70)
    for one, other in zip(whole, part, strict=True):
        np.testing.assert_array_equal(one[50:120], other)
    assert (whole[0] != some(name, seed=4)[0]).any(axis=1).all()
    assert len({row.tobytes() for row in whole[0]}) > 190  # short lists may agree


def test_no_row_of_training_is_held_out():
    """There are so few different rows that chance would put each into both."""
    options = config.Data(source="copy", items=3, symbols=3)
    found = {}
    for heldout in (False, True):
        made = [
            rows(options, 7, seed=seed, indices=np.arange(300), heldout=heldout)[0]
            for seed in range(3)
        ]
        found[heldout] = {row.tobytes() for row in np.concatenate(made)}
    assert not found[False] & found[True]
    assert len(found[False] | found[True]) == 27


@pytest.mark.parametrize(
    ("options", "length", "words"),
    [
        ({"source": "mqar"}, 19, "items 5 needs rows of 20 tokens, model.length is 19"),
        ({"source": "needle"}, 20, "items 4 needs rows of 21 tokens"),
        (
            {"source": "needle", "asked": 5},
            37,
            "asked 5 must be from 1 to data.items 4",
        ),
        ({"source": "mqar", "items": 14}, 99, "14 different keys need as many"),
        ({"source": "listops"}, 4, "needs rows of 5 tokens"),
        (
            {"source": "copy", "items": 1, "symbols": 2},
            9,
            "so few different rows that none is left to train on",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused(options, length, words):
    options = replace(OPTIONS[options["source"]], **options)
    with pytest.raises(ValueError, match=words):
        rows(options, length, seed=0, indices=np.arange(2), heldout=False)


def test_a_task_without_held_out_rows_is_refused_before_it_is_learned():
    task = generated_examples(config.Data(source="copy", items=1, symbols=2))
    with pytest.raises(ValueError, match="that none is held out"):
        task.check_length(3)


def test_draws_are_uniform_and_differ_by_row_call_and_attempt():
    draws = Draws(1, np.arange(500))
    first, second = draws.uniform(40), draws.uniform(40)
    assert abs(first.mean() - 0.5) < 0.01 and abs(first.std() - 12**-0.5) < 0.01
    other = Draws(1, np.arange(500), attempt=1).uniform(40)
    for one in (second, other):
        assert abs(np.corrcoef(first.ravel(), one.ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]) < 0.03
    order = draws.distinct(7, 7)
    assert (np.sort(order, axis=1) == np.arange(7)).all()
