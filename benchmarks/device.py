"""What this machine's device computes, and how fast, beside other libraries.

    python benchmarks/device.py [--part PART] [--only TEXT] [--json FILE]

Without --part each part runs in a process of its own, so that one that fails loses no
other. --only keeps the rows whose name contains TEXT, --json adds each row to FILE as
a line, --small has sizes for a CPU. The exit code is 1 if a row of this project failed.

machine      the device's own ceilings: a matrix product and a copy
correctness  every mechanism, forward and gradient, with float32 and bfloat16 inputs:
             ‖found − wanted‖ / ‖wanted‖ (of all operands' gradients the largest)
             against the same function in float64 on the CPU, as one whole map where it
             has one, which the tests hold equal to the definition
attention    causal, bfloat16, forward and forward + backward, rivals in turns: ours,
             cuDNN through jax.nn, and, where they can be imported, PyTorch's SDPA,
             flash-linear-attention (fla) and jax-linear-attention (jla)
steps        training steps of models of 350M parameters: tokens a second and MFU
decode       tokens a second of these models after contexts of several lengths
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some

import jax  # noqa: E402  (it reads the line above)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from device_correctness import cases, errors, outcome  # noqa: E402
from device_peers import Rival, ours, peers  # noqa: E402

from symjax import config  # noqa: E402
from symjax.evaluation.speed import decoding  # noqa: E402
from symjax.models.cost import train_flops  # noqa: E402
from symjax.training.chips import CHIPS  # noqa: E402
from symjax.training.sharding import make_mesh  # noqa: E402
from symjax.training.step import compile_program  # noqa: E402

Row = dict[str, Any]


class Sizes(NamedTuple):
    """Of all parts: on a device, and --small."""

    side: int = 8192  # of the matrices of a product
    copied: int = 2**31  # bytes
    tokens: int = 300  # of correctness; no block and no chunk divides them
    lengths: tuple[int, ...] = (1024, 4096, 16384, 32768)
    row_tokens: int = 16384  # of all rows together, in attention
    heads: int = 16
    head_size: int = 128
    rounds: int = 7
    patience: float = 0.1  # seconds of one rival's turn
    model: config.Model = config.Model(
        vocabulary=50304,
        width=1024,
        depth=24,
        heads=16,
        length=2048,
        positions="rope",
        norm="rmsnorm",
        activation="gelu",
        bias=False,
        tie_embeddings=True,
        dtype="bfloat16",
        remat="full",
        scan_layers=True,
    )
    batch: int = 16
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)


SMALL = Sizes(
    side=256,
    copied=2**20,
    tokens=70,
    lengths=(128,),
    row_tokens=256,
    heads=2,
    head_size=16,
    rounds=2,
    patience=0.01,
    model=replace(Sizes().model, vocabulary=64, width=64, depth=2, heads=4, length=128),
    batch=2,
    contexts=(32, 64),
)


def correctness(sizes: Sizes, only: str) -> Iterator[Row]:
    chosen = {x: y for x, y in cases(sizes.tokens).items() if only in x}
    with ThreadPoolExecutor() as pool:  # compiling is nearly all of the time
        found = pool.map(lambda case: attempt(errors, case), chosen.values())
        for name, rows in zip(chosen, found, strict=True):
            if "fault" in rows:
                yield {"name": name, **rows}
            else:
                yield from ({"name": f"{name}, {x}", **y} for x, y in rows.items())


# Attention


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


def attention_speed(sizes: Sizes, only: str) -> Iterator[Row]:
    for length in sizes.lengths:
        batch = max(1, sizes.row_tokens // length)
        mine = ours(batch, length, sizes.heads, sizes.head_size)
        rivals = mine | peers(mine)
        rivals = {x: y for x, y in rivals.items() if only in x or isinstance(y, str)}
        for backward in (False, True):
            work = f"T {length}, forward{' + backward' * backward}"
            jobs, rows = prepared(rivals, backward)
            if not backward:
                for name, difference in differences(rivals, jobs).items():
                    rows[name] = {"differs": difference}
            times = in_turns(jobs, sizes)
            for name, seconds in times.items():
                rival, passed = rivals[name], float(np.median(seconds))
                flops = batch * length * rival.flops
                flops *= rival.backward if backward else 1
                rows[name] = rows.get(name, {}) | {
                    "ms": 1000 * passed,
                    "tflops": flops / passed / 1e12,
                    "mib": jobs[name].mib,
                }
                if "softmax" in times:
                    ratio = np.median(seconds / times["softmax"])
                    rows[name]["times_softmax"] = float(ratio)
            yield from ({"name": f"{x}, {work}", **rows[x]} for x in rivals)


def prepared(rivals: dict[str, Rival | str], backward: bool) -> tuple[dict, dict]:
    """Jobs that have run once, by name, and why the others cannot."""
    rows = {x: {"missing": y} for x, y in rivals.items() if isinstance(y, str)}
    ready = {x: y for x, y in rivals.items() if not isinstance(y, str)}
    with ThreadPoolExecutor() as pool:  # compiling is nearly all of the time
        built = pool.map(lambda x: attempt(job, x, backward), ready.values())
    jobs = {}
    for name, found in zip(ready, built, strict=True):
        if isinstance(found, Job):
            ran = attempt(lambda found=found: found.wait(found.run()))
            found = ran if isinstance(ran, dict) and "fault" in ran else found
        if isinstance(found, Job):
            jobs[name] = found
        elif ready[name].library == "ours":
            rows[name] = found
        else:
            rows[name] = {"missing": found["fault"]}
    return jobs, rows


def differences(rivals: dict[str, Any], jobs: dict[str, Job]) -> dict[str, float]:
    """‖theirs − ours‖ / ‖ours‖ of what stands for the same function."""
    found = {}
    for name, theirs in jobs.items():
        if twin := jobs.get(rivals[name].twin):
            wanted, given = (x.fetch(x.run()) for x in (twin, theirs))
            found[name] = float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))
    return found


def in_turns(jobs: dict[str, Job], sizes: Sizes) -> dict[str, np.ndarray]:
    """Seconds of a call, of each round: in a turn a job runs as often as there is time
    for, and is waited for once, so that starting it costs nothing."""

    def turn(job: Job, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            output = job.run()
        job.wait(output)
        return (time.perf_counter() - start) / count

    counts = {
        x: int(np.clip(sizes.patience / turn(y, 1), 1, 100)) for x, y in jobs.items()
    }
    rounds = [
        [turn(y, counts[x]) for x, y in jobs.items()] for _ in range(sizes.rounds)
    ]
    return dict(zip(jobs, np.array(rounds).T, strict=True))


# Models


def models(sizes: Sizes) -> dict[str, config.Model]:
    """Equal parameters but for the symmetric one's keys; differential heads are half as
    many, with values twice as wide, as the paper has them."""
    plain, halved = sizes.model, sizes.model.heads // 2
    chosen = config.Attention
    both = chosen(symmetric="plain", differential="v1")
    performer = chosen(mechanism="performer", query_key_norm=True)
    return {
        "gpt": plain,
        "diff": replace(plain, heads=halved, attention=chosen(differential="v1")),
        "diff_sym": replace(plain, heads=halved, attention=both),
        "performer": replace(plain, attention=performer),
        "decay": replace(plain, attention=chosen(mechanism="decay")),
    }


def peak() -> float | None:
    """bfloat16 operations a second, in the maker's figure; None of an unknown chip."""
    kind = jax.devices()[0].device_kind
    return next((chip.flops for chip in CHIPS if chip.name in kind), None)


