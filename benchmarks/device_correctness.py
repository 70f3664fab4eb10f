"""Compare every mechanism on a device with float64 on the CPU, for device.py."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from symjax import attention

# Largest relative errors. Products of float32 may run in TF32; bfloat16 has 8 bits.
LIMITS = {"float32": 3e-3, "bfloat16": 3e-2}
# The derivative of sparsemax jumps where a weight becomes 0. TF32 scores move these
# jumps: rounding queries and keys to 11 bits changes gradients in float64 by 2e-2 to
# 4e-2.
JUMPS = 20
# The reference on the CPU runs once. These options halve its time to compile.
UNOPTIMISED: Any = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class Case(NamedTuple):
    """A function of arrays, the shapes of the arrays, and its reference."""

    attend: Callable
    shapes: tuple[tuple[int, ...], ...]
    exact: Callable | None = None  # runs in float64; None: `attend` itself
    scale: float = 1.0  # of queries and keys
    mean: float = 0.0  # of the last operand, usually the values
    slack: float = 1.0  # factor of the limit of float32


@cache
def cases(tokens: int) -> dict[str, Case]:
    """Return all cases by name, with keys of `tokens` or 4 · `tokens` tokens."""
    b, t, n, k, h, v = 2, tokens, 4, 2, 64, 32
    query, key, value = (b, t, n, h), (b, t, k, h), (b, t, k, v)
    plain = (query, key, value)
    own = (query, query, (b, t, n, v))
    pairs = ((b, t, 2 * n, h), (b, t, 2 * k, h), (b, t, k, 2 * h))
    longer = [(b, 4 * t, *shape) for _, _, *shape in pairs]
    found = {}
    for name, causal in (("causal", True), ("bidirectional", False)):
        for mechanism in ("softmax", "sparsemax", "entmax15"):
            attend = partial(getattr(attention, mechanism), is_causal=causal)
            whole = partial(attend, implementation="whole")
            v1 = partial(attention.differential, attend=attend)
            exact = partial(v1, implementation="whole")
            over = f"{mechanism}, {name}"
            kind = Case if mechanism != "sparsemax" else partial(Case, slack=JUMPS)
            found |= {
                over: kind(attend, plain, whole),
                f"differential V1 over {over}": kind(v1, (*pairs, (n,)), exact),
            }
        separate = partial(documents, 2 * t - 1, attend=attention.differential)
        separate = partial(separate, is_causal=causal)
        near = partial(attention.differential, window=(t, 0 if causal else 70))
        rows = partial(attention.softmax, is_causal=causal, implementation="rows")
        whole = partial(rows, implementation="whole")
        gau = partial(attention.gau, divisor="count", is_causal=causal)
        tied = partial(symmetric, is_causal=causal)
        second = partial(attention.differential_v2, is_causal=causal)
        found |= {
            f"symmetric, {name}": Case(partial(tied, mask_self=True), (query, own[2])),
            f"pairwise symmetric, {name}": Case(
                tied, (query, own[2], (n, h, h)), scale=0.35
            ),
            f"differential V2, {name}": Case(
                *(second, (pairs[0], key, value, (b, t, n))),
                partial(second, implementation="whole"),
            ),
            f"softmax, {name}, values + 4": Case(
                partial(attention.softmax, is_causal=causal), plain, whole, mean=4.0
            ),
            f"differential V1 over softmax, {name}, documents": Case(
                *(separate, (*longer, (n,))),
                partial(separate, implementation="whole"),
            ),
            f"differential V1 over softmax, {name}, window": Case(
                *(near, (pairs[0], *longer[1:], (n,))),
                partial(near, implementation="whole"),
            ),
            f"softmax, {name}, rows": Case(rows, plain, whole),
            f"softmax, {name}, whole": Case(whole, plain),
            f"gau, {name}": Case(gau, plain, partial(gau, implementation="whole")),
            f"cosine, {name}": Case(partial(attention.cosine, is_causal=causal), plain),
            f"flash, {name}": Case(
                partial(attention.flash, group_size=64, is_causal=causal),
                (query, key, query, key, value),
            ),
        }
    for features in ("elu", "relu", "relu2", "squared", "taylor"):
        attend = partial(attention.linear_causal, features=features)
        found[f"linear {features}"] = Case(attend, plain)
    for name in ("exp", "expm1", "resolvent", "resolventm1"):
        attend = partial(attention.matrix_function, function=name)
        found[f"matrix function {name}"] = Case(attend, (query, own[2]))
    linear = partial(attention.differential, attend=attention.linear_causal)
    return (
        found
        | _performers(plain)
        | {
            "linear elu, bidirectional": Case(attention.linear, plain),
            "hedgehog": Case(hedgehog, (*plain, (n, h, h), (k, h, h)), scale=0.35),
            "differential V1 over linear": Case(linear, (*pairs, (n,))),
            "retention": Case(retention, plain),
            "gated decay": Case(gated, (*plain, key)),
            "delta rule": Case(delta, (*plain, (b, t, k))),
            "gated delta rule": Case(delta, (*plain, (b, t, k), (b, t, k))),
            "delta rule, gated channels": Case(delta, (*plain, (b, t, k), key)),
        }
    )


def documents(size: int, query, key, *arrays, attend: Callable, **options):
    """Call `attend` with documents of `size` tokens that do not see each other."""
    ids = jnp.broadcast_to(jnp.arange(key.shape[1])[None] // size, key.shape[:2])
    return attend(query, key, *arrays, segment_ids=ids, **options)


def symmetric(query, value, metric=None, **options):
    return attention.symmetric(query, value, metric=metric, **options)


def hedgehog(query, key, value, query_map, key_map):
    query = attention.hedgehog(query, query_map)
    key = attention.hedgehog(key, key_map)
    return attention.linear_causal(query, key, value, features="identity")


def retention(query, key, value, **options):
    log_decay = attention.retention_log_decay(key.shape[2])[None, None]
    return attention.decay_causal(query, key, value, log_decay, **options)


def gated(query, key, value, gate, **options):
    log_decay = attention.gated_log_decay(gate)
    return attention.decay_causal(query, key, value, log_decay, **options)


def write_strength(key, beta):
    """Return keys of length 1, and β in float32 at least, as the layer makes them."""
    dtype = jnp.promote_types(key.dtype, jnp.float32)
    beta, long = jax.nn.sigmoid(beta.astype(dtype)), key.astype(dtype)
    key = (long / jnp.linalg.norm(long, axis=-1, keepdims=True)).astype(key.dtype)
    return key, beta


def delta(query, key, value, beta, gate=None, **options):
    key, beta = write_strength(key, beta)
    log_decay = None if gate is None else attention.gated_log_decay(gate)
    return attention.delta_causal(query, key, value, beta, log_decay, **options)


def _performers(shapes: tuple[tuple[int, ...], ...]) -> dict[str, Case]:
    size = shapes[0][-1]
    with jax.default_device(jax.devices("cpu")[0]):  # the reference uses them too
        sample = jax.random.normal(jax.random.key(1), (2, 256, size))
        rows = attention.orthogonal_projection(jax.random.key(0), 256, size)
        statistics = {
            kind: jax.tree.map(
                np.asarray, attention.favor_statistics(*sample, kind=kind)
            )
            for kind in ("favor++", "favor#")
        }
    rows = np.asarray(rows)

    def case(features: str, scale: float = 1.0, attend=attention.performer_causal):
        adapted = statistics.get(features)

        def run(query, key, value):
            return attend(
                query, key, value, rows, features=features, statistics=adapted
            )

        return Case(run, shapes, scale=scale)

    kinds = ("hyperbolic", "relu", "favor++", "favor#")
    return {
        **{f"performer × {x:g}": case("positive", x) for x in (0.5, 1, 2, 4, 8)},
        **{f"performer {features}": case(features) for features in kinds},
        "performer trigonometric × 0.5": case("trigonometric", 0.5),
        "performer, bidirectional": case("positive", attend=attention.performer),
    }


def errors(case: Case) -> dict[str, Any]:
    """Return the error of the output and the largest error of the gradients by dtype.

    There is a "fault" if an error is above its limit. The function and its reference
    on the CPU are compiled at the same time.
    """
    on_gpu = jax.default_backend() == "gpu"
    untuned: Any = {"xla_gpu_autotune_level": 0} if on_gpu else None
    reference = partial(outcome, case.exact or case.attend)
    exact = jax.jit(reference, compiler_options=UNOPTIMISED)
    function = partial(outcome, case.attend)
    rng = np.random.default_rng(0)
    scales = [case.scale] * 2 + [1.0] * (len(case.shapes) - 2)
    pairs = zip(scales, case.shapes, strict=True)
    draw = [scale * rng.standard_normal(shape) for scale, shape in pairs]
    draw[-1] += case.mean
    row, faults = {}, []
    for dtype, limit in LIMITS.items():
        arrays = [jnp.asarray(x, dtype) for x in draw]
        shape = jax.eval_shape(case.attend, *arrays).shape
        # In bfloat16, so that a cast to the dtype of the output changes nothing.
        operands = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16), *arrays
        with ThreadPoolExecutor(1) as other:
            wanted = other.submit(in_float64, exact, [*map(wide, operands)])
            found = jax.jit(function, compiler_options=untuned)(*operands)
        both = zip(map(wide, found), map(wide, wanted.result()), strict=True)
        forward, *gradients = (
            float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in both
        )
        row[f"{dtype}_forward"] = forward
        row[f"{dtype}_gradient"] = float(np.max(gradients))
        limit *= case.slack if dtype == "float32" else 1
        if not all(error <= limit for error in (forward, *gradients)):  # false for NaN
            faults.append(f"{dtype} above {limit:g}")
    return row | ({"fault": "; ".join(faults)} if faults else {})


def in_float64(function: Callable, arrays: list[np.ndarray]) -> Any:
    """Return the results of the function in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return jax.block_until_ready(function(*arrays))


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def outcome(attend: Callable, cotangent: Any, *arrays: Any) -> tuple:
    """Return the output, and the gradient of every operand for this cotangent."""
    output, pull = jax.vjp(attend, *arrays)
    return output, *pull(cotangent.astype(output.dtype))
