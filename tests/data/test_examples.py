"""Properties of each kind of examples that evaluation and training read."""

import numpy as np
import pytest
from runs import TEXT, write_text

from symjax import config
from symjax.data.examples import open_examples

ENCODER = config.Model(kind="encoder")
# data and model: (a plain text, a tokenizer, rows of a fixed length)
KINDS = {
    "text": (None, config.Model(), (True, True, False)),
    "masked": (None, ENCODER, (False, True, False)),
    "packages": (
        config.Data(source="packages"),
        config.Model(kind="encoder", classes=8),
        (False, True, False),
    ),
    "digits": (
        config.Data(source="digits"),
        config.Model(kind="encoder", classes=10),
        (False, False, True),
    ),
    "copy": (config.Data(source="copy"), config.Model(), (False, False, True)),
}


@pytest.fixture(scope="module", params=KINDS)
def opened(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    data, model, claims = KINDS[request.param]
    data = data or config.Data(source="text", path=str(write_text(folder)))
    options = config.Config(data=data, model=model)
    return request.param, open_examples(options, folder / "data"), claims


def test_every_kind_of_examples_declares_what_it_is(opened):
    name, examples, claims = opened
    assert claims == (
        examples.text is not None,
        examples.tokenizer is not None,
        examples.fixed_length,
    )
    assert bool(examples.labels) == (name in ("packages", "digits"))
    assert (examples.image is None) == (name != "digits")
    assert examples.unit and examples.size and examples.references


def test_rows_are_as_long_as_declared(opened):
    """The longest held-out row of a text has all of its tokens except the first."""
    name, examples, _ = opened
    assert (examples.longest is not None) == (name in ("text", "masked"))
    if examples.longest is not None:
        assert examples.longest == len(TEXT) - len(TEXT) * 9 // 10 - 1
        [rows] = examples.heldout_batches((1, examples.longest))
        assert rows(0, 1)[0].shape == (1, examples.longest)
        [rows] = examples.heldout_batches((1, examples.longest + 1))
        with pytest.raises(ValueError, match="tokens of held-out text"):
            rows(0, 1)


def test_some_held_out_batches_are_spread_or_the_first_of_an_endless_task(opened):
    name, examples, _ = opened
    shape = (2, 64)
    every = [rows(0, 2) for rows in examples.heldout_batches(shape)]
    assert len(every) == examples.heldout_count(shape) > 4
    some = [rows(0, 2) for rows in examples.heldout_batches(shape, 3)]
    places = [0, 1, 2] if name == "copy" else [n * len(every) // 3 for n in range(3)]
    for found, place in zip(some, places, strict=True):
        for one, other in zip(found, every[place], strict=True):
            np.testing.assert_array_equal(one, other)
