"""The n-gram lines equal counting by hand."""

import collections
import math

import numpy as np
import pytest

from symjax.data import ngrams


def by_hand(train, heldout, order, vocabulary):
    grams, contexts = collections.Counter(), collections.Counter()
    for at in range(len(train) - order + 1):
        gram = tuple(train[at : at + order])
        grams[gram] += 1
        contexts[gram[:-1]] += 1
    nats = []
    for at in range(len(heldout) - order + 1):
        gram = tuple(heldout[at : at + order])
        total = contexts[gram[:-1]] + 0.01 * vocabulary
        nats.append(-math.log((grams[gram] + 0.01) / total))
    return sum(nats) / len(nats)


@pytest.mark.parametrize("vocabulary", [7, 256, 1000, 1_114_112])
def test_lines_equal_counting_by_hand(vocabulary):
    draw = np.random.default_rng(0)
    dtype = np.min_scalar_type(vocabulary - 1)
    # Few types at the top of the range: a code that overflows would be wrong.
    train = (vocabulary - 1 - draw.geometric(0.4, 501) % 7).astype(dtype)
    heldout = (vocabulary - 1 - draw.geometric(0.3, 97) % 7).astype(dtype)
    got = ngrams.cross_entropies(train, heldout, vocabulary)
    for name, order in ngrams.ORDERS.items():
        expected = by_hand(train.tolist(), heldout.tolist(), order, vocabulary)
        np.testing.assert_allclose(got[name], expected, rtol=1e-12)


def test_a_text_without_trigrams_is_refused():
    with pytest.raises(ValueError, match="2 tokens of held-out text, at least 3 are"):
        ngrams.cross_entropies(np.zeros(9, np.uint8), np.zeros(2, np.uint8), 256)
