"""Files of users that add to the tables, and how to forget them again."""

import contextlib

from symjax import imports
from symjax.attention.tables import BUILT_IN, TABLES

SOFTCAP = '''\
"""Softmax of capped scores, cap · tanh(score / cap)."""

import jax
import jax.numpy as jnp

from symjax.attention import mechanisms
from symjax.attention.scores import ScoreMechanism

CAP = 30.0


def softcap_weights(scores, visible):
    scores = CAP * jnp.tanh(scores / CAP)
    if visible is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(scores, axis=-1, where=visible)
    return jnp.where(visible, weights, 0)


softcap = ScoreMechanism("softcap", softcap_weights, "Softmax of capped scores.")
mechanisms.MECHANISMS["softcap"] = mechanisms.SCORED._replace(attend=softcap)
'''


@contextlib.contextmanager
def forgotten():
    """Inside, the tables are as in a new process; afterwards as before."""
    tables = [(kind, table) for kind, some in TABLES.items() for table in some]
    before = [(table, dict(table)) for _, table in tables]
    for kind, table in tables:
        for name in {*table} - BUILT_IN[kind]:
            del table[name]
    ran = dict(imports._ran)
    imports._ran.clear()
    imports.load_installed.cache_clear()
    try:
        yield
    finally:
        imports._ran.clear()
        imports._ran.update(ran)
        imports.load_installed.cache_clear()
        for table, content in before:
            table.clear()
            table.update(content)
