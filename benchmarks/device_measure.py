"""Measurement of the rows of device.py, in the process that holds the device."""

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_correctness import cases, errors
from device_generate import DIFF_LLAMA, diff_llama
from device_jobs import Arrays, Job, OutOfTime, at_most, in_turns, job
from device_models import DECODED, decode_speed, step_speed
from device_peers import Rival, ours, peers
from device_rows import RIVAL, Row, Sizes
from device_study import study

from symjax.training.compile import use_compile_cache

Found = dict[str, Any]


def measure(row: Row, sizes: Sizes, seconds: float) -> Iterator[Found]:
    """Yield figures of a row as soon as they are known, or {"fault": …}.

    Args:
        seconds: time that is left for the row.
    """
    use_compile_cache()
    found = attempt(PARTS[row.part], row, sizes, seconds)
    if isinstance(found, dict):
        yield found
        return
    while (more := attempt(next, found, None)) is not None:
        yield more


def attempt(function: Callable, *arguments: Any) -> Any:
    """Return the result of a function, or {"fault": …} if it raises.

    Another row may still succeed.
    """
    try:
        return function(*arguments)
    except Exception as error:  # whatever a compiler or a library may raise
        first = (str(error).splitlines() or [""])[0]
        return {"fault": f"{type(error).__name__}: {first[:200]}"}


def device_kind() -> str:
    return jax.devices()[0].device_kind


def healthy() -> bool:
    """Return whether the device still computes: some kernel errors make it unusable."""
    try:
        return float(jax.jit(lambda x: x + 1)(jnp.ones(()))) == 2
    except Exception:  # whatever the runtime raises
        return False


def machine(row: Row, sizes: Sizes, seconds: float) -> Found:
    """Measure the speed of a matrix product or of a copy."""
    side, copied = sizes.side, sizes.copied
    product = Rival("ours", jnp.matmul, ((side, side),) * 2, 2 * side**2, 0)
    copy = Rival("ours", lambda x: x + 1, ((copied // 2,),), 0, 0)
    rival = {"product of bfloat16 matrices": product, "copy": copy}[row.subject]
    passed = np.median(_times({"ours": job(rival, False)}, sizes)["ours"])
    found: Found = {"ms": 1000 * float(passed)}
    if rival is copy:
        found["gb_per_second"] = 2 * copied / float(passed) / 1e9
    else:
        found["tflops"] = 2 * side**3 / float(passed) / 1e12
    return found | {"jax": jax.__version__, **driver()}


def driver() -> Found:
    """Return the version of the NVIDIA driver, {} without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"driver": found.stdout.strip()}


def attention_speed(row: Row, sizes: Sizes, seconds: float) -> Iterator[Found]:
    """Time a mechanism, interleaved with our softmax and then with other libraries.

    `times_softmax` is the time of the mechanism divided by the time of our softmax.
    `speed` of a rival is its time divided by ours: above 1, ours is faster. Rows of the
    part crossover have no rivals.
    """
    length = max(1, row.tokens // sizes.divisor)
    batch = max(1, sizes.row_tokens // length)
    own = ours(batch, length, sizes.heads, sizes.head_size)[row.subject]
    flops = batch * length * own.flops * (own.backward if row.backward else 1)
    jobs = {"ours": job(own, row.backward)}
    outputs = _fetched(jobs["ours"])
    if row.subject != "softmax":
        jobs["softmax"] = _softmax(batch, length, row.backward, sizes)

    def figures(times: dict[str, Any]) -> Found:
        passed = float(np.median(times["ours"]))
        found: Found = {"ms": 1000 * passed}
        if "softmax" in times:
            ratio = np.median(times["ours"] / times["softmax"])
            found["times_softmax"] = float(ratio)
        return found | {"tflops": flops / passed / 1e12}

    yield figures(_times(jobs, sizes)) | jobs["ours"].figures
    if not all(np.isfinite(x).all() for x in outputs):
        yield {"fault": "the output or a gradient is not finite"}
    others = {} if row.part == "crossover" else peers(row.subject, own)
    rivals: dict[str, Found] = {}
    for name, other in others.items():
        found = attempt(_prepared, other, row.backward)
        if isinstance(found, Job):
            jobs[name] = found
            rivals[name] = found.figures | _differences(outputs, _fetched(found))
        else:
            rivals[name] = {"missing": found["fault"]}
    if not rivals:
        return
    times = _times(jobs, sizes)
    for name in rivals.keys() & times.keys():
        ms = 1000 * float(np.median(times[name]))
        speed = float(np.median(times[name] / times["ours"]))
        rivals[name] = {"ms": ms, "speed": speed} | rivals[name]
    yield figures(times) | {"rivals": rivals}


_softmax_jobs: dict[tuple, Job] = {}


def _softmax(batch: int, length: int, backward: bool, sizes: Sizes) -> Job:
    """Return the job of our softmax, compiled once for all rows of a length."""
    key = batch, length, backward
    if key not in _softmax_jobs:
        rivals = ours(batch, length, sizes.heads, sizes.head_size)
        _softmax_jobs[key] = job(rivals["softmax"], backward)
    return _softmax_jobs[key]


_late: set[str] = set()  # libraries that had a function not ready in time


def _prepared(rival: Rival | str, backward: bool) -> Job:
    """Return a job of another library.

    Raises:
        ValueError: the library is missing.
        OutOfTime: the job is not ready in time, or one of the library was not in an
            earlier row.
    """
    if isinstance(rival, str):
        raise ValueError(rival)
    if rival.library in _late:
        raise OutOfTime(f"{rival.library} was not ready in time in an earlier row")
    try:
        with at_most(RIVAL):
            return job(rival, backward)
    except OutOfTime:
        _late.add(rival.library)
        raise


def _fetched(job: Job) -> Arrays:
    return job.fetch(job.run())


def _differences(wanted: Arrays, found: Arrays) -> Found:
    """Return ‖theirs − ours‖ / ‖ours‖ of the output and, at worst, of a gradient."""
    output, *gradients = (
        float(np.linalg.norm(x - y) / np.linalg.norm(y))
        for x, y in zip(found, wanted, strict=True)
    )
    return {"differs": output} | (
        {"gradients_differ": max(gradients)} if gradients else {}
    )


def _times(jobs: dict[str, Job], sizes: Sizes) -> dict[str, Any]:
    return in_turns(jobs, sizes.rounds, sizes.patience)


def correctness(row: Row, sizes: Sizes, seconds: float) -> Found:
    return errors(cases(sizes.correctness)[row.subject])


def decode(row: Row, sizes: Sizes, seconds: float) -> Iterator[Found]:
    """Time decoding after a context; differential attention beside transformers.

    `speed` of the rival is its time divided by ours: above 1, ours is faster.
    """
    context = max(1, row.tokens // sizes.divisor)
    yield (found := decode_speed(row.subject, context, sizes))
    if row.subject != "diff":
        return
    rival = attempt(diff_llama, context, found["tokens"], DECODED, sizes)
    if "fault" in rival:
        rival = {"missing": rival["fault"]}
    else:
        ratio = found["tokens_per_second"] / rival["tokens_per_second"]
        rival = {"speed": ratio} | rival
    yield {"rivals": {DIFF_LLAMA: rival}}


def steps(row: Row, sizes: Sizes, seconds: float) -> Found:
    name, _, documents = row.subject.partition(",")
    return step_speed(name, documents, sizes)


PARTS = {
    "machine": machine,
    "attention": attention_speed,
    "correctness": correctness,
    "decode": decode,
    "steps": steps,
    "crossover": attention_speed,
    "study": study,
}
