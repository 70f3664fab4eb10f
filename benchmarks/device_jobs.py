"""Work that device.py times: compiled functions of jax, and functions of torch."""

import importlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_correctness import outcome
from device_peers import Rival

Arrays = list[np.ndarray]


class Job(NamedTuple):
    """Work that is ready to run."""

    run: Callable[[], Any]  # starts the work, and returns its outputs
    wait: Callable[[Any], Any]  # returns when the work of these outputs is done
    fetch: Callable[[Any], Arrays]  # copies these outputs to the host
    figures: dict[str, float | bool]  # seconds of the first call, and memory


class OutOfTime(Exception):
    """A function of another library was not ready in time."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime if the body takes longer.

    It interrupts Python code, for instance the tuning of Triton between two programs.
    """

    def interrupt(*_: Any) -> None:
        raise OutOfTime(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def job(rival: Rival, backward: bool) -> Job:
    """Return a job of a function on random bfloat16 inputs, which has run once.

    Its outputs are the output of the function and, with `backward`, the gradient of
    each input. Inputs are drawn from fixed seeds.
    """
    if rival.library in ("torch", "fla"):
        return _torch_job(rival, backward)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in map(drawn, rival.shapes, SEEDS)]
    function: Callable = rival.attend
    shape_seconds = 0.0  # of a trace that finds the shape of the output
    if backward:
        began = time.perf_counter()
        shape = jax.eval_shape(function, *arrays).shape
        shape_seconds = time.perf_counter() - began
        arrays.insert(0, jnp.asarray(drawn(shape, COTANGENT), jnp.bfloat16))
        function = partial(outcome, function)
    compiled, figures = first_call(jax.jit(function), arrays)
    figures["trace_s"] = round(figures["trace_s"] + shape_seconds, 2)
    return jax_job(partial(compiled, *arrays), figures)


SEEDS, COTANGENT = range(100), 100


@lru_cache(maxsize=8)
def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def first_call(function: Any, arrays: Any) -> tuple[jax.stages.Compiled, dict]:
    """Return the compiled function, the seconds of each stage, and its memory."""
    hits = []

    def listen(event: str, **_: Any) -> None:
        hits.append(event.endswith("/cache_hits"))

    jax.monitoring.register_event_listener(listen)
    times = [time.perf_counter()]
    traced = function.trace(*arrays)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    jax.monitoring.unregister_event_listener(listen)
    stages = zip(("trace_s", "lower_s", "compile_s"), np.diff(times), strict=True)
    figures: dict[str, Any] = {x: round(float(y), 2) for x, y in stages}
    if any(hits):
        figures["from_cache"] = True
    return compiled, figures | memory(compiled)


def memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Return the MiB of temporaries that the compiler plans."""
    planned = compiled.memory_analysis()
    return {"mib": planned.temp_size_in_bytes / 2**20} if planned else {}


def jax_job(run: Callable[[], Any], figures: dict | None = None) -> Job:
    """Return a job of a compiled function, which has run once."""

    def fetch(found: Any) -> Arrays:
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]

    jax.block_until_ready(run())
    return Job(run, jax.block_until_ready, fetch, figures or {})


def _torch_job(rival: Rival, backward: bool) -> Job:
    torch = importlib.import_module("torch")
    place = "cuda" if torch.cuda.is_available() else "cpu"

    def tensor(shape: tuple[int, ...], seed: int) -> Any:
        return torch.from_numpy(drawn(shape, seed)).to(place, torch.bfloat16)

    tensors = list(map(tensor, rival.shapes, SEEDS))

    def forward() -> Any:
        with torch.no_grad():
            return rival.attend(*tensors)

    began = time.perf_counter()
    output = forward()
    cotangent = tensor(tuple(output.shape), COTANGENT).to(output.dtype)

    def forward_and_backward() -> Any:
        output = rival.attend(*tensors)
        # The backward pass runs in this thread, so that `at_most` can interrupt it.
        with torch.autograd.set_multithreading_enabled(False):
            return output.detach(), *torch.autograd.grad(output, tensors, cotangent)

    def fetch(found: Any) -> Arrays:
        found = found if isinstance(found, tuple) else (found,)
        return [x.float().cpu().numpy() for x in found]

    for x in tensors:
        x.requires_grad_(backward)
    run = forward_and_backward if backward else forward
    done = torch.cuda.synchronize if place == "cuda" else lambda: None
    run()
    done()
    ready = round(time.perf_counter() - began, 2)
    return Job(run, lambda _: done(), fetch, {"ready_s": ready})


def in_turns(jobs: dict[str, Job], rounds: int, patience: float) -> dict[str, Any]:
    """Return the seconds per call of each job, an array over rounds.

    In a turn, a job runs as often as `patience` seconds allow (at most 100 times), and
    is waited for once at the end, so that the cost of launching it is hidden.
    """

    def turn(job: Job, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            output = job.run()
        job.wait(output)
        return (time.perf_counter() - start) / count

    counts = {x: int(np.clip(patience / turn(y, 1), 1, 100)) for x, y in jobs.items()}
    times = [[turn(y, counts[x]) for x, y in jobs.items()] for _ in range(rounds)]
    return dict(zip(jobs, np.array(times).T, strict=True))