def steps(sizes: Sizes, only: str) -> Iterator[Row]:
    for name, model in models(sizes).items():
        if only in name:
            yield {"name": f"{name}, training", **attempt(step_speed, model, sizes)}


def step_speed(model: config.Model, sizes: Sizes) -> Row:
    options = config.Config(model=model, batch_size=sizes.batch)
    program = compile_program(options, make_mesh(config.Mesh(data=1)))
    shape = (sizes.batch, model.length)
    text = np.random.default_rng(0).integers(0, model.vocabulary, shape, np.int32)
    batch = program.place(shape, lambda start, stop: (text[start:stop],) * 2)
    compiled = program.lower(shape).compile()
    planned, seconds = compiled.memory_analysis(), []
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(0)
        count = sum(x.size for x in jax.tree.leaves(state.params))
        for _ in range(sizes.rounds + 2):
            start = time.perf_counter()
            state, metrics = compiled(state, constants, *batch, jax.random.key(0))
            loss = float(metrics["train/loss"])
            seconds.append(time.perf_counter() - start)
    rate = text.size / float(np.median(seconds[2:]))
    flops = rate * train_flops(model, count)
    row = {"parameters": count, "tokens_per_second": rate, "tflops": flops / 1e12}
    row |= {"mfu": flops / peak()} if peak() else {}
    row |= {"loss": loss, "mib": planned and planned.temp_size_in_bytes / 2**20}
    return row if np.isfinite(loss) else row | {"fault": "the loss is not finite"}


