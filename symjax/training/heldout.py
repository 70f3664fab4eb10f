"""Evaluation of a run on held-out examples: loss, layer statistics, and a sample."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from symjax.data.corpus import Corpus
from symjax.data.delimiters import delimiters
from symjax.data.documents import tokens_of
from symjax.data.examples import Examples
from symjax.distributed.processes import on_process_zero, to_host
from symjax.models.attention_maps import statistics_of_maps
from symjax.models.generate import before_stop, generate
from symjax.models.lambdas import lambda_table, mean_lambdas
from symjax.monitor.metrics import GRADIENT_NORM, LAMBDA
from symjax.training.context import RunContext
from symjax.training.step import Means, State, means

SAMPLE_PROMPT, SAMPLE_LENGTH = 16, 120  # tokens
MAPS, LONGEST_MAP = 4, 512  # rows whose attention maps are measured; most tokens each
MEAN_OR_LARGEST = {"entropy": np.mean, "largest_logit": np.max}  # over rows


def evaluate(context: RunContext, state: State, norms: Array | None = None) -> float:
    """Return the held-out loss; show and log it.

    If evaluate.sample is on and the model continues text, a sample is shown too.

    Args:
        norms: gradient norm of each layer [layers] in the last step, to be logged too.
    Raises:
        FloatingPointError: the loss is not finite.
    """
    examples, done = context.examples, int(state.step)
    total = examples.heldout_count(context.shape)
    count = min(context.options.evaluate.batches or total, total)
    loss, accuracy = measure(context, state, count)
    values = {"heldout/loss": loss, "heldout/batches": count}
    shown = f"{loss:.4f} nats/{examples.unit}"
    if (text := examples.text) is None:  # targets: answers, labels, masked tokens
        values["heldout/accuracy"] = accuracy
        shown += f", accuracy {accuracy:.4f},"
    else:
        values["heldout/bits_per_byte"] = bits = text.bits_per_byte(loss)
        shown += f", {bits:.4f} bits/byte"
    values |= lambdas(context, state) | attention_statistics(context, state)
    if norms is not None:
        values |= {f"{GRADIENT_NORM}{i}": x for i, x in enumerate(np.asarray(norms))}
    context.metrics.write(done, values)
    context.progress.line(
        f"step {done}: held-out loss {shown} on {count} of {total} batches "
        f"({references(examples, count, total)})"
    )
    if not math.isfinite(loss):
        raise context.stopped_at(done, f"held-out loss is {loss}")
    if text is not None and context.options.evaluate.sample:
        context.progress.compiling("the sample")
        weights = to_host((state.params, context.constants))
        shown = on_process_zero(lambda: sample(context, text, weights))
        context.progress.line(f"step {done}: sample {shown!r}")
    return loss


def measure(context: RunContext, state: State, count: int) -> Means:
    """Return the mean loss and accuracy over `count` held-out batches."""
    context.progress.compiling("the evaluation")
    batches = context.examples.heldout_batches(context.shape, count)
    return means(
        context.program, state.params, context.constants, context.shape, batches
    )


def lambdas(context: RunContext, state: State) -> dict[str, float]:
    """Return λ of every differential layer by its name in metrics.jsonl.

    Differential V2 has one λ for each token and head: their mean over the first
    held-out batch is returned.
    """
    kind = context.options.model.attention.differential
    if kind == "none":
        return {}
    model = nnx.merge(context.program.graph, state.params, context.constants)
    if kind == "v1":
        found = {row["layer"]: row["lambda"] for row in lambda_table(model)}
    else:
        [rows] = context.examples.heldout_batches(context.shape, 1)
        inputs, *_ = context.program.place(context.shape, rows)
        with jax.set_mesh(context.program.mesh):
            found = mean_lambdas(model, tokens_of(inputs))
    return {f"{LAMBDA}{layer}": lam for layer, lam in found.items()}


def attention_statistics(context: RunContext, state: State) -> dict[str, float]:
    """Return entropy and largest logit of every layer, by the names in metrics.jsonl.

    They are measured on 4 held-out rows, one after another. Rows have at most 512
    tokens, unless the examples have a fixed length. A row counts as one document, even
    if it holds several. The dict is empty if log.attention is off.
    """
    if not context.options.log.attention:
        return {}
    context.progress.compiling("the attention maps")
    length = context.options.model.length
    if not context.examples.fixed_length:
        length = min(length, LONGEST_MAP)
    model = nnx.merge(context.program.graph, state.params, context.constants)
    graph, weights = nnx.split(model)
    everywhere = NamedSharding(context.program.mesh, PartitionSpec())
    measured = []
    for rows in context.examples.heldout_batches((1, length), MAPS):
        tokens = np.asarray(tokens_of(rows(0, 1)[0]))
        with jax.set_mesh(context.program.mesh):
            placed = jax.make_array_from_callback(
                tokens.shape, everywhere, tokens.__getitem__
            )
            measured.append(statistics_of_maps(graph, weights, placed))
    return {
        f"{name}/{layer}": float(MEAN_OR_LARGEST[name]([float(x[name]) for x in found]))
        for layer, found in enumerate(zip(*measured, strict=True))
        for name in found[0]
    }


def references(examples: Examples, count: int, total: int) -> str:
    """Return a line with the losses of baselines, such as n-gram tables.

    The baselines are measured on all held-out examples. The line says so if the model
    was measured on only `count` of `total` batches.
    """
    partial = count < total and examples.heldout_rows is not None
    where = f"on all {total}" if partial else ""
    found, unit = examples.references, f" nats/{examples.unit}"
    if text := examples.text:
        where, unit = f"n-gram tables {where}".rstrip(), " bits/byte"
        found = {name: text.bits_per_byte(x) for name, x in found.items()}
    shown = ", ".join(f"{name} {x:.2f}" for name, x in found.items()) + unit
    return f"{where}: {shown}" if where else shown


def sample(context: RunContext, text: Corpus, weights: tuple[Any, Any]) -> str:
    """Return the first tokens of the held-out text and the model's continuation.

    The continuation stops where the model writes the token that ends a document.

    Args:
        weights: params and constants, on the host.
    """
    length = context.options.model.length
    start = min(SAMPLE_PROMPT, (length + 1) // 2)
    count = min(SAMPLE_LENGTH, length - start)
    tokens = np.asarray(text.heldout[:start], np.int32)
    if count:
        end = delimiters(text.tokenizer, context.examples.language).end
        stop = [] if end is None else [end]
        model = nnx.merge(context.program.graph, *weights)
        key, prompts = jax.random.key(0), jnp.asarray(tokens[None])
        more = generate(model, prompts, count, key, temperature=0.8, stop=stop)
        tokens = np.concatenate([tokens, before_stop(np.asarray(more[0]), stop)])
    return text.decode(tokens)
