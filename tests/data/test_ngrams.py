"""n-gram losses equal counting by hand."""

import collections
import math

import numpy as np
import pytest

from symjax.data import ngrams


def grams_of(tokens, order, ends, shared):
    """Return (context, target) of each target, token by token."""
    edges = [x - shared for x in ends]
    for at in range(1, len(tokens)):
        if at in edges and not shared:
            continue
        first = max([0, *(x for x in edges if x < at)])
        places = [max(at - back, first) for back in range(order - 1, 0, -1)]
        yield tuple(tokens[x] for x in places), tokens[at]


def by_hand(train, heldout, order, vocabulary, ends=((), ()), shared=False):
    grams, contexts = collections.Counter(), collections.Counter()
    for context, target in grams_of(train, order, ends[0], shared):
        grams[context, target] += 1
        contexts[context] += 1
    nats = []
    for context, target in grams_of(heldout, order, ends[1], shared):
        total = contexts[context] + 0.01 * vocabulary
        nats.append(-math.log((grams[context, target] + 0.01) / total))
    return sum(nats) / len(nats)


@pytest.mark.parametrize("apart", ["joined", "own", "shared"])
@pytest.mark.parametrize("vocabulary", [7, 256, 1000, 1_114_112])
def test_lines_equal_counting_by_hand(vocabulary, apart, monkeypatch):
    monkeypatch.setattr(ngrams, "RANGES", 1 << 18)  # of 32 targets
    draw = np.random.default_rng(0)
    dtype = np.min_scalar_type(vocabulary - 1)
    # Few types at the top of the range: a code that overflows would be wrong.
    train = (vocabulary - 1 - draw.geometric(0.4, 501) % 7).astype(dtype)
    heldout = (vocabulary - 1 - draw.geometric(0.3, 97) % 7).astype(dtype)
    ends = np.array([2, 3, 5, 33, 34, 66, 97, 501]), np.array([32, 33, 35, 64, 97])
    if apart == "joined":
        more, hand = {}, ((), ())
    else:
        more = {"ends": dict(zip(("train", "heldout"), ends, strict=True))}
        more["shared"] = apart == "shared"
        hand = ends
    got = ngrams.cross_entropies(train, heldout, vocabulary, **more)
    for name, order in ngrams.ORDERS.items():
        texts = train.tolist(), heldout.tolist()
        expected = by_hand(*texts, order, vocabulary, hand, apart == "shared")
        np.testing.assert_allclose(got[name], expected, rtol=1e-12)


def test_a_sample_of_a_text_has_so_many_targets(monkeypatch):
    monkeypatch.setattr(ngrams, "COUNTED_TARGETS", 64)
    stretches = list(ngrams._target_ranges(1000))
    assert stretches[0] == (1, 5) and stretches[-1] == (996, 1000)
    assert {stop - start for start, stop in stretches} == {4}


def test_a_text_without_trigrams_is_refused():
    with pytest.raises(ValueError, match="2 tokens of held-out text, at least 3 are"):
        ngrams.cross_entropies(np.zeros(9, np.uint8), np.zeros(2, np.uint8), 256)
