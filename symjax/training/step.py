"""The pure training and evaluation steps, compiled for one model and one mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from symjax import config
from symjax.layers.attention import Constant
from symjax.models.decoder import Decoder
from symjax.training import sharding
from symjax.training.guard import Guarded
from symjax.training.optimizer import optimizer, schedule


class State(NamedTuple):
    """All that training changes: nested dicts of arrays, or of what stands for them."""

    step: Any  # int32 scalar: steps taken
    params: Any
    optimizer: Any


class Program(NamedTuple):
    """One run's compiled functions; call them under `jax.set_mesh(program.mesh)`.

    initial(seed) → (State, constants)
    train(state, constants, inputs, targets, key) → (State, metrics); state is donated
    calibrate(params, constants, inputs) → constants that fit these inputs
    evaluate(params, constants, inputs, targets, weights, key) → (Σ w·loss, Σ w);
        a key turns dropout on, None is evaluation
    """

    graph: nnx.GraphDef
    mesh: Mesh
    state: State  # abstract, with shardings
    constants: dict[str, Any]  # abstract, with shardings
    initial: Callable
    train: Callable
    calibrate: Callable
    evaluate: Callable

    def lower(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        """The training step for batches of `shape`, from abstract arrays alone."""
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with jax.set_mesh(self.mesh):
            return self.train.lower(self.state, self.constants, tokens, tokens, key)

    def place(self, shape: tuple[int, int], rows: Callable) -> list[Array]:
        """Batch arrays of `shape` over the mesh; rows(start, stop) gives a part."""
        layout = NamedSharding(self.mesh, sharding.BATCH)
        parts: dict[tuple[int, int], list[np.ndarray]] = {}
        indices: Any = layout.addressable_devices_indices_map(shape).values()
        for index in indices:
            start, stop, _ = index[0].indices(shape[0])
            if (start, stop) not in parts:
                parts[start, stop] = list(rows(start, stop))

        def array(number: int) -> Array:
            def piece(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(shape[0])
                return parts[start, stop][number][:, index[1]]

            return jax.make_array_from_callback(shape, layout, piece)

        return [array(i) for i in range(len(next(iter(parts.values()))))]


def compile_program(options: config.Config, mesh: Mesh) -> Program:
    """The steps of a configuration over a mesh; nothing is compiled before its use.

    Raises:
        ValueError: sizes that exclude each other or do not divide over the mesh.
    """
    sharding.check_batch(options, mesh)

    def build(seed: Array) -> tuple[Decoder, dict, dict]:
        model = Decoder(options.model, rngs=nnx.Rngs(jax.random.key(seed)))
        return model, *_parts(model)

    model = nnx.eval_shape(
        lambda: Decoder(options.model, rngs=nnx.Rngs(jax.random.key(0)))
    )
    graph = nnx.graphdef(model)
    params, constants = _parts(model)
    transform = optimizer(options.optimizer, options.steps, params)
    rate = schedule(options.optimizer, options.steps)
    shardings = sharding.weight_shardings(params, mesh)
    state_shardings = State(
        NamedSharding(mesh, P()),
        shardings,
        sharding.optimizer_shardings(transform, params, shardings, mesh),
    )
    constant_shardings = sharding.weight_shardings(constants, mesh)

    def initial(seed: Array) -> tuple[State, dict]:
        _, params, constants = build(seed)
        step = jnp.zeros((), jnp.int32)
        return State(step, params, transform.init(params)), constants

    def loss(params, constants, inputs, targets, key) -> tuple[Array, Array]:
        """What is minimised, and the part of it that is reported."""
        model = nnx.merge(graph, params, constants)
        scores = model(inputs, dropout_key=key)
        ponder = jax.tree.leaves(nnx.pop(model, nnx.Intermediate))  # of universal ones
        costs = sum(options.model.ponder * cost.mean() for cost in ponder)
        asked = jnp.maximum((targets >= 0).sum(), 1)
        predicted = cross_entropy(scores, targets).sum() / asked
        return predicted + costs, predicted

    def train(state: State, constants, inputs, targets, key):
        key = jax.random.fold_in(key, state.step)
        (_, value), gradient = _accumulated(
            jax.value_and_grad(loss, has_aux=True), options.optimizer.accumulate
        )(state.params, constants, inputs, targets, key)
        updates, guard = transform.update(gradient, state.optimizer, state.params)
        metrics = {
            "train/loss": value,
            "gradient_norm": optax.tree.norm(gradient),
            "skipped_steps": cast(Guarded, guard).skipped,
            "learning_rate": jnp.asarray(rate(state.step), jnp.float32),
        }
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, guard), metrics

    def calibrate(params, constants, inputs) -> dict:
        model = nnx.merge(graph, params, constants)
        model.calibrate(inputs)
        return _parts(model)[1]

    def evaluate(params, constants, inputs, targets, weights, key):
        scores = nnx.merge(graph, params, constants)(inputs, dropout_key=key)
        losses = weights * cross_entropy(scores, targets)
        return losses.sum(), weights.sum()

    batch = NamedSharding(mesh, sharding.BATCH)
    return Program(
        graph=graph,
        mesh=mesh,
        state=_abstract(jax.eval_shape(initial, 0)[0], state_shardings),
        constants=_abstract(constants, constant_shardings),
        initial=jax.jit(initial, out_shardings=(state_shardings, constant_shardings)),
        train=jax.jit(
            train,
            in_shardings=(state_shardings, constant_shardings, batch, batch, None),
            out_shardings=(state_shardings, None),
            donate_argnums=0,
        ),
        calibrate=jax.jit(
            calibrate,
            in_shardings=(shardings, constant_shardings, batch),
            out_shardings=constant_shardings,
        ),
        evaluate=jax.jit(
            evaluate,
            in_shardings=(shardings, constant_shardings, batch, batch, batch, None),
        ),
    )


def cross_entropy(
    scores: Float[Array, "B T vocabulary"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """−log softmax(scores)[target], in nats; 0 for a target below 0, which is none."""
    asked = targets >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
        scores, jnp.where(asked, targets, 0)
    )
    return jnp.where(asked, losses, 0)


def _parts(model: Decoder) -> tuple[dict, dict]:
    """(weights, constants) of a model as nested dicts."""
    return (
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        nnx.to_pure_dict(nnx.state(model, Constant)),
    )


def _accumulated(value_and_grad: Callable, count: int) -> Callable:
    """Mean values and gradient over `count` micro-batches, one at a time."""
    if count == 1:
        return value_and_grad

    def accumulate(params, constants, inputs, targets, key):
        def split(x: Array) -> Array:  # every device keeps a part of each micro-batch
            return jnp.swapaxes(x.reshape(-1, count, x.shape[1]), 0, 1)

        def add(total, part):
            index, inputs, targets = part
            here = jax.random.fold_in(key, index)
            found = value_and_grad(params, constants, inputs, targets, here)
            return jax.tree.map(jnp.add, total, found), None

        zero = jax.tree.map(jnp.zeros_like, ((jnp.zeros(()),) * 2, params))
        parts = (jnp.arange(count), split(inputs), split(targets))
        total, _ = jax.lax.scan(add, zero, parts)
        return jax.tree.map(lambda x: x / count, total)

    return accumulate


def _abstract(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        tree,
        shardings,
    )
