"""Training and evaluation steps, compiled for one model and one mesh.

`Steps` has the pure functions. `build_program` jits them with the shardings of a mesh
and returns a `Program`. `means` evaluates a program over batches.
"""

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
from symjax.layers.sharded import constrain
from symjax.models.build import abstract, build, weights_and_constants
from symjax.training import sharding
from symjax.training.loss import hidden_of, objective, target_count, token_losses
from symjax.training.optimizer import Guarded, Stacks, optimizer
from symjax.training.schedule import schedule

# Metric that replaces train/loss during attention transfer (symjax.training.transfer).
TRANSFER_ERROR = "transfer/error"
LAYER_NORMS = "gradient_norms"  # metric [layers] of a training step
_CONFIG = threading.Lock()  # held while an option of jax is changed


class State(NamedTuple):
    """Arrays that a training step changes, or their abstract forms or shardings.

    Attributes:
        step: number of steps made, an int32 scalar.
        params: nested dict of weights.
        optimizer: state of the optimizer; its moments are nested dicts like `params`.
    """

    step: Any
    params: Any
    optimizer: Any


class Program(NamedTuple):
    """Jitted functions of a run; call them under `jax.set_mesh(program.mesh)`.

    initial(seed) → (State, constants)
    train(state, constants, inputs, targets, key) → (State, metrics); state is donated
    evaluate(params, constants, inputs, targets, weights, key) → (Σ w·loss, Σ w,
        Σ w·right), sums over the targets of a batch. w are the `weights` of the losses,
        and right is 1 where the target has the highest logit. A key turns dropout on,
        None turns it off.

    Attributes:
        state: abstract arrays of the `State`, with shardings.
        constants: abstract arrays that are not trained, such as random projections,
            with shardings.
        separate: whether inputs are `SegmentedTokens`, which have segment ids.
    """

    model: config.Model
    graph: nnx.GraphDef
    mesh: Mesh
    state: State
    constants: dict[str, Any]
    initial: Callable
    train: Callable
    evaluate: Callable
    separate: bool = False

    def lower(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        """Return the training step for batches of `shape`, lowered without arrays."""
        inputs, targets = batch_like(self.model, shape)
        if self.separate:
            inputs = SegmentedTokens(inputs, inputs)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with jax.set_mesh(self.mesh):
            return self.train.lower(self.state, self.constants, inputs, targets, key)

    def place(self, shape: tuple[int, int], read_rows: Callable) -> list[Any]:
        """Return the arrays of a batch, sharded over the mesh.

        The rows are read or made here. Each process does so only for the rows that its
        devices hold.

        Args:
            shape: (rows, tokens of a row).
            read_rows: read_rows(start, stop) returns the NumPy arrays of these rows.
        """
        cached = functools.cache(lambda start, stop: tuple(read_rows(start, stop)))
        leaves, structure = jax.tree.flatten(cached(*self._rows_of_one_device(shape)))

        def array(number: int) -> Array:
            whole = (shape[0], *leaves[number].shape[1:])

            def piece(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(shape[0])
                part = jax.tree.leaves(cached(start, stop))[number]
                return part[(slice(None), *index[1:])]

            layout = NamedSharding(self.mesh, _axes(whole, shape))
            return jax.make_array_from_callback(whole, layout, piece)

        return list(structure.unflatten(map(array, range(len(leaves)))))

    def _rows_of_one_device(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows (start, stop) of one device of this process."""
        layout = NamedSharding(self.mesh, sharding.ROWS)
        index: Any = next(iter(layout.addressable_devices_indices_map(shape).values()))
        return index[0].indices(shape[0])[:2]


class Steps(NamedTuple):
    """Pure functions of a `Program`, before they are jitted for a mesh.

    Attributes:
        transform: the optimizer. It takes weights as `stacks.stack` returns them: with
            equal layers stacked in one array if model.scan_layers is set.
    """

    options: config.Config
    graph: nnx.GraphDef
    transform: optax.GradientTransformation
    stacks: Stacks

    def initial(self, seed: Array) -> tuple[State, dict]:
        """Return the state and the constants of a new run."""
        rngs = nnx.Rngs(jax.random.key(seed))
        params, constants = weights_and_constants(build(self.options.model, rngs=rngs))
        moments = self.stacks.split(self.transform.init(self.stacks.stack(params)))
        return State(jnp.zeros((), jnp.int32), params, moments), constants

    def loss(
        self, params, constants, inputs, targets, key, count
    ) -> tuple[Array, Array]:
        """Return a micro-batch's contribution to the losses: (minimised, reported).

        Losses and z-losses are sums over targets, divided by the number of targets of
        the whole batch. Ponder costs, which only universal models have, are means over
        the tokens of the whole batch.

        Args:
            count: number of targets of the whole batch.
        """
        model = nnx.merge(self.graph, params, constants)
        hidden = hidden_of(model, inputs, key)
        ponder = jax.tree.leaves(nnx.pop(model, nnx.Intermediate))
        options, weight = self.options.optimizer, self.options.model.ponder
        # Micro-batches have equally many tokens.
        costs = sum(weight * x.sum() / (x.size * options.accumulate) for x in ponder)
        result = objective(model, hidden, targets, options.z_loss, count)
        return result.minimised + costs, result.loss

    def train(self, state: State, constants, inputs, targets, key):
        """Return the state after one step, and the metrics of the step."""
        options = self.options.optimizer
        key = jax.random.fold_in(key, state.step)
        (_, value), gradient = accumulated(
            jax.value_and_grad(self.loss, has_aux=True), options.accumulate
        )(state.params, constants, inputs, targets, key, target_count(targets))
        # The schedule counts only the steps that were not skipped.
        rate = schedule(options, config.scheduled_steps(self.options))(
            state.optimizer.taken
        )
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
        if self.options.log.attention:
            metrics[LAYER_NORMS] = constrain(self.stacks.norms(gradient), None)
        stacked = optax.apply_updates(params, updates), guard
        return State(state.step + 1, *map(self.stacks.split, stacked)), metrics

    def evaluate(self, params, constants, inputs, targets, weights, key):
        """Return (Σ w·loss, Σ w, Σ w·right) over the targets of a batch.

        Args:
            weights: w, the weight of each target's loss.
        """
        model = nnx.merge(self.graph, params, constants)
        hidden = hidden_of(model, inputs, key)
        losses = token_losses(model, hidden, targets)
        right = weights * losses.right
        return (weights * losses.loss).sum(), weights.sum(), right.sum()


def build_program(
    options: config.Config, mesh: Mesh, *, separate: bool = False
) -> Program:
    """Return the program of a configuration on a mesh.

    Each function compiles when it is first called.

    Args:
        separate: whether inputs are `SegmentedTokens`: see `Examples.separate`.
    Raises:
        ValueError: sizes contradict each other or do not divide over the mesh.
    """
    sharding.check_batch(options, mesh)
    model = abstract(options.model)
    params, constants = weights_and_constants(model)
    stacks = Stacks(len(model.blocks), model.period)
    transform = optimizer(
        options.optimizer, config.scheduled_steps(options), stacks.first(params)
    )
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
        initial_state = _with_threefry_kernel(initial_state)
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


def _with_threefry_kernel(initial: Callable) -> Callable:
    """Return `initial` with random bits that a kernel of jax draws on a GPU.

    The kernel does not change the bits. Without it XLA inlines the generator in every
    draw, and compiling takes 152 s instead of 16 s for a model of 24 layers and 353M
    parameters (two cores, no GPU). Call this function only for a mesh of one device:
    XLA cannot partition the kernel, so each of several devices would draw whole arrays.
    """
    name = "jax_threefry_gpu_kernel_lowering"

    @functools.wraps(initial)
    def with_kernel(seed: int) -> tuple[State, dict]:
        with _CONFIG:
            before = getattr(jax.config, name)
            jax.config.update(name, True)
            try:
                return initial(seed)
            finally:
                jax.config.update(name, before)

    return with_kernel


class Means(NamedTuple):
    """Weighted means over the targets of some batches.

    Attributes:
        loss: Σ weight · loss / Σ weight, in nats per target.
        accuracy: weighted share of targets that have the highest logit.
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
    """Return the mean loss and accuracy over batches.

    Args:
        shape: (rows, length) of each batch.
        batches: the `read_rows` of `Program.place`, one for each batch.
        key: turns dropout on; None turns it off.
    Raises:
        ValueError: no batch has a target.
    """
    total = weight = right = 0.0
    index = -1
    for index, batch in enumerate(batches):
        rows = program.place(shape, batch)
        batch_key = None if key is None else jax.random.fold_in(key, index)
        with jax.set_mesh(program.mesh):
            part = program.evaluate(params, constants, *rows, batch_key)
        total += float(part[0])
        weight += float(part[1])
        right += float(part[2])
    if not weight:
        raise ValueError(f"{index + 1} held-out batch(es) have no target")
    return Means(total / weight, right / weight)


def batch_like(
    model: config.Model, shape: tuple[int, int]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return abstract inputs and targets of a model, for batches of (rows, tokens)."""
    inputs = jax.ShapeDtypeStruct(shape, jnp.int32)
    targets = inputs
    if model.patch:
        inputs = jax.ShapeDtypeStruct((shape[0], *model.image), jnp.float32)
    if model.classes:
        targets = jax.ShapeDtypeStruct((shape[0], 1), jnp.int32)
    return inputs, targets


def _axes(whole: tuple[int, ...], shape: tuple[int, int]) -> P:
    """Return the mesh axes of an array.

    Arrays [rows, tokens] are split over rows and tokens, all others over rows.
    """
    return sharding.TOKENS if whole == shape else sharding.ROWS


def accumulated(value_and_grad: Callable, count: int) -> Callable:
    """Return `value_and_grad` summed over `count` micro-batches, one after another.

    Args:
        value_and_grad: returns the share of a micro-batch in the loss and gradient of
            the whole batch. For the mean over targets, these are sums divided by the
            number of targets of the whole batch.
        count: number of micro-batches, which have equally many rows.
    """
    if count == 1:
        return value_and_grad

    def accumulate(params, constants, inputs, targets, key, *whole):
        # [B …] → [count B/count …]. Micro-batch i has the rows i, i + count, …, so that
        # each device has a part of every micro-batch and no rows move.
        def cut(x: Array) -> Array:
            return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)

        def add(total, part):
            index, inputs, targets = part
            part_key = jax.random.fold_in(key, index)
            result = value_and_grad(
                params, constants, inputs, targets, part_key, *whole
            )
            return jax.tree.map(jnp.add, total, result), None

        zero = jax.tree.map(jnp.zeros_like, ((jnp.zeros(()),) * 2, params))
        parts = (jnp.arange(count), *jax.tree.map(cut, (inputs, targets)))
        return jax.lax.scan(add, zero, parts)[0]

    return accumulate
