"""Attention transfer: the first steps of a run that converts softmax attention.

The source is the model of `init_from`. With `transfer.match` the first `transfer.steps`
steps of a run train only the weights that the source lacks: learned feature maps,
gates, convolutions. Every attention layer is compared with the same layer of the
source. Both layers read the hidden states of the source. The error is one of these:

maps      the KL divergence Σ_s a_s ln(a_s / b_s), where a is a row of the source's map
          and b the same row of the model's map; it has the gradient of cross-entropy
outputs   the mean squared error of the outputs of the layer

A step costs a forward pass of the source, and a forward and a backward pass of each
attention layer of the model. With `maps` the attention layers of the source run once
more, and every layer takes O(B N T²) memory: its map is computed as its output for
values that are the T unit vectors. After the transfer the optimizer and its schedule
begin, and all weights train.

Source: Zhang et al. 2024, arXiv:2402.04347 (maps); Zhang et al. 2024, arXiv:2410.10254
    (outputs); Goldstein et al. 2025, arXiv:2505.03005.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from symjax import config, validation
from symjax.data.documents import SegmentedTokens, tokens_of
from symjax.layers.parts.table import part_of
from symjax.layers.segments import segments_of
from symjax.models.attention_maps import map_of, operands_of
from symjax.models.build import abstract, attentions, weights_and_constants
from symjax.training.optimizer import Guarded, Stacks, optimizer, with_averages
from symjax.training.sharding import compiler_options
from symjax.training.step import TRANSFER_ERROR, Program, State, accumulated

LEAST = 1e-8  # logarithms of the weights of a map are taken of at least this value


def check(options: config.Config) -> None:
    """Refuse keys of `transfer` that contradict each other or the run.

    Raises:
        ValueError: two keys contradict each other; the message names both.
    """
    chosen = options.transfer
    if (chosen.match == "none") != (chosen.steps == 0):
        raise ValueError(
            f"transfer.match {chosen.match!r} with transfer.steps {chosen.steps}: give "
            "both or neither"
        )
    if chosen.steps and not options.init_from:
        raise ValueError(
            f"transfer.match {chosen.match!r} needs init_from, whose attention it "
            "matches"
        )
    if chosen.steps >= options.steps:
        raise ValueError(
            f"transfer.steps {chosen.steps} must be below steps {options.steps}, which "
            "counts them too"
        )


def teacher(
    options: config.Config,
    model: config.Model,
    source: config.Model | None,
    meta: dict[str, Any] | None,
) -> config.Model | None:
    """Return the configuration of the teacher; None without a transfer.

    The teacher is the model whose attention is matched. A new run makes the teacher's
    configuration by `teacher_of`, a resumed run reads it from the checkpoint.

    Args:
        model: configuration of the run's model, with the vocabulary of the data.
        source: the model's configuration in `init_from`; None in a resumed run.
        meta: metadata of the checkpoint that a resumed run starts from.
    Raises:
        ValueError: as in `teacher_of`, or a resumed run wants a transfer and began
            without one.
    """
    if options.transfer.match == "none":
        return None
    if source is not None:
        return teacher_of(source, model, options.transfer.match)
    if (tree := (meta or {}).get("transfer")) is None:
        raise ValueError("transfer.match: a run that began without it cannot get it")
    return teacher_from(options, tree)


def end_line(options: config.Config, error: float) -> str:
    """Return the line that is shown after the last step of the transfer."""
    chosen = options.transfer
    return (
        f"step {chosen.steps}: attention transfer of {chosen.match} ends with an error "
        f"of {error:.4g}; all weights train from here"
    )


def teacher_of(source: config.Model, target: config.Model, match: str) -> config.Model:
    """Return the configuration of the model whose layers are to be matched.

    The configuration is `target` with the attention of the source. All weights of this
    model are weights of `target` too.

    Args:
        source: the model's configuration in `init_from`.
        match: value of transfer.match.
    Raises:
        ValueError: the source has another mechanism than softmax; it differs from the
            target in a key that changes the meaning of shared weights; it has weights
            that the target lacks; the target has no further weights to train; or
            `match` is "maps" and the rows of the target's maps are not distributions.
    """
    teacher = dataclasses.replace(
        target, attention=source.attention, pattern=source.pattern
    )
    mechanisms = config.mechanisms_of(teacher)
    if set(mechanisms) != {"softmax"}:
        raise ValueError(
            f"transfer.match needs softmax in init_from, which has "
            f"{', '.join(mechanisms)}"
        )
    for name in ("symmetric", "differential", "key_size"):
        before, after = (getattr(x.attention, name) for x in (teacher, target))
        if before != after:
            raise ValueError(
                f"transfer.match needs one model.attention.{name}: {before!r} in "
                f"init_from, {after!r} here"
            )
    if match == "maps":
        _check_maps(target)
    there, wanted = (
        set(_paths(weights_and_constants(abstract(x))[0])) for x in (teacher, target)
    )
    if there - wanted:
        raise ValueError(
            f"transfer.match: this model has no place for {min(there - wanted)} of "
            "init_from"
        )
    if there == wanted:
        raise ValueError(
            f"transfer.match {match!r} has nothing to train: "
            f"{config.attention_of(target)} adds no weights to those of init_from"
        )
    return teacher


def _check_maps(target: config.Model) -> None:
    """Check that the rows of all maps of the model are distributions over keys.

    Raises:
        ValueError: they are not; the message names the key or the mechanism.
    """
    if (kind := target.attention.differential) != "none":
        raise ValueError(
            f"transfer.match=maps needs maps without negative weights, "
            f"model.attention.differential is {kind!r}: use outputs"
        )
    for name in config.mechanisms_of(target):
        if not (part_of(name).exponential or part_of(name).learned):
            raise ValueError(
                f"transfer.match=maps needs rows of weights that sum to 1, which "
                f"{name} does not promise: use outputs"
            )


def stored(run: config.Config, teacher: config.Model | None) -> dict[str, Any] | None:
    """Return the teacher's configuration as plain values, for checkpoints.

    A resumed run needs it because it does not read `init_from`. The weights of the
    teacher are among the weights of the run.
    """
    if teacher is None:
        return None
    return validation.to_dict(dataclasses.replace(run, model=teacher))["model"]


def teacher_from(run: config.Config, tree: dict[str, Any]) -> config.Model:
    """Return the teacher from `stored`."""
    return validation.from_dict(validation.to_dict(run) | {"model": tree}).model


class TransferSteps(NamedTuple):
    """Pure functions of the transfer, before they are jitted.

    Attributes:
        options: configuration of the run.
        teacher: the result of `teacher_of`.
        transform: the optimizer of these steps.
        later: the optimizer of the run, which begins with a new state after these
            steps. Its state has the same structure as that of `transform`.
    """

    options: config.Config
    program: Program
    teacher: config.Model
    transform: optax.GradientTransformation
    later: optax.GradientTransformation
    stacks: Stacks

    def errors(
        self, new, params, constants, inputs, targets, key, count
    ) -> tuple[Array, Array]:
        """Return the error of a micro-batch, divided by the number of micro-batches.

        It is returned twice: to differentiate and to report.

        Args:
            new: the weights that train, by path.
            params: all weights; those at the paths of `new` are replaced.
            targets, key, count: not used; `Steps.loss` has the same arguments.
        """
        student = nnx.merge(self.program.graph, _overlaid(params, new), constants)
        model = abstract(self.teacher)
        weights = _entries_in(params, weights_and_constants(model)[0])
        teacher = nnx.merge(nnx.graphdef(model), weights, {})
        segments, options = None, {}
        if isinstance(inputs, SegmentedTokens):
            options["segment_ids"] = inputs.segment_ids
            segments = segments_of(inputs.segment_ids)
        calls: list[tuple[Any, Any, Any]] = []  # (layer, input, padding mask)
        teacher.hidden(
            tokens_of(inputs), watch=lambda *call: calls.append(call[:3]), **options
        )
        compare = {"maps": _map_error, "outputs": _output_error}
        compare = compare[self.options.transfer.match]
        by_layer = [
            compare(layer, *call, segments)
            for layer, call in zip(attentions(student), calls, strict=True)
        ]
        error = jnp.stack(by_layer).mean() / self.options.optimizer.accumulate
        return error, error

    def train(self, state: State, constants, inputs, targets, key):
        """Return the state after one step, and the metrics of the step."""
        options, steps = self.options.optimizer, self.options.transfer.steps
        shared = set(_paths(weights_and_constants(abstract(self.teacher))[0]))
        new = {x: y for x, y in _paths(state.params).items() if x not in shared}
        value_and_grad = jax.value_and_grad(self.errors, has_aux=True)

        def of_micro_batch(new, params_and_constants, *batch):
            return value_and_grad(new, *params_and_constants, *batch)

        (_, error), new_gradient = accumulated(of_micro_batch, options.accumulate)(
            new, (state.params, constants), inputs, targets, key, None
        )
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradient, params, moments = map(
            self.stacks.stack,
            (_overlaid(zeros, new_gradient), state.params, state.optimizer),
        )
        updates, guard = self.transform.update(gradient, moments, params)
        guard = cast(Guarded, guard)
        changed = _paths(self.stacks.split(optax.apply_updates(params, updates)))
        params = _overlaid(state.params, {path: changed[path] for path in new})
        fresh = cast(Guarded, self.later.init(self.stacks.stack(params)))
        fresh = fresh._replace(skipped=guard.skipped)
        ends = state.step + 1 == steps
        guard = jax.tree.map(lambda a, b: jnp.where(ends, a, b), fresh, guard)
        # `transform` decays the shared weights before it averages them. They do not
        # train, so replace their average by the weights.
        guard = with_averages(
            self.stacks.split(guard),
            lambda average: _overlaid(params, {x: _paths(average)[x] for x in new}),
        )
        metrics = {
            TRANSFER_ERROR: error,
            "gradient_norm": optax.tree.norm(gradient),
            "skipped_steps": guard.skipped,
            "learning_rate": jnp.float32(self.options.transfer.learning_rate),
        }
        return State(state.step + 1, params, guard), metrics


def compiled_transfer(
    options: config.Config, program: Program, teacher: config.Model
) -> Callable[..., tuple[State, dict[str, Array]]]:
    """Return the jitted step of the transfer, with the arguments of `Program.train`."""
    model = abstract(program.model)
    stacks = Stacks(len(model.blocks), model.period)
    first = stacks.first(weights_and_constants(model)[0])
    rate = options.transfer.learning_rate
    constant = dataclasses.replace(
        options.optimizer, learning_rate=rate, schedule="constant_schedule"
    )
    length = config.scheduled_steps(options)
    later = optimizer(options.optimizer, length, first)
    transform = optimizer(constant, length, first)
    steps = TransferSteps(options, program, teacher, transform, later, stacks)
    shardings = jax.tree.map(lambda x: x.sharding, program.state)
    return jax.jit(
        steps.train,
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=compiler_options(program.mesh),
    )


def _map_error(student, teacher, x, mask, segments) -> Float[Array, ""]:
    """Return the mean of Σ a ln(a / b) over heads and rows that are not padding."""
    wanted, found = (
        map_of(layer.mixer, operands_of(layer, x, mask, segments))
        for layer in (teacher, student)
    )
    ratio = jnp.log(jnp.maximum(wanted, LEAST)) - jnp.log(jnp.maximum(found, LEAST))
    rows = (wanted * ratio).sum(axis=-1)
    exists = None if mask is None else jnp.broadcast_to(mask[:, None], rows.shape)
    return rows.mean(where=exists)


def _output_error(student, teacher, x, mask, segments) -> Float[Array, ""]:
    """Return the mean squared error over features and tokens that are not padding."""
    wanted, found = (
        layer(x, mask, segments).astype(jnp.float32) for layer in (teacher, student)
    )
    squares = jnp.square(found - wanted)
    exists = None if mask is None else jnp.broadcast_to(mask[..., None], squares.shape)
    return squares.mean(where=exists)


def _paths(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves
    }


def _overlaid(tree: Any, leaves: dict[str, Any]) -> Any:
    """Return the tree with other leaves at the paths of `leaves`."""

    def choose(path: Any, old: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaves.get(name, old)

    return jax.tree_util.tree_map_with_path(choose, tree)


def _entries_in(tree: dict[Any, Any], like: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a nested dict whose names `like` has too."""
    return {
        name: _entries_in(tree[name], part) if isinstance(part, dict) else tree[name]
        for name, part in like.items()
    }
