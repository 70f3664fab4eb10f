"""Attention transfer: the first steps of a run that converts softmax attention.

With `init_from` and `transfer.match` the first `transfer.steps` steps of a run train
only the weights that the source lacks: learned feature maps, gates, convolutions. Every
layer is compared with the layer of the source, on the hidden states of the source:

maps      Σ_s a_s ln(a_s / b_s) of the rows a of the source's map and b of the model's;
          its gradient is that of the cross-entropy of maps
outputs   the mean squared error of the outputs of the layer

A step costs a forward pass of the source, one of each attention layer, and a backward
pass of each layer alone. `maps` takes O(B N T²) memory for every layer. After the
transfer the optimizer and its schedule begin, and all weights train.

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
from symjax.models.build import abstract, attentions, parts
from symjax.training.optimizer import Guarded, Stacks, optimizer
from symjax.training.sharding import compiler_options
from symjax.training.step import TRANSFER_ERROR, Program, State, accumulated

LEAST = 1e-8  # weights of the model's map below it count as this much


def check(options: config.Config) -> None:
    """Refuse keys of `transfer` that contradict each other or the run.

    Raises:
        ValueError: naming both keys.
    """
    chosen = options.transfer
    if (chosen.match == "none") != (chosen.steps == 0):
        raise ValueError(
            f"transfer.match {chosen.match!r} with transfer.steps {chosen.steps}: give "
            "both or neither"
        )
    if chosen.steps and not options.init_from:
        raise ValueError(
            f"transfer.match {chosen.match!r} needs init_from, a run whose attention "
            "it matches"
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
    """Return `teacher_of` a run; None if it has no transfer.

    Args:
        model: of the run, with the vocabulary of its data.
        source: configuration of the model of `init_from`, in a new run.
        meta: of the checkpoint that a resumed run starts from.
    Raises:
        ValueError: as `teacher_of`, or a run that began without a transfer gets one.
    """
    if options.transfer.match == "none":
        return None
    if source is not None:
        return teacher_of(source, model, options.transfer.match)
    if (tree := (meta or {}).get("transfer")) is None:
        raise ValueError("transfer.match: a run that began without it cannot get it")
    return restored(options, tree)


def end_line(options: config.Config, error: float) -> str:
    """Return the line that is shown after the last step of the transfer."""
    chosen = options.transfer
    return (
        f"step {chosen.steps}: attention transfer of {chosen.match} ends with an error "
        f"of {error:.4g}; all weights train from here"
    )


def teacher_of(source: config.Model, target: config.Model, match: str) -> config.Model:
    """Return the configuration of the model whose layers are to be matched.

    It is `target` with the attention of the source, and has no weights but those of the
    target that the source has too.

    Args:
        source: configuration of the model of `init_from`.
        match: value of transfer.match.
    Raises:
        ValueError: the source is not softmax, another key of attention decides the
            meaning of shared weights, or there is nothing to train.
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
    there, wanted = (set(_paths(parts(abstract(x))[0])) for x in (teacher, target))
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
    """Raise unless the rows of all maps are distributions over keys.

    Raises:
        ValueError: naming the key.
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
    """Return what checkpoints store of the teacher: the model's keys, as plain values.

    A resumed run needs no source: its weights hold those of the teacher.
    """
    if teacher is None:
        return None
    return validation.to_dict(dataclasses.replace(run, model=teacher))["model"]


def restored(run: config.Config, tree: dict[str, Any]) -> config.Model:
    """Return the teacher from `stored`."""
    return validation.from_dict(validation.to_dict(run) | {"model": tree}).model


class TransferSteps(NamedTuple):
    """Pure functions of the transfer, before they are jitted.

    Attributes:
        options: of the run.
        teacher: as `teacher_of`.
        transform, later: the optimizer of these steps, and that of the run, whose
            state begins after them. Both have states of one structure.
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
        """Return the error of a micro-batch twice, divided by their number.

        Args:
            new: the weights that train, by path.
            params: all weights; those of `new` take the place of theirs.
            targets, key, count: not used, as in `Steps.loss`.
        """
        student = nnx.merge(self.program.graph, _overlaid(params, new), constants)
        model = abstract(self.teacher)
        weights = _those_of(params, parts(model)[0])
        teacher = nnx.merge(nnx.graphdef(model), weights, {})
        segments, options = None, {}
        if isinstance(inputs, SegmentedTokens):
            options["segment_ids"] = inputs.segment_ids
            segments = segments_of(inputs.segment_ids)
        seen: list[tuple[Any, Any, Any]] = []
        teacher.hidden(
            tokens_of(inputs), watch=lambda *found: seen.append(found[:3]), **options
        )
        compare = {"maps": _map_error, "outputs": _output_error}
        compare = compare[self.options.transfer.match]
        found = [
            compare(layer, *call, segments)
            for layer, call in zip(attentions(student), seen, strict=True)
        ]
        error = jnp.stack(found).mean() / self.options.optimizer.accumulate
        return error, error

    def train(self, state: State, constants, inputs, targets, key):
        """Return the state after one step, and the metrics of the step."""
        options, steps = self.options.optimizer, self.options.transfer.steps
        shared = set(_paths(parts(abstract(self.teacher))[0]))
        new = {x: y for x, y in _paths(state.params).items() if x not in shared}
        value_and_grad = jax.value_and_grad(self.errors, has_aux=True)

        def of_micro_batch(new, params_and_constants, *batch):
            return value_and_grad(new, *params_and_constants, *batch)

        (_, error), found = accumulated(of_micro_batch, options.accumulate)(
            new, (state.params, constants), inputs, targets, key, None
        )
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradient, params, moments = map(
            self.stacks.stack,
            (_overlaid(zeros, found), state.params, state.optimizer),
        )
        updates, guard = self.transform.update(gradient, moments, params)
        guard = cast(Guarded, guard)
        fresh = cast(Guarded, self.later.init(params))._replace(skipped=guard.skipped)
        ends = state.step + 1 == steps
        guard = jax.tree.map(lambda a, b: jnp.where(ends, a, b), fresh, guard)
        changed = _paths(self.stacks.split(optax.apply_updates(params, updates)))
        params = _overlaid(state.params, {path: changed[path] for path in new})
        metrics = {
            TRANSFER_ERROR: error,
            "gradient_norm": optax.tree.norm(gradient),
            "skipped_steps": guard.skipped,
            "learning_rate": jnp.float32(self.options.transfer.learning_rate),
        }
        return State(state.step + 1, params, self.stacks.split(guard)), metrics


