"""Score mechanisms on the fused kernel: which calls it serves, and when it is chosen.

The kernel is for TPUs. Forced by `implementation="fused"` it is interpreted on other
machines, slowly, which serves to check it. `implementation=None` takes it if

- it serves the arguments (`refusal`), and there are at least 128 rows;
- a TPU is in sight: the devices of the mesh, or the default backend without one;
- the call is of one device alone: in a `jax.shard_map`, as layers under a mesh make it,
  or where there is but one. XLA cannot split a kernel among devices.

What runs is then decided where the program is lowered: the kernel for a TPU, blocks of
rows for any other machine. Like the ring, it has no forward-mode derivative
(`jax.jvp`); `implementation="rows"` has.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.kernels import fused
from symjax.attention.meshes import on_any_mesh
from symjax.attention.rows import Operands, Rule, rows_spec

LARGEST_HEAD = 512
FEWEST_ROWS = 128  # of a block of the kernel

Engine = Callable[[Rule, Operands], tuple[Array, None]]


def fused_or(engine: Engine, rule: Rule, operands: Operands, *, forced: bool) -> Engine:
    """The kernel, the engine, or the choice between both, for these operands.

    Raises:
        ValueError: forced, and the kernel does not serve them, saying why.
    """
    reason = refusal(rule, operands)
    if forced and reason:
        raise ValueError(f"implementation 'fused' does not serve this call: {reason}")
    if forced:
        return attend_fused if _for_tpu() else attend_interpreted
    few = operands.query.shape[2] < FEWEST_ROWS
    if reason or few or not _for_tpu() or not _on_one_device():
        return engine
    return partial(_attend_by_platform, engine)


def refusal(rule: Rule, operands: Operands) -> str | None:
    """Why the kernel does not serve a call; None if it does."""
    query, _, value, bias, slopes, _, _, known = operands
    dtypes = {jnp.dtype(x).name for x in (query.dtype, *rule.dtypes)}
    if not dtypes <= {"bfloat16", "float32"}:
        return f"it takes bfloat16 and float32, got {', '.join(sorted(dtypes))}"
    if bias is not None or slopes is not None:
        return "it adds no bias and no alibi"
    if known.mask is not None and known.mask.shape[1:3] != (1, 1):
        return f"it takes a mask of keys alone, [B 1 1 S], got {known.mask.shape}"
    if not known.consecutive:
        return "it takes rows that follow each other, without positions"
    if rule.scale is None:
        return "its scale is a number, not an array"
    if (size := max(query.shape[3], value.shape[3])) > LARGEST_HEAD:
        return f"its heads have at most {LARGEST_HEAD} numbers, got {size}"
    return None


@on_any_mesh(static=2, rows_spec=rows_spec)  # outside jit it compiles once a shape
def _attend(
    interpret: bool, rule: Rule, operands: Operands
) -> tuple[Float[Array, "B N T V"], None]:
    """What `attend_rows` gives for the weights of softmax, by the kernel."""
    known, lam = operands.visibility, operands.lam
    mask = known.mask
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], known.length))
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in operands[:3])
    output = fused(
        query,
        key,
        value,
        None if lam is None else jnp.swapaxes(lam, 1, 2),
        scale=rule.scale,
        window=known.window,
        mask=mask,
        mask_self=known.mask_self,
        runs=known.key_segments,
        length_base=rule.length_base,
        first=known.rows[0, 0] if rule.offset is None else rule.offset,
        interpret=interpret,
    )
    return jnp.swapaxes(output, 1, 2), None


attend_fused = partial(_attend, False)
attend_interpreted = partial(_attend, True)


@on_any_mesh(static=2, rows_spec=rows_spec)
def _attend_by_platform(
    engine: Engine, rule: Rule, operands: Operands
) -> tuple[Float[Array, "B N T V"], None]:
    return jax.lax.platform_dependent(
        tpu=partial(attend_fused, rule, operands),
        default=partial(engine, rule, operands),
    )


def _for_tpu() -> bool:
    """Whether the program at hand may be one for a TPU."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend() == "tpu"
    return device.platform == "tpu"


def _on_one_device() -> bool:
    """Whether no axis of a mesh is left for XLA to split arrays over."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    manual = jax.sharding.AxisType.Manual
    return all(size == 1 or kind == manual for size, kind in axes)
