"""The work that device.py times: compiled functions of jax, and functions of torch."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_correctness import outcome
from device_peers import Rival


class Job(NamedTuple):
    run: Callable[[], Any]  # starts the work
    wait: Callable[[Any], Any]  # returns when all work that was started is done
    fetch: Callable[[Any], np.ndarray]  # the output of work that was started
    mib: float | None = None  # temporaries, as the compiler plans them


def job(rival: Rival, backward: bool) -> Job:
    """Compiled, for the jax ones. Inputs are bfloat16."""
    rng = np.random.default_rng(0)
    draw = [rng.standard_normal(x, np.float32) for x in rival.shapes]
    if rival.library in ("torch", "fla"):
        return _torch_job(rival.attend, draw, backward)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in draw]
    function = rival.attend
    if backward:
        shape = jax.eval_shape(function, *arrays).shape
        arrays.insert(0, jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))
        function = partial(outcome, function)
    compiled = jax.jit(function).lower(*arrays).compile()
    planned = compiled.memory_analysis()
    mib = planned and planned.temp_size_in_bytes / 2**20
    return jax_job(partial(compiled, *arrays), mib)


def jax_job(run: Callable[[], Any], mib: float | None = None) -> Job:
    return Job(run, jax.block_until_ready, lambda x: np.asarray(x, np.float32), mib)


def _torch_job(attend: Callable, draw: list[np.ndarray], backward: bool) -> Job:
    torch = importlib.import_module("torch")
    place = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.from_numpy(x).to(place, torch.bfloat16) for x in draw]

    def run():
        if not backward:
            with torch.no_grad():
                return attend(*tensors)
        output = attend(*tensors)
        return torch.autograd.grad(output, tensors, torch.ones_like(output))

    for tensor in tensors:
        tensor.requires_grad_(backward)
    done = torch.cuda.synchronize if place == "cuda" else lambda: None
    return Job(run, lambda _: done(), lambda x: x.float().cpu().numpy())
