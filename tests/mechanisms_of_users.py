"""Files of users that add to the tables, and how to remove their entries again."""

import contextlib

from symjax import imports
from symjax.attention.mechanisms import BUILT_IN, TABLES
from symjax.imports import running
from symjax.layers.parts.table import PARTS

SOFTCAP = '''\
"""Softmax of capped scores, cap · tanh(score / cap)."""

import jax
import jax.numpy as jnp

from symjax.attention import Option, ScoreMechanism, mechanisms


def softcap_weights(scores, visible, cap):
    weights = jax.nn.softmax(cap * jnp.tanh(scores / cap), axis=-1, where=visible)
    return weights if visible is None else jnp.where(visible, weights, 0)


softcap = ScoreMechanism(
    "softcap",
    softcap_weights,
    "Softmax of capped scores.",
    own={"cap": Option(30.0, "no score is larger", least=0.1)},
)
mechanisms.MECHANISMS["softcap"] = mechanisms.SCORED._replace(attend=softcap)
'''
SOFTPLUS = '''\
"""A feature map for linear attention."""

import jax

from symjax.attention.features import PLAIN, plain

PLAIN["softplus"] = plain(jax.nn.softplus)
'''
LEAKY = '''\
"""A recurrence with a gate a head, which forgets over `shortest` tokens or more."""

import jax
import jax.numpy as jnp

from symjax.attention import Option, decay_causal, decay_state, decay_step
from symjax.attention.gated_linear import LOG_DECAYS, LogDecay
from symjax.attention.mechanisms import MECHANISMS
from symjax.layers.parts.decays import DECAY
from symjax.layers.parts.table import PARTS

LOG_DECAYS["sigmoid"] = LogDecay(gate=jax.nn.log_sigmoid, per="head")


def bounded(log_decay, shortest):
    return jnp.maximum(log_decay, -1 / shortest)


def leaky_causal(query, key, value, log_decay, mask=None, *, shortest=4.0, **options):
    log_decay = bounded(log_decay, shortest)
    return decay_causal(query, key, value, log_decay, mask, **options)


def leaky_step(state, query, key, value, log_decay, *, shortest=4.0):
    return decay_step(state, query, key, value, bounded(log_decay, shortest))


def leaky_state(*sizes, dtype, shortest=4.0):
    return decay_state(*sizes, dtype=dtype)


MECHANISMS["leaky"] = MECHANISMS["decay"]._replace(
    attend=leaky_causal,
    causal=leaky_causal,
    step=leaky_step,
    state=leaky_state,
    own={"shortest": Option(4.0, "tokens that a memory lasts at least", least=1)},
)
PARTS["leaky"] = DECAY
'''
# File name → (text of the file, keys of model.attention that use it).
USED = {
    "softcap": (SOFTCAP, {"mechanism": "softcap", "options.cap": 20}),
    "softplus": (SOFTPLUS, {"mechanism": "linear", "features": "softplus"}),
    "leaky": (LEAKY, {"mechanism": "leaky", "decay": "sigmoid", "options.shortest": 3}),
}
PARTS_OF_SYMJAX = frozenset(PARTS)
OTHERS = {"symmetric": "none", "differential": "none"}


@contextlib.contextmanager
def forgotten():
    """Inside, the tables are as in a new process; afterwards they are as before."""
    tables = [(kind, table) for kind, some in TABLES.items() for table in some]
    before = [(table, dict(table)) for _, table in tables]
    for kind, table in tables:
        for name in {*table} - BUILT_IN[kind]:
            del table[name]
    own_parts = {name: PARTS.pop(name) for name in {*PARTS} - PARTS_OF_SYMJAX}
    ran = dict(running.ran)
    running.ran.clear()
    imports.load_installed.cache_clear()
    try:
        yield
    finally:
        running.ran.clear()
        running.ran.update(ran)
        imports.load_installed.cache_clear()
        for name in {*PARTS} - PARTS_OF_SYMJAX:
            del PARTS[name]
        PARTS.update(own_parts)
        for table, content in before:
            table.clear()
            table.update(content)
