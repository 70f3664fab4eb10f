"""Softmax, symmetric and differential attention obey the laws of score mechanisms."""

import pytest
from score_laws import LAWS, SCORED

FACED = [
    pytest.param(law, SCORED[name], id=f"{law.__name__}-{name}")
    for law, names in LAWS.items()
    for name in names
]


@pytest.mark.parametrize("law, scored", FACED)
def test_laws(law, scored):
    law(scored)
