"""The pure training and evaluation steps, compiled for one model and one mesh."""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from symjax import config
from symjax.data.documents import SegmentedTokens
from symjax.models.build import abstract, build, parts
from symjax.training import sharding
from symjax.training.loss import hidden_of, objective, target_count, token_losses
from symjax.training.optimizer import Guarded, Stacks, optimizer, schedule

_CONFIG = threading.Lock()  # of what jax's configuration is changed for a while


class State(NamedTuple):
    """All that training changes: nested dicts of arrays, or of what stands for them."""

    step: Any  # int32 scalar: steps taken
    params: Any
    optimizer: Any


class Program(NamedTuple):
    """One run's compiled functions; call them under `jax.set_mesh(program.mesh)`.

    initial(seed) → (State, constants)
    train(state, constants, inputs, targets, key) → (State, metrics); state is donated
    evaluate(params, constants, inputs, targets, weights, key) → (Σ w·loss, Σ w,
        Σ w·right); a key turns dropout on, None is evaluation
    """

    model: config.Model
    graph: nnx.GraphDef
    mesh: Mesh
    state: State  # abstract, with shardings
    constants: dict[str, Any]  # abstract, with shardings
    initial: Callable
    train: Callable
    evaluate: Callable
    separate: bool = False  # inputs say which document each token is of

    def lower(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        """The training step for batches of `shape`, from abstract arrays alone."""
        inputs, targets = batch_like(self.model, shape)
        if self.separate:
            inputs = SegmentedTokens(inputs, inputs)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with jax.set_mesh(self.mesh):
            return self.train.lower(self.state, self.constants, inputs, targets, key)

    def place(self, shape: tuple[int, int], rows: Callable) -> list[Any]:
        """The arrays of a batch over the mesh; rows(start, stop) gives a part of them.

        Args:
            shape: rows, and the tokens of a row.
        """
        found = functools.cache(lambda start, stop: tuple(rows(start, stop)))
        parts, structure = jax.tree.flatten(found(*self._a_part(shape)))

        def array(number: int) -> Array:
            whole = (shape[0], *parts[number].shape[1:])

            def piece(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(shape[0])
                part = jax.tree.leaves(found(start, stop))[number]
                return part[(slice(None), *index[1:])]

            layout = NamedSharding(self.mesh, _axes(whole, shape))
            return jax.make_array_from_callback(whole, layout, piece)

        return list(structure.unflatten(map(array, range(len(parts)))))

    def _a_part(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The rows (start, stop) of some device of this process."""
        layout = NamedSharding(self.mesh, sharding.ROWS)
        index: Any = next(iter(layout.addressable_devices_indices_map(shape).values()))
        return index[0].indices(shape[0])[:2]


class Steps(NamedTuple):
    """The pure functions of `Program`, before they are compiled for a mesh."""

    options: config.Config
    graph: nnx.GraphDef
    transform: optax.GradientTransformation  # of weights in stacks
    stacks: Stacks

    def initial(self, seed: Array) -> tuple[State, dict]:
        rngs = nnx.Rngs(jax.random.key(seed))
        params, constants = parts(build(self.options.model, rngs=rngs))
        moments = self.stacks.split(self.transform.init(self.stacks.stack(params)))
        return State(jnp.zeros((), jnp.int32), params, moments), constants

    def loss(
        self, params, constants, inputs, targets, key, count
    ) -> tuple[Array, Array]:
        """Return what a micro-batch adds to the batch: (minimised, reported loss).

        Losses and z-losses are sums over targets, divided by those of the batch; ponder
        costs are sums over tokens, with a target or without, divided by all tokens of
        the batch.

        Args:
            count: the targets of the whole batch.
        """
        model = nnx.merge(self.graph, params, constants)
        hidden = hidden_of(model, inputs, key)
        ponder = jax.tree.leaves(nnx.pop(model, nnx.Intermediate))  # of universal ones
        chosen, weight = self.options.optimizer, self.options.model.ponder
        # Micro-batches have equally many tokens.
        costs = sum(weight * x.sum() / (x.size * chosen.accumulate) for x in ponder)
        found = objective(model, hidden, targets, chosen.z_loss, count)
        return found.minimised + costs, found.loss

    def train(self, state: State, constants, inputs, targets, key):
        chosen = self.options.optimizer
        key = jax.random.fold_in(key, state.step)
        (_, value), gradient = _accumulated(
            jax.value_and_grad(self.loss, has_aux=True), chosen.accumulate
        )(state.params, constants, inputs, targets, key, target_count(targets))
        # Skipped steps do not move the schedule of the optimizer.
        rate = schedule(chosen, self.options.steps)(state.optimizer.taken)
        gradient, params, moments = map(
            self.stacks.stack, (gradient, state.params, state.optimizer)
        )
        updates, guard = self.transform.update(gradient, moments, params)
        metrics = {
            "train/loss": value,
            "gradient_norm": optax.tree.norm(gradient),
            "skipped_steps": cast(Guarded, guard).skipped,
            "learning_rate": jnp.asarray(rate, jnp.float32),
        }
        changed = optax.apply_updates(params, updates), guard
        return State(state.step + 1, *map(self.stacks.split, changed)), metrics

    def evaluate(self, params, constants, inputs, targets, weights, key):
        model = nnx.merge(self.graph, params, constants)
        hidden = hidden_of(model, inputs, key)
        found = token_losses(model, hidden, targets)
        right = weights * found.right
        return (weights * found.loss).sum(), weights.sum(), right.sum()


def compile_program(
    options: config.Config, mesh: Mesh, *, separate: bool = False
) -> Program:
    """The steps of a configuration over a mesh; nothing is compiled before its use.

    Args:
        separate: inputs are `SegmentedTokens`: see `Examples.separate`.
    Raises:
        ValueError: sizes that exclude each other or do not divide over the mesh.
    """
    sharding.check_batch(options, mesh)
    model = abstract(options.model)
    params, constants = parts(model)
    stacks = Stacks(len(model.blocks), model.period)
    transform = optimizer(options.optimizer, options.steps, stacks.first(params))
    steps = Steps(options, nnx.graphdef(model), transform, stacks)
    initial = jax.eval_shape(steps.initial, 0)[0]

    weights = sharding.weight_shardings(params, mesh)
    fixed = sharding.weight_shardings(constants, mesh)
    moments = sharding.optimizer_shardings(initial.optimizer, weights, mesh)
    state = State(NamedSharding(mesh, P()), weights, moments)
    shape = (options.batch_size, options.model.length)
    inputs, targets = (
        NamedSharding(mesh, _axes(x.shape, shape))
        for x in batch_like(options.model, shape)
    )
    placed = jax.tree.map(
        lambda x, place: x.update(sharding=place), (initial, constants), (state, fixed)
    )
    jit = functools.partial(jax.jit, compiler_options=sharding.compiler_options(mesh))
    initial_state = jit(steps.initial, out_shardings=(state, fixed))
    if mesh.size == 1:
        initial_state = _drawn_by_kernels(initial_state)
    return Program(
        model=options.model,
        graph=steps.graph,
        mesh=mesh,
        state=placed[0],
        constants=placed[1],
        initial=initial_state,
        train=jit(
            steps.train,
            in_shardings=(state, fixed, inputs, targets, None),
            out_shardings=(state, None),
            donate_argnums=0,
        ),
        evaluate=jit(
            steps.evaluate,
            in_shardings=(weights, fixed, inputs, targets, targets, None),
        ),
        separate=separate,
    )


def _drawn_by_kernels(initial: Callable) -> Callable:
    """`initial`, whose random bits come from a kernel of jax on a GPU, the same bits.

    XLA's compiler for GPUs writes the generator out in every draw: 152 s for 24 layers
    of a model of 353M parameters (two cores, no GPU), and 16 s so. Only for one device:
    XLA cannot split the kernel, and each would draw all of every array.
    """
    name = "jax_threefry_gpu_kernel_lowering"

    @functools.wraps(initial)
    def drawn(seed: int) -> tuple[State, dict]:
        with _CONFIG:
            before = getattr(jax.config, name)
            jax.config.update(name, True)
            try:
                return initial(seed)
            finally:
                jax.config.update(name, before)

    return drawn


class Means(NamedTuple):
    """
    Attributes:
        loss: Σ weight · loss / Σ weight over all batches, in nats a token.
        accuracy: the share of targets that have the highest logit, weighed likewise.
    """

    loss: float
    accuracy: float


def means(
    program: Program,
    params: Any,
    constants: Any,
    shape: tuple[int, int],
    batches: Iterable[Callable],
    key: Array | None = None,
) -> Means:
    """The mean loss over batches, and how often the model is right.

    Args:
        shape: (rows, length) of each batch.
        batches: functions that give some of the rows.
        key: turns dropout on; None is evaluation.
    Raises:
        ValueError: no batch has a target.
    """
    total = weight = right = 0.0
    index = -1
    for index, batch in enumerate(batches):
        rows = program.place(shape, batch)
        here = None if key is None else jax.random.fold_in(key, index)
        with jax.set_mesh(program.mesh):
            part = program.evaluate(params, constants, *rows, here)
        total += float(part[0])
        weight += float(part[1])
        right += float(part[2])
    if not weight:
        raise ValueError(f"{index + 1} held-out batch(es) have no target")
    return Means(total / weight, right / weight)


def batch_like(
    model: config.Model, shape: tuple[int, int]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Inputs and targets of a model, for batches of (rows, tokens)."""
    inputs = jax.ShapeDtypeStruct(shape, jnp.int32)
    targets = inputs
    if model.patch:
        inputs = jax.ShapeDtypeStruct((shape[0], *model.image), jnp.float32)
    if model.classes:
        targets = jax.ShapeDtypeStruct((shape[0], 1), jnp.int32)
    return inputs, targets


def _axes(whole: tuple[int, ...], shape: tuple[int, int]) -> P:
    """Tokens are split over the mesh by rows and in a row, all else by rows."""
    return sharding.BATCH if whole == shape else sharding.ROWS


def _accumulated(value_and_grad: Callable, count: int) -> Callable:
    """Return sums of values and gradients over micro-batches, one at a time.

    Args:
        value_and_grad: of a micro-batch, which has divided them by the whole batch.
        count: micro-batches, of equally many rows.
    """
    if count == 1:
        return value_and_grad

    def accumulate(params, constants, inputs, targets, key, *whole):
        def cut(x: Array) -> Array:  # every device keeps a part of each micro-batch
            return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)

        def add(total, part):
            index, inputs, targets = part
            here = jax.random.fold_in(key, index)
            found = value_and_grad(params, constants, inputs, targets, here, *whole)
            return jax.tree.map(jnp.add, total, found), None

        zero = jax.tree.map(jnp.zeros_like, ((jnp.zeros(()),) * 2, params))
        parts = (jnp.arange(count), *jax.tree.map(cut, (inputs, targets)))
        return jax.lax.scan(add, zero, parts)[0]

    return accumulate
