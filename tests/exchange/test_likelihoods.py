"""Likelihoods of rows of any length: their values, memory and compilations."""

import jax
import numpy as np
import pytest
from flax import nnx
from hand_made import hand_made

from symjax import config
from symjax.data.tokens import ByteTokenizer
from symjax.exchange.scores import _scores, scores, text_losses
from symjax.models.decoder import Decoder
from symjax.training import loss

BYTES = ByteTokenizer()


def rows(*lengths):
    return [np.random.default_rng(n).integers(0, 256, n, np.int32) for n in lengths]


def definition(loaded, ids):
    """Return (−log p of every token but the first, whether it is the most likely)."""
    logits = np.asarray(loaded.logits(ids[:-1]), np.float64)
    chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -chances[np.arange(len(ids) - 1), ids[1:]], logits.argmax(axis=1) == ids[1:]


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_scores_are_those_of_the_logits_in_parts_or_at_once(positions, monkeypatch):
    loaded = hand_made(BYTES, positions=positions, length=40)
    given = rows(2, 41, 17, 33)
    wanted = [definition(loaded, ids) for ids in given]
    for largest in (2**26, 2000):
        monkeypatch.setattr(loss, "MOST_LOGITS", largest)
        jax.clear_caches()
        for found, (losses, likeliest) in zip(
            scores(loaded.model, given), wanted, strict=True
        ):
            np.testing.assert_allclose(found.losses, losses, atol=2e-6)
            np.testing.assert_array_equal(found.likeliest, likeliest)


def test_a_range_of_lengths_and_numbers_of_rows_is_one_compilation():
    loaded = hand_made(BYTES)
    scores(loaded.model, rows(2, 3, 4, 5))
    before = _scores._cache_size()
    for given in (rows(33, 32, 7), rows(*range(2, 34))[:4], rows(5, 6, 7, 8)):
        scores(loaded.model, given)
    assert _scores._cache_size() == before


def test_the_logits_of_all_tokens_are_never_in_memory_together():
    options = config.Model(
        vocabulary=50304, width=16, depth=1, heads=2, length=256, positions="rope"
    )
    graph, weights = nnx.split(
        nnx.eval_shape(lambda: Decoder(options, rngs=nnx.Rngs(0)))
    )
    tokens = jax.ShapeDtypeStruct((16, 256), np.int32)
    compiled = _scores.lower(graph, weights, tokens, tokens).compile()
    all_logits = 16 * 256 * 50304 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits


def test_long_texts_are_read_in_windows_of_the_length():
    loaded = hand_made(BYTES, length=32)
    given = rows(1, 80, 33, 0, 5)
    found = text_losses(loaded.model, given, 32)
    assert [len(x) for x in found] == [0, 79, 32, 0, 4]
    parts = [definition(loaded, given[1][i : i + 33])[0] for i in (0, 32, 64)]
    np.testing.assert_allclose(found[1], np.concatenate(parts), atol=2e-6)
