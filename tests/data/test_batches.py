"""Batches are a function of (seed, step) and visit every window once per epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symjax.data import shuffle
from symjax.data.corpus import Corpus
from symjax.data.examples import text_examples
from symjax.data.tokens import ByteTokenizer

TEXT = np.arange(1009, dtype=np.uint16)  # a token is its own position
OPTIONS = dict(length=7, batch_size=5, seed=3)
WINDOWS = 1008 // 7 - 1


def rows(count: int, tokens=TEXT, **options):
    """Return inputs and targets of the first `count` rows of a run."""
    options = OPTIONS | options
    steps = -(-count // options["batch_size"])
    drawn = [batch(step, tokens, **options) for step in range(steps)]
    return tuple(np.concatenate(part)[:count] for part in zip(*drawn, strict=True))


def batch(step, tokens=TEXT, start=0, stop=None, *, length, batch_size, seed):
    shape = batch_size, length
    drawn = examples(tokens).batch_reader(shape, seed=seed, step=step)
    return drawn(start, batch_size if stop is None else stop)


def examples(tokens, heldout=TEXT):
    """Return examples of texts for tests that only read rows."""
    return text_examples(Corpus(tokens, heldout, ByteTokenizer(), {}, {}, 1.0))


def heldout(tokens, length, batch_size, count=None):
    return examples(TEXT, tokens).heldout_batches((batch_size, length), count)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
@settings(max_examples=60)
def test_the_permutation_is_one_to_one(size, seed, epoch):
    keys = shuffle._keys(seed, np.full(size, epoch))[: shuffle.ROUNDS]
    image = shuffle._permuted(np.arange(size, dtype=np.uint64), size, keys)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_the_permutation_looks_random():
    size = 10007
    index = np.arange(size, dtype=np.uint64)
    images = [
        shuffle._permuted(index, size, shuffle._keys(seed, np.zeros(size, int))[:4])
        for seed in range(3)
    ]
    for image in images:
        steps = np.diff(image.astype(int))
        assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.05
        assert np.mean(np.abs(steps)) == pytest.approx(size / 3, rel=0.05)
    assert np.mean(images[0] == images[1]) < 0.002


def test_targets_are_inputs_one_token_later():
    inputs, targets = rows(50)
    assert inputs.shape == targets.shape == (50, 7)
    assert inputs.dtype == targets.dtype == np.int32
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_an_epoch_visits_every_window_once_and_then_shifts_the_cuts():
    inputs, _ = rows(4 * WINDOWS)
    shifts, orders = set(), set()
    for epoch in inputs.reshape(4, WINDOWS, 7):
        starts = np.sort(epoch[:, 0])
        assert np.array_equal(np.diff(starts), np.full(WINDOWS - 1, 7))
        assert 0 <= starts[0] < 7
        shifts.add(int(starts[0]))
        orders.add(tuple(epoch[:, 0] // 7))
    assert len(shifts) > 1
    assert len(orders) == 4


def test_any_step_is_the_same_whatever_came_before():
    first = batch(10**12, **OPTIONS)
    again = batch(10**12, **OPTIONS)
    other = batch(10**12, **OPTIONS | {"seed": 4})
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_stream_does_not_depend_on_the_batch_size():
    assert np.array_equal(rows(300), rows(300, batch_size=41))


def test_a_known_batch_stays_the_same():
    # A resumed run must see the rows it would have seen: this never changes.
    inputs, _ = batch(0, **OPTIONS)
    assert inputs[:, 0].tolist() == [877, 821, 919, 527, 331]


@given(st.lists(st.integers(0, 13), max_size=4), st.integers(0, 10**6))
@settings(max_examples=30)
def test_slices_of_processes_make_the_global_batch(cuts, step):
    options = OPTIONS | {"batch_size": 13}
    cuts = [0, *sorted(cuts), 13]
    parts = [
        batch(step, start=start, stop=stop, **options)
        for start, stop in zip(cuts, cuts[1:], strict=False)
    ]
    whole = batch(step, **options)
    for part, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert np.array_equal(np.concatenate(part), expected)


@pytest.mark.parametrize("size", [8, 9, 14, 15, 16, 21, 22, 23])
def test_a_text_of_few_windows_still_gives_batches(size):
    inputs, targets = rows(40, TEXT[:size])
    assert inputs.min() >= 0
    assert targets.max() < size
    assert np.array_equal(targets, inputs + 1)


@pytest.mark.parametrize("size", [8, 9, 100, 36, 1009])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_held_out_batches_count_each_target_once(size, batch_size):
    seen = []
    for read in heldout(TEXT[:size], 7, batch_size):
        inputs, targets, weights = read(0, batch_size)
        assert inputs.shape == targets.shape == weights.shape == (batch_size, 7)
        assert inputs.dtype == targets.dtype == np.int32
        assert weights.dtype == np.float32
        assert weights.any()
        counted = weights == 1
        assert np.array_equal(targets[counted], inputs[counted] + 1)
        assert not weights[~counted].any()
        seen.extend(targets[counted])
    assert seen == list(range(1, size))


def test_some_held_out_batches_are_spread_over_the_whole_text():
    def read(start=0, stop=4, **more):
        return [rows(start, stop) for rows in heldout(TEXT, 7, 4, **more)]

    whole, some = read(), read(count=3)
    assert len(some) == 3
    chosen = [whole[index * len(whole) // 3] for index in range(3)]
    assert np.array_equal(some, chosen)
    assert len(read(count=10**6)) == len(whole)
    halves = [read(start, start + 2) for start in (0, 2)]
    assert np.array_equal(np.concatenate(halves, axis=2), whole)


def test_a_text_shorter_than_a_window_is_refused_with_both_sizes():
    with pytest.raises(
        ValueError,
        match=r"data.path has 37 tokens of training text, model.length \+ 1 = 301 are",
    ):
        batch(0, TEXT[:37], seed=0, length=300, batch_size=4)
    with pytest.raises(ValueError, match="has 300 tokens of held-out text"):
        [rows(0, 4) for rows in heldout(TEXT[:300], 300, 4)]
    [rows] = heldout(TEXT[:301], 300, 4)
    assert rows(0, 4)[2].sum() == 300
