"""A row gives what its documents give by themselves, in every mechanism."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from flax import nnx

from symjax import attention, config, validation
from symjax.config import is_causal
from symjax.layers.segments import segments_of
from symjax.models import build, transformer
from symjax.training.loss import losses
from symjax.training.sharding import make_mesh

LENGTHS = 5, 1, 10, 8  # of the documents of a row
GROUPS = 8, 8, 4, 4  # lengths for flash: multiples of its groups of 4
CHUNKED = [n for n, m in attention.MECHANISMS.items() if m.state and n != "gau"]
CONFIGS = sorted(path.stem for path in (runs.ROOT / "configs").glob("*.py"))


def model_of(name, **more):
    """Return a small model of a configuration, in float64."""
    made = importlib.import_module(f"configs.{name}").get_config("tiny")
    made.model.update(width=16, depth=2, heads=2, length=24, vocabulary=11, dropout=0.0)
    if made.model.attention.signals > 1:
        made.model.attention.signals = 2  # a divisor of the heads
    if any(x in CHUNKED for x in (made.model.attention.mechanism, *made.model.pattern)):
        made.model.attention.chunk_size = 4
    made.model.update(more)
    options = validation.from_dict(made.to_dict()).model
    return config.Model(**(vars(options) | {"dtype": "float64"}))


def causal(name):
    if name == "base":
        return False
    made = importlib.import_module(f"configs.{name}").get_config("tiny")
    return is_causal(validation.from_dict(made.to_dict()).model)


NAMES = [name for name in CONFIGS if causal(name)]


def drawn(options):
    model = build(options, rngs=nnx.Rngs(3))
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x,
        nnx.state(model),
    )
    nnx.update(model, wide)
    return model


def rows(lengths):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    tokens = np.random.default_rng(0).integers(0, 11, (2, sum(lengths)))
    return tokens, np.stack([ids, 7 - ids])  # ids need not grow


def losses_of(scores, tokens):
    """Return the losses of every token but the last."""
    found = losses(jnp.asarray(scores)[:, :-1], jnp.asarray(tokens[:, 1:]))
    return np.asarray(found.loss)


def scores_of(model, tokens, ids=None):
    graph, weights = nnx.split(model)

    @jax.jit
    def run(weights, tokens, ids):
        return nnx.merge(graph, weights)(tokens, segment_ids=ids)

    return np.asarray(run(weights, jnp.asarray(tokens), ids))


def alone(model, tokens, lengths):
    """Return the losses of each document by itself; NaN where the next one begins.

    Documents are padded to one length: a causal model does not see what follows.
    """
    parts = np.split(tokens, np.cumsum(lengths)[:-1], axis=1)
    filled = [np.pad(x, ((0, 0), (0, max(lengths) - x.shape[1]))) for x in parts]
    scores = np.split(scores_of(model, np.concatenate(filled)), len(parts))
    found, last = [], np.full((len(tokens), 1), np.nan)
    for part, scored in zip(parts, scores, strict=True):
        found += [losses_of(scored[:, : part.shape[1]], part), last]
    return np.concatenate(found[:-1], axis=1)


def check(model, lengths, mesh=None):
    """Compare the losses of a row with those of its documents, on one device and a
    mesh."""
    tokens, ids = rows(lengths)
    wanted = alone(model, tokens, lengths)
    there = ~np.isnan(wanted)
    found = [scores_of(model, tokens, jnp.asarray(ids))]
    if mesh is not None:
        with jax.set_mesh(make_mesh(mesh)):
            found.append(scores_of(model, tokens, jnp.asarray(ids)))
    for scores in found:
        loss = losses_of(scores, tokens)
        np.testing.assert_allclose(loss[there], wanted[there], atol=1e-9, rtol=0)
    return np.abs(losses_of(scores_of(model, tokens), tokens) - wanted)[there].max()


@pytest.fixture
def wide(x64, monkeypatch):
    """Let models compute in float64, which no configuration can ask for."""
    monkeypatch.setattr(transformer, "check", lambda options: None)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_losses_of_its_documents(name, wide):
    lengths = GROUPS if name == "flash" else LENGTHS
    mesh = config.Mesh(data=1, sequence=2)
    assert check(drawn(model_of(name)), lengths, mesh) > 1e-6, "nothing kept apart"


@pytest.mark.parametrize(
    "more",
    [
        {"positions": "learned"},
        {"positions": "sinusoidal"},
        {"positions": "alibi"},
        {"scan_layers": True, "remat": "full"},
        {"attention.short_convolution": 3},
        {"attention.window": 3, "attention.mask_self": True},
        {"attention.length_base": 4},
        {"attention.forget": "fox", "attention.sink": True},
    ],
    ids=lambda more: ",".join(more),
)
def test_every_option_keeps_documents_apart(more, wide):
    plain = {key: x for key, x in more.items() if "." not in key}
    options = model_of("diff_sym", **plain)
    inner = {key.partition(".")[2]: x for key, x in more.items() if "." in key}
    inner = config.Attention(**(vars(options.attention) | inner))
    model = drawn(config.Model(**(vars(options) | {"attention": inner})))
    check(model, LENGTHS)


def test_positions_start_anew_with_every_run():
    ids = jnp.asarray([[4, 4, 1, 1, 1, 4], [0, 0, 0, 0, 0, 0]])
    found = segments_of(ids).positions.tolist()
    assert found == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
