"""Feed-forward sizes that give models the baseline's parameters or FLOPs per token."""

from dataclasses import replace

import pytest

from symjax import config
from symjax.programs.comparison import matched
from symjax.programs.comparison.matched import amount_of, match_model

MODEL = config.Model(vocabulary=65, width=48, depth=3, heads=4, length=40)
PAIRWISE = replace(MODEL, attention=config.Attention(symmetric="pairwise"))
DIFF = replace(MODEL, attention=config.Attention(differential="v1"))


def sized(model, size):
    return replace(model, feedforward=size)


def test_parameters_are_those_of_the_blocks_counted_by_hand():
    """One more hidden feature has a row of both weights and a bias, in each block."""
    more = amount_of(sized(MODEL, 101), "parameters")
    fewer = amount_of(sized(MODEL, 100), "parameters")
    assert more - fewer == MODEL.depth * (2 * MODEL.width + 1)
    flops = [amount_of(sized(MODEL, n), "flops") for n in (101, 100)]
    assert flops[0] - flops[1] == 2 * (more - fewer)


@pytest.mark.parametrize("measure", matched.MEASURES)
@pytest.mark.parametrize("model", [PAIRWISE, DIFF], ids=["pairwise", "differential"])
def test_a_match_is_within_one_percent_at_the_roundest_size(model, measure):
    wanted = amount_of(MODEL, measure)
    found = match_model("a", model, measure, wanted)
    assert found.before == 4 * model.width and found.wanted == wanted
    assert found.amount == amount_of(sized(model, found.feedforward), measure)
    assert abs(found.amount / wanted - 1) <= 0.01
    step = 2 * (found.feedforward & -found.feedforward)  # the next rounder sizes
    for size in (found.feedforward - step // 2, found.feedforward + step // 2):
        if 0 < size and step <= matched.STEPS[0]:
            assert abs(amount_of(sized(model, size), measure) / wanted - 1) > 0.01
    kept = replace(sized(model, found.feedforward), feedforward=0)
    assert kept == model


def test_a_size_that_no_multiple_meets_is_the_closest_one():
    """17 hidden features in a wide and shallow model: one is 2.4 % of the weights."""
    model = config.Model(vocabulary=3, width=16, depth=1, heads=1, length=8, bias=False)
    wanted = amount_of(sized(model, 17), "parameters")
    assert match_model("a", model, "parameters", wanted).feedforward == 17


@pytest.mark.parametrize(
    ("model", "share", "said"),
    [
        (MODEL, 0.2, "--match parameters: no size is close enough: a: model.feedforw"),
        (
            replace(MODEL, attention=config.Attention(mechanism="gau")),
            1.0,
            "--match sets model.feedforward: a: ",
        ),
    ],
    ids=["attention alone is larger", "no feed-forward"],
)
def test_what_cannot_be_matched_is_refused(model, share, said):
    wanted = share * amount_of(MODEL, "parameters")
    with pytest.raises(ValueError, match=said) as caught:
        match_model("a", model, "parameters", wanted)
    assert "\n" not in str(caught.value)