def compiled_transfer(
    options: config.Config, program: Program, teacher: config.Model
) -> Callable[..., tuple[State, dict[str, Array]]]:
    """Return the jitted step of the transfer; its arguments are those of `train`."""
    model = abstract(program.model)
    stacks = Stacks(len(model.blocks), model.period)
    first = stacks.first(parts(model)[0])
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
    """Return the mean of Σ a ln(a / b) over heads and over rows that exist."""
    wanted, found = (
        map_of(layer.mixer, operands_of(layer, x, mask, segments))
        for layer in (teacher, student)
    )
    ratio = jnp.log(jnp.maximum(wanted, LEAST)) - jnp.log(jnp.maximum(found, LEAST))
    rows = (wanted * ratio).sum(axis=-1)
    exists = None if mask is None else jnp.broadcast_to(mask[:, None], rows.shape)
    return rows.mean(where=exists)


def _output_error(student, teacher, x, mask, segments) -> Float[Array, ""]:
    """Return the mean of (y − z)² over features and over tokens that exist."""
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


def _those_of(tree: dict[Any, Any], like: dict[Any, Any]) -> dict[Any, Any]:
    """Return the part of a nested dict that another one has."""
    return {
        name: _those_of(tree[name], part) if isinstance(part, dict) else tree[name]
        for name, part in like.items()
    }