def decode(sizes: Sizes, only: str) -> Iterator[Row]:
    for name, model in models(sizes).items():
        for length in sizes.contexts if only in name else ():
            found = attempt(decode_speed, model, length, sizes)
            yield {"name": f"{name}, {length} tokens", **found}


def decode_speed(model: config.Model, length: int, sizes: Sizes) -> Row:
    found = decoding(config.Config(model=replace(model, length=length)), length)
    passed = float(np.median(in_turns({"": jax_job(found.run)}, sizes)[""]))
    return {"tokens_per_second": found.tokens / passed, "mib": found.memory}


# The machine, and the command


def machine(sizes: Sizes, only: str) -> Iterator[Row]:
    device = jax.devices()[0]
    yield {"name": device.device_kind, "jax": jax.__version__, **driver()}
    square = (sizes.side, sizes.side)
    product = Rival("ours", jnp.matmul, (square, square), 2 * sizes.side**2, 0)
    copy = Rival("ours", lambda x: x + 1, ((sizes.copied // 2,),), 0, 0)
    jobs = {"product": job(product, False), "copy": job(copy, False)}
    times = {x: float(np.median(y)) for x, y in in_turns(jobs, sizes).items()}
    yield {
        "name": f"product of bfloat16 matrices of {sizes.side}",
        "tflops": 2 * sizes.side**3 / times["product"] / 1e12,
    }
    moved = 2 * sizes.copied / times["copy"]
    yield {"name": f"copy of {sizes.copied} bytes", "gb_per_second": moved / 1e9}


def driver() -> Row:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"driver": found.stdout.strip()}


def attempt(function: Callable, *arguments: Any) -> Any:
    """What it returns, or {"fault": …}: another row may still succeed."""
    try:
        return function(*arguments)
    except Exception as error:  # whatever a compiler or a library may raise
        first = (str(error).splitlines() or [""])[0]
        return {"fault": f"{type(error).__name__}: {first[:200]}"}


PARTS = {
    "machine": machine,
    "correctness": correctness,
    "attention": attention_speed,
    "steps": steps,
    "decode": decode,
}


def shown(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1e3
        else (f"{value:,.0f}" if isinstance(value, int | float) else str(value))
    )


def run_part(part: str, sizes: Sizes, only: str, file: str | None) -> int:
    """Prints its rows as they come; 1 if one has a fault."""
    faults = 0
    print(f"\n{part}, on {jax.devices()[0].device_kind}", flush=True)
    for row in PARTS[part](sizes, only):
        faults += "fault" in row
        figures = (f"{x} {shown(y)}" for x, y in row.items() if x != "name")
        print(f"{row['name']:64}" + "  ".join(figures), flush=True)
        if file:
            with open(file, "a", encoding="utf-8") as lines:
                lines.write(json.dumps({"part": part, **row}) + "\n")
    return int(faults > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--lengths", type=int, nargs="+", help="of part attention")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    if options.part is None:
        command = [sys.executable, __file__, *arguments, "--part"]
        return max(abs(subprocess.run([*command, x]).returncode) for x in PARTS)
    sizes = SMALL if options.small else Sizes()
    if options.lengths:
        sizes = sizes._replace(lengths=tuple(options.lengths))
    return run_part(options.part, sizes, options.only, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
