"""Adapter of the kernels of jax-linear-attention for decays and the delta rule.

The package (jla 0.1.0, https://pypi.org/project/jax-linear-attention) has kernels in
Pallas' Mosaic GPU for Hopper GPUs. It needs Python 3.12 and jax 0.11.2, so it is an
optional dependency: `pip install 'symjax[hopper]'`. `implementation="jla"` runs it; no
other call does.

Its functions have the recurrences of `decay_causal` and `delta_causal`, the layout
[B T N H], and natural logarithms of decays. Here are the differences:

- It scales queries by H^−½ unless the call passes a scale. The adapter passes 1.
- It needs as many heads of keys, values, β and decays as of queries. The adapter
  repeats them.
- It has no mask. The adapter makes keys, values, β and log-decays of hidden tokens 0.
- It adds up log-decays within 64 tokens and subtracts the sums. So −∞ gives NaN, and a
  log-decay far below 0 rounds away digits of the others. The adapter replaces
  log-decays below `LEAST` by `LEAST`, whose exponential is 0 in float32.

The package's forms in plain jax equal the float64 definitions
(tests/attention/kernels/test_jla.py), and the kernels of all `KINDS` compile for an
H200. This project has not run the adapter on a GPU.
docs/performance/gpu.md has the times of the package itself on an H200.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.devices import on_hopper, xla_keeps_arrays_whole
from symjax.attention.core.meshes import varying
from symjax.attention.core.operands import Tokens
from symjax.attention.core.visibility import hidden_as_zero
from symjax.attention.kernels.operands import VisibleTokens, log_decay_of

SIZES = 64, 128  # head sizes of keys and values
LEAST = -104.0  # exp(LEAST) is below half of the smallest float32
# Kind → module of the kernels, and the function there that says if they run a call.
KINDS = {
    "simple_gla": ("scalar_gate", "supports_simple_gla"),
    "gla": ("gla", "supports_gla"),
    "deltanet": ("gated_delta_rule", "supports_delta_rule"),
    "gated_deltanet": ("gated_delta_rule", "supports_gated_delta_rule"),
    "kda": ("kda", "supports_kda"),
}


class Jla(NamedTuple):
    """Linear attention with a decay, or the delta rule, with bfloat16 operands.

    Attributes:
        recurrence: `Decayed` or `DeltaRule`.
        form: the package's option `impl`. Tests choose "chunked", which is plain jax.
    """

    recurrence: Any
    form: str = "mosaic_gpu"

    def refusal(self, tokens: Tokens, parameters: Array | None) -> str | None:
        """Return why the kernels do not support a call; None if they do."""
        if self.recurrence.kernel not in ("decay", "delta"):
            return "it takes no erase gates"
        if find_spec("jla") is None:
            return "it needs jax-linear-attention: pip install 'symjax[hopper]'"
        if not on_hopper():
            return "it needs a Hopper GPU, jax 0.11 or later, and jax_enable_x64 off"
        if not xla_keeps_arrays_whole():
            return "XLA cannot split it over devices: call it in a jax.shard_map"
        if varying(tokens[:3]):
            return "it needs a jax.shard_map with check_vma=False"
        dtypes = {x.dtype.name for x in tokens[:3]}
        if dtypes != {"bfloat16"}:
            return f"it takes bfloat16, got {', '.join(sorted(dtypes))}"
        for name in ("key", "value"):
            if (size := getattr(tokens, name).shape[3]) not in SIZES:
                return f"it takes a {name} of {SIZES} dimensions, got {size}"
        heads, size = tokens.query.shape[2:]
        kind = self._kind(tokens, parameters)
        if kind in ("gla", "kda") and heads * size % 128:
            return (
                "with a decay per channel it takes query heads whose sizes add up to "
                f"a multiple of 128, got {heads} of {size}"
            )
        arrays, gates, options = jax.eval_shape(self._arguments, tokens, parameters)
        # eval_shape sorts the keys of a dict.
        arrays += [gates[name] for name in ("g", "beta") if name in gates]
        if not _supports(kind)(*arrays, scale=1.0, **options):
            shape = tokens.query.shape
            return f"jax-linear-attention refuses {kind!r} with queries {shape} here"
        return None

    def attend(
        self, tokens: Tokens, parameters: Array | None, _: Any = None
    ) -> Float[Array, "B T N V"]:
        arrays, gates, options = self._arguments(tokens, parameters)
        options |= {"impl": self.form, "scale": 1.0}
        run = import_module("jla.ops").linear_attention
        return run(self._kind(tokens, parameters), *arrays, **gates, **options)[0]

    def _kind(self, tokens: Tokens, parameters: Array | None) -> str:
        """Return the package's name of the recurrence."""
        delta = self.recurrence.kernel == "delta"
        if delta and not self.recurrence.fades:
            return "deltanet"
        if log_decay_of(self._decays(tokens), parameters).shape[3] > 1:
            return "kda" if delta else "gla"
        return "gated_deltanet" if delta else "simple_gla"

    def _arguments(
        self, tokens: Tokens, parameters: Array | None
    ) -> tuple[list[Array], dict[str, Array], dict[str, Any]]:
        """Return query, key and value, the gates, and the segments as an option.

        All arrays have the heads of queries. The gates are log-decays "g" and "beta",
        as far as the recurrence has them.
        """
        query, key, value, visible, segment = VisibleTokens.of(tokens)
        gates = {}
        if self._kind(tokens, parameters) != "deltanet":
            log_decay = log_decay_of(self._decays(tokens), parameters)
            shape = *key.shape[:3], log_decay.shape[3]
            gates["g"] = jnp.broadcast_to(log_decay, shape)
        if self.recurrence.kernel == "delta":
            gates["beta"] = tokens.operands[0][..., None]
        group = query.shape[2] // key.shape[2]
        for name, gate in gates.items():
            gate = gate.astype(jnp.float32)
            if visible is not None:
                (gate,) = hidden_as_zero(visible, gate)
            if name == "g":
                gate = jnp.maximum(gate, LEAST)
            gate = gate[..., 0] if gate.shape[3] == 1 else gate
            gates[name] = jnp.repeat(gate, group, axis=2)
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
        options = {} if segment is None else {"segment_ids": segment}
        return [query, key, value], gates, options

    def _decays(self, tokens: Tokens) -> tuple[Array, ...]:
        """Return the operands without β."""
        return tokens.operands[self.recurrence.kernel == "delta" :]


@cache
def _supports(kind: str) -> Any:
    """Return the package's function that says whether its kernels run a call."""
    module, name = KINDS[kind]
    return getattr(import_module(f"jla.ops.mosaic_gpu.{module}"), name)
