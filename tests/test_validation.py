"""Comparison of the configurations of two runs."""

import copy

from symjax import config
from symjax.validation import differences, from_dict, to_dict

TREE = to_dict(config.Config())


def test_only_what_changes_no_function_may_differ_in_the_model():
    other = copy.deepcopy(TREE)
    other["model"].update(remat="full", scan_layers=True)
    other["model"]["attention"]["implementation"] = "fused"
    other["steps"] = 7
    assert differences(*map(from_dict, (TREE, other))) == {}
    other["model"]["width"] = 8
    assert [*differences(*map(from_dict, (TREE, other))).values()] == [
        "model.width: 256 → 8"
    ]


def test_what_older_checkpoints_call_remat_is_read():
    for old, new in ((False, "none"), (True, "full")):
        older = copy.deepcopy(TREE)
        older["model"]["remat"] = old
        assert from_dict(older).model.remat == new
