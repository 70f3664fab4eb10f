"""The optimizer: clipping, weight decay, refusals, and sharding of moments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from symjax import config
from symjax.models.build import build
from symjax.training.optimizer import (
    average_of,
    averaged,
    optimizer,
    weight_decay_mask,
)

NAMES = ("adamw", "adam", "lion", "sgd", "muon")


def options(**changes) -> config.Optimizer:
    constant = {"schedule": "constant_schedule", "learning_rate": 0.1}
    return dataclasses.replace(config.Optimizer(), **(constant | changes))


@pytest.fixture
def params():
    return {
        "embed": jnp.ones((7, 3)),
        "blocks": {
            "0": {
                "query": {"kernel": jnp.ones((3, 5)), "bias": jnp.ones(5)},
                "norm": {"scale": jnp.ones(3)},
                "metric": jnp.ones((2, 5, 5)),
                "lambda_key_1": jnp.ones(5),
            }
        },
    }


def step(transform, params, gradient):
    updates, _ = transform.update(gradient, transform.init(params), params)
    return optax.apply_updates(params, updates)


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


def test_the_choices_tested_here_are_those_of_the_configuration():
    [name] = [x for x in dataclasses.fields(config.Optimizer) if x.name == "name"]
    assert set(name.metadata["choices"]) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gradient_matrices_shrink_and_nothing_else_moves(name, params):
    transform = optimizer(options(name=name, weight_decay=0.5), 10, params)
    after = step(transform, params, zeros(params))
    block = after["blocks"]["0"]
    for matrix in (after["embed"], block["query"]["kernel"], block["metric"]):
        assert jnp.all(matrix < 1)
    for vector in (
        block["query"]["bias"],
        block["norm"]["scale"],
        block["lambda_key_1"],
    ):
        np.testing.assert_array_equal(vector, 1)


def test_decoupled_decay_is_the_rate_times_the_decay(params):
    after = step(
        optimizer(options(weight_decay=0.5), 10, params), params, zeros(params)
    )
    np.testing.assert_allclose(after["embed"], 1 - 0.1 * 0.5, rtol=1e-6)


def test_vectors_of_a_stack_of_layers_do_not_decay():
    stack = {
        "lambda_query_1": jnp.ones((3, 5)),
        "attention_norm": {"scale": jnp.ones((3, 5))},
        "up": {"bias": jnp.ones((3, 5)), "kernel": jnp.ones((3, 5, 4))},
    }
    assert weight_decay_mask(stack) == {
        "lambda_query_1": False,
        "attention_norm": {"scale": False},
        "up": {"bias": False, "kernel": True},
    }


def test_the_norm_of_the_whole_gradient_is_clipped(params):
    plain = {"name": "sgd", "betas": (0.0, 0.0), "weight_decay": 0.0}
    gradient = jax.tree.map(lambda leaf: 100 * leaf, params)
    after = step(optimizer(options(**plain, clip=2.0), 10, params), params, gradient)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, params, after))
    np.testing.assert_allclose(moved, 0.1 * 2.0, rtol=1e-5)
    after = step(optimizer(options(**plain, clip=0.0), 10, params), params, gradient)
    np.testing.assert_allclose(after["embed"], 1 - 0.1 * 100, rtol=1e-5)


def test_sgd_takes_its_momentum_from_the_first_beta(params):
    transform = optimizer(
        options(name="sgd", betas=(0.5, 0.0), weight_decay=0.0, clip=0.0), 10, params
    )
    ones, state = jax.tree.map(jnp.ones_like, params), transform.init(params)
    _, state = transform.update(ones, state, params)
    updates, _ = transform.update(ones, state, params)
    np.testing.assert_allclose(updates["embed"], -0.1 * 1.5, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "muon"])
def test_moments_have_the_paths_and_shapes_of_the_weights(name, params):
    state = optimizer(options(name=name), 10, params).init(params)
    wanted = jax.tree_util.tree_flatten_with_path(params)[0]
    paths = {jax.tree_util.keystr(path): leaf.shape for path, leaf in wanted}
    moments = {"mu"} if name in ("lion", "muon") else {"mu", "nu"}
    found: dict[str, dict] = {moment: {} for moment in moments}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name_of_path = jax.tree_util.keystr(path)
        for moment in moments:
            if f".{moment}" in name_of_path:
                rest = name_of_path.split(f".{moment}")[1]
                found[moment][rest] = leaf.shape
    assert all(found[moment] == paths for moment in moments)


def test_muon_moves_kernels_of_blocks_by_an_orthogonal_matrix(params):
    """Its steps have the size of those of AdamW, which moves all other weights."""
    rng = np.random.default_rng(2)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    both = [
        step(
            optimizer(options(name=name, weight_decay=0.1), 9, params), params, gradient
        )
        for name in ("muon", "adamw")
    ]
    kernels = [x["blocks"]["0"]["query"].pop("kernel") for x in both]
    jax.tree.map(np.testing.assert_array_equal, *both)
    moved = (1 - 0.1 * 0.1 - kernels[0]) / (0.1 * 0.2 * 5**0.5)
    sizes = np.linalg.svd(moved, compute_uv=False)
    assert np.all((0.6 < sizes) & (sizes < 1.3))  # what five Newton-Schulz steps give


def test_muon_leaves_kernels_of_one_row_or_column_to_adamw():
    shapes = config.Model(kind="universal", vocabulary=7, width=6, depth=2, heads=2)
    params = nnx.to_pure_dict(nnx.state(build(shapes, rngs=nnx.Rngs(0)), nnx.Param))
    rng = np.random.default_rng(2)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    muon, adamw = (
        step(optimizer(options(name=name), 10, params), params, gradient)
        for name in ("muon", "adamw")
    )
    one, other = muon["blocks"][0], adamw["blocks"][0]
    assert one["halting"]["kernel"].shape == (6, 1)
    jax.tree.map(np.testing.assert_array_equal, one["halting"], other["halting"])
    kernels = (x["block"]["feedforward"]["up"]["kernel"] for x in (one, other))
    assert np.abs(np.subtract(*kernels)).max() > 0.01


@pytest.fixture
def decoder():
    """Return the weights of a decoder with a separate output layer."""
    shapes = config.Model(vocabulary=7, width=6, depth=1, heads=2, length=5)
    params = nnx.to_pure_dict(nnx.state(build(shapes, rngs=nnx.Rngs(0)), nnx.Param))
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.5), params)


EMBEDDINGS = ("embedding", "positions", "head")


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_have_a_rate_of_their_own(name, decoder):
    """Compares step 2, which has moments of step 1."""
    rng = np.random.default_rng(2)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), decoder)
    moved = []
    for factor in (1.0, 3.0):
        chosen = options(name=name, embedding_learning_rate=factor)
        transform = optimizer(chosen, 10, decoder)
        _, state = transform.update(gradient, transform.init(decoder), decoder)
        moved.append(transform.update(gradient, state, decoder)[0])
    plain, own = moved
    for part in EMBEDDINGS:
        one, other = plain.pop(part), own.pop(part)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(3 * x, y, rtol=1e-5), one, other
        )
    jax.tree.map(np.testing.assert_array_equal, plain, own)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("own", "stays"), [(0.0, True), (0.3, False), (-1.0, False)])
def test_embeddings_have_a_decay_of_their_own(name, own, stays, decoder):
    chosen = options(name=name, weight_decay=0.5, embedding_weight_decay=own, clip=0.0)
    after = step(optimizer(chosen, 10, decoder), decoder, zeros(decoder))
    tables = after["embedding"]["embedding"], after["positions"], after["head"]
    for table in (*tables[:2], tables[2].pop("kernel")):
        assert jnp.all((table == 0.5) == stays)
        if name in ("adamw", "lion", "muon", "sgd") and not stays:
            decay = 0.5 if own == -1 else own
            np.testing.assert_allclose(table, 0.5 * (1 - 0.1 * decay), rtol=1e-6)
    np.testing.assert_array_equal(after["head"]["bias"], 0.5)
    assert jnp.all(after["blocks"][0]["feedforward"]["up"]["kernel"] < 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_lowers_the_loss(name, params):
    transform = optimizer(options(name=name, learning_rate=0.01), 30, params)

    def loss(params):
        return sum(jnp.sum((leaf - 0.5) ** 2) for leaf in jax.tree.leaves(params))

    @jax.jit
    def train(params, state):
        updates, state = transform.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    after, state = params, transform.init(params)
    structure = jax.tree.structure(state)
    for _ in range(20):
        after, state = train(after, state)
    assert loss(after) < loss(params)
    assert jax.tree.structure(state) == structure


def test_the_shapes_alone_decide(params):
    abstract = jax.eval_shape(lambda: params)
    one = step(optimizer(options(), 10, abstract), params, zeros(params))
    other = step(optimizer(options(), 10, params), params, zeros(params))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_mean_of_the_weights_has_nothing_of_the_first_ones():
    """Weights are 0 before step 1 and 1 since; the mean is 1 (0.0952 in older runs)."""
    weights, change = {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
    for corrected, wanted in ((True, 1.0), (False, 1 - 0.999**100)):
        transform = averaged(0.999, corrected=corrected)
        state = transform.init(weights)
        _, state = transform.update(change, state, weights)
        for _ in range(99):
            none = jax.tree.map(jnp.zeros_like, change)
            _, state = transform.update(none, state, change)
        np.testing.assert_allclose(average_of(state)["w"], wanted, rtol=1e-5)


def test_the_mean_of_the_weights_is_that_of_its_definition():
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(30, 4))
    params = {"embed": jnp.asarray(weights[0])}
    plain = {"name": "sgd", "betas": (0, 0), "clip": 0, "weight_decay": 0}
    transform = optimizer(options(**plain, learning_rate=1, ema=0.8), 30, params)
    state = transform.init(params)
    for target in weights[1:]:
        gradient = {"embed": params["embed"] - target}
        updates, state = transform.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    shares = 0.8 ** np.arange(len(weights) - 1)[::-1]
    wanted = (shares[:, None] * weights[1:]).sum(0) / shares.sum()
    np.testing.assert_allclose(average_of(state)["embed"], wanted, rtol=1e-5, atol=1e-6)


def test_a_skipped_step_is_no_part_of_the_mean_of_the_weights(params):
    transform = optimizer(options(name="sgd", ema=0.9), 30, params)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    _, state = transform.update(bad, transform.init(params), params)
    good = jax.tree.map(jnp.ones_like, params)
    updates, state = transform.update(good, state, params)
    wanted = optax.apply_updates(params, updates)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
        average_of(state),
        wanted,
    )


def test_a_whole_number_is_a_float_where_a_key_is_one(params):
    chosen = config.Optimizer(clip=0, betas=(0, 0.9), weight_decay=1, learning_rate=1)
    optimizer(chosen, 10, params)
    assert chosen == config.Optimizer(
        clip=0.0, betas=(0.0, 0.9), weight_decay=1.0, learning_rate=1.0
    )
    for group in (config.Model, config.Attention, config.Optimizer, config.Data):
        for field in dataclasses.fields(group):
            if field.type == "float":
                made = group(**{field.name: 1})
                assert type(getattr(made, field.name)) is float
    with pytest.raises(ValueError, match="optimizer.clip must be float, got True"):
        optimizer(config.Optimizer(clip=True), 10, params)


def layer_of(**changes):
    """Return the weights of a decoder with one block, all 0.5."""
    shapes = config.Model(vocabulary=7, width=8, depth=1, heads=2, length=5)
    chosen = dataclasses.replace(shapes.attention, **changes)
    model = build(dataclasses.replace(shapes, attention=chosen), rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.5), params)


@pytest.mark.always
@pytest.mark.parametrize(
    ("name", "differential", "version"),
    [*((name, "v2", 2) for name in NAMES), ("muon", "v2", 1), ("muon", "v1", 2)],
)
def test_no_optimizer_shrinks_a_lambda(name, differential, version):
    params = layer_of(differential=differential)
    chosen = options(name=name, learning_rate=1.0, clip=0.0, version=version)
    after = step(optimizer(chosen, 10, params), params, zeros(params))
    layer = after["blocks"][0]["attention"]
    found = {x: y for x, y in layer.items() if x.startswith("lambda")}
    assert found
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0.5), found)
    assert jnp.all(layer["value"]["kernel"] < 0.5)


def test_muon_leaves_convolutions_over_taps_to_adamw():
    params = layer_of(mechanism="delta", short_convolution=4)
    rng = np.random.default_rng(2)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)

    def layer(name, version=2):
        chosen = options(name=name, version=version)
        after = step(optimizer(chosen, 10, params), params, gradient)
        return after["blocks"][0]["attention"]

    muon, adamw, older = layer("muon"), layer("adamw"), layer("muon", 1)
    names = [x for x in muon if x.endswith("_convolution")]
    assert len(names) == 3
    for each in names:
        jax.tree.map(np.testing.assert_array_equal, muon[each], adamw[each])
        kernels = (x[each]["kernel"] for x in (older, adamw))
        assert np.abs(np.subtract(*kernels)).max() > 0.01


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"learning_rate": -1.0},
            "optimizer.learning_rate must be at least 0, got -1.0",
        ),
        (
            {"learning_rate": float("nan")},
            "optimizer.learning_rate must be at least 0, got nan",
        ),
        (
            {"learning_rate": float("inf")},
            "optimizer.learning_rate must be at most .*, got inf",
        ),
        ({"final": -0.1}, "optimizer.final must be at least 0, got -0.1"),
        ({"warmup": -1.0}, "optimizer.warmup must be at least 0, got -1.0"),
        ({"decay_steps": -5}, "optimizer.decay_steps must be at least 0, got -5"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay must be at least 0, got -0.1"),
        (
            {"embedding_learning_rate": -1.0},
            "optimizer.embedding_learning_rate must be at least 0, got -1.0",
        ),
        (
            {"embedding_weight_decay": -2.0},
            "optimizer.embedding_weight_decay must be at least -1, got -2.0",
        ),
        (
            {"embedding_weight_decay": -0.1},
            "optimizer.embedding_weight_decay -0.1 must be at least 0, or -1: as",
        ),
        ({"clip": -1.0}, "optimizer.clip must be at least 0, got -1.0"),
        ({"eps": 0.0}, "optimizer.eps 0.0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, "optimizer.betas"),
        ({"betas": (0.9,)}, "optimizer.betas"),
        ({"betas": ("0.9", 0.9)}, "optimizer.betas"),
        ({"version": 3}, "optimizer.version must be at most 2, got 3"),
        ({"name": "adamx"}, "optimizer.name 'adamx' is unknown: choose from adamw"),
        ({"schedule": "cosine"}, "optimizer.schedule 'cosine' is unknown: choose from"),
        (
            {"schedule": "warmup_cosine_decay_schedule", "warmup": 500.0},
            "optimizer.warmup 500 must be less than the 100 steps",
        ),
        ({"cooldown": -1.0}, "optimizer.cooldown must be at least 0, got -1.0"),
        ({"schedule": "wsd"}, "warmup 0.05 is a share .* for instance 5"),
        (
            {"schedule": "wsd", "warmup": 90.0},
            "optimizer.warmup 90 and optimizer.cooldown 20 must not .* the 100 steps",
        ),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(change, message, params):
    with pytest.raises(ValueError, match=message):
        optimizer(options(**change), 100, params)


def test_a_run_of_no_steps_is_refused(params):
    with pytest.raises(ValueError, match="steps 0"):
        optimizer(options(), 0, params)
