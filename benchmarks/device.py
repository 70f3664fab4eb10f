"""What this machine's device computes, and how fast, beside other libraries.

    python benchmarks/device.py [--part PART] [--only TEXT] [--json FILE]

Without --part each part runs in a process of its own, so that one that fails loses no
other. --only keeps the rows whose name contains TEXT, --json adds each row to FILE as
a line, --small has sizes for a CPU. The exit code is 1 if a row of this project failed,
and 2 if there is none to run.

machine      the device's own ceilings: a matrix product and a copy
correctness  every mechanism, forward and gradient, with float32 and bfloat16 inputs:
             ‖found − wanted‖ / ‖wanted‖ (of all operands' gradients the largest)
             against the same function in float64 on the CPU, as one whole map where it
             has one, which the tests hold equal to the definition
attention    causal, bfloat16, forward and forward + backward, rivals in turns: ours,
             cuDNN through jax.nn, and, where they can be imported, PyTorch's SDPA,
             flash-linear-attention (fla) and jax-linear-attention (jla)
steps        training steps of models of 350M parameters: tokens a second and MFU,
             with all tokens of a row as one document, and with documents apart
decode       tokens a second of these models after contexts of several lengths
study        trains the Shakespeare study at 6 and 8 layers on --text FILE, without
             which it is skipped; runs lie in --out, and the same command resumes them
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some

import jax  # noqa: E402  (it reads the line above)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from arguments import output, positive  # noqa: E402
from device_correctness import cases, errors  # noqa: E402
from device_jobs import Job, jax_job, job  # noqa: E402
from device_peers import DOCUMENT, Rival, ours, peers  # noqa: E402
from etils import epath  # noqa: E402

from symjax import config  # noqa: E402
from symjax.data.documents import separated  # noqa: E402
from symjax.evaluation import compare  # noqa: E402
from symjax.evaluation.compared_runs import items  # noqa: E402
from symjax.evaluation.speed import decoding  # noqa: E402
from symjax.models.cost import train_flops  # noqa: E402
from symjax.training.chips import known  # noqa: E402
from symjax.training.sharding import make_mesh  # noqa: E402
from symjax.training.step import compile_program  # noqa: E402

Row = dict[str, Any]
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NOTHING = 2  # the exit code of a part that has nothing to run


class Nothing(ValueError):
    """A part has nothing to run; the message says why."""


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
        remat="none",  # a scan would fill, write and read stacks of all layers
        scan_layers=False,
    )
    batch: int = 16
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    presets: tuple[str, ...] = ("6l", "8l")  # of the study
    keys: tuple[str, ...] = ("model.length=300", "batch_size=32", "steps=30000")
    text: str | None = None
    seeds: str = "0"
    out: str = "runs/study"


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
    presets=("tiny",),
    keys=("model.length=32", "batch_size=8", "steps=3"),
)


def chosen(found: dict[str, Any], only: str) -> dict[str, Any]:
    """Those whose name contains `only`.

    Raises:
        Nothing: there is none; the message has all names.
    """
    kept = {x: y for x, y in found.items() if only in x}
    if not kept:
        raise Nothing(f"no name contains {only!r}: choose from {'; '.join(found)}")
    return kept


def correctness(sizes: Sizes, only: str) -> Iterator[Row]:
    kept = chosen(cases(sizes.tokens), only)
    with ThreadPoolExecutor() as pool:  # compiling is nearly all of the time
        found = {pool.submit(attempt, errors, case): x for x, case in kept.items()}
        for done in as_completed(found):
            name, rows = found[done], done.result()
            if "fault" in rows:
                yield {"name": name, **rows}
            else:
                yield from ({"name": f"{name}, {x}", **y} for x, y in rows.items())


# Attention


def attention_speed(sizes: Sizes, only: str) -> Iterator[Row]:
    for length in sizes.lengths:
        batch = max(1, sizes.row_tokens // length)
        mine = ours(batch, length, sizes.heads, sizes.head_size)
        rivals = mine | peers(mine)
        missing = {x: y for x, y in rivals.items() if isinstance(y, str)}
        rivals = chosen(rivals, only) | missing
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


def median(job: Job, sizes: Sizes) -> float:
    """Seconds of a call."""
    return float(np.median(in_turns({"": job}, sizes)[""]))


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
    chip = known(jax.devices()[0].device_kind)
    return chip and chip.flops


def steps(sizes: Sizes, only: str) -> Iterator[Row]:
    rows = {
        f"{name}, training{', documents apart' * apart}": (model, apart)
        for name, model in models(sizes).items()
        for apart in (False, True)
    }
    for name, (model, apart) in chosen(rows, only).items():
        yield {"name": name, **attempt(step_speed, model, apart, sizes)}


def step_speed(model: config.Model, apart: bool, sizes: Sizes) -> Row:
    options = config.Config(model=model, batch_size=sizes.batch)
    mesh = make_mesh(config.Mesh(data=1))
    program = compile_program(options, mesh, separate=apart)
    shape = (sizes.batch, model.length)
    random = np.random.default_rng(0)
    text = random.integers(0, model.vocabulary, shape, np.int32)
    lengths = random.geometric(1 / DOCUMENT, text.size)

    def rows(start: int, stop: int) -> tuple:
        given = text[start:stop], text[start:stop]
        starts = np.arange(start, stop) * model.length
        return separated(starts, *given, np.cumsum(lengths)) if apart else given

    batch, seen = program.place(shape, rows), model.length
    if apart:  # as many pairs as rows of so many tokens would have
        ids = rows(0, sizes.batch)[0].segment_ids
        counts = (np.unique(x, return_counts=True)[1] for x in ids)
        seen = round(sum((x**2).sum() for x in counts) / text.size)
    compiled = program.lower(shape).compile()
    planned, ends = compiled.memory_analysis(), []
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(0)
        count = sum(x.size for x in jax.tree.leaves(state.params))
        before = None
        for _ in range(sizes.rounds + 3):
            state, metrics = compiled(state, constants, *batch, jax.random.key(0))
            if before is not None:  # as in training, a step is under way by then
                loss = float(before["train/loss"])
                ends.append(time.perf_counter())
            before = metrics
    rate = text.size / float(np.median(np.diff(ends)[1:]))
    flops = rate * train_flops(replace(model, length=seen), count)
    row = {"parameters": count, "tokens_per_second": rate, "tflops": flops / 1e12}
    row |= {"mfu": flops / peak()} if peak() else {}
    row |= {"loss": loss, "mib": planned and planned.temp_size_in_bytes / 2**20}
    return row if np.isfinite(loss) else row | {"fault": "the loss is not finite"}


def decode(sizes: Sizes, only: str) -> Iterator[Row]:
    for name, model in chosen(models(sizes), only).items():
        for length in sizes.contexts:
            found = attempt(decode_speed, model, length, sizes)
            yield {"name": f"{name}, {length} tokens", **found}


def decode_speed(model: config.Model, length: int, sizes: Sizes) -> Row:
    found = decoding(config.Config(model=replace(model, length=length)), length)
    passed = median(jax_job(found.run), sizes)
    return {"tokens_per_second": found.tokens / passed, "mib": found.memory}


def study(sizes: Sizes, only: str) -> Iterator[Row]:
    """The rows of the table that compare makes, which lies in --out with the runs.

    Raises:
        Nothing: there is no text.
    """
    files = {
        f"{x}-{preset}": f"{CONFIGS / x}.py:{preset}"
        for preset in sizes.presets
        for x in ("gpt", "sym", "diff", "diff_sym")
    }
    files = chosen(files, only)
    if sizes.text is None:
        raise Nothing("skipped, since it needs a text: --text FILE")
    data = ("data.source=text", f"data.path={sizes.text}", "data.tokenizer=char")
    words = ["--configs", ",".join(files.values()), "--seeds", sizes.seeds]
    words += ["--out", sizes.out, *(f"--config.{x}" for x in (*data, *sizes.keys))]
    if fault := attempt(compare.main, words):
        yield {"name": "study", **fault}
        return
    table = epath.Path(sizes.out, "compare.csv").read_text()
    for row in csv.DictReader(table.splitlines()):
        name = row.pop("configuration")
        yield {"name": name, **{x: float(y) for x, y in row.items() if y}}


# The machine, and the command


def machine(sizes: Sizes, only: str) -> Iterator[Row]:
    side, copied = sizes.side, sizes.copied
    product = Rival("ours", jnp.matmul, ((side, side),) * 2, 2 * side**2, 0)
    copy = Rival("ours", lambda x: x + 1, ((copied // 2,),), 0, 0)

    def seconds(rival: Rival) -> float:
        return median(job(rival, False), sizes)

    rows = {
        jax.devices()[0].device_kind: lambda: {"jax": jax.__version__, **driver()},
        f"product of bfloat16 matrices of {side}": lambda: {
            "tflops": 2 * side**3 / seconds(product) / 1e12
        },
        f"copy of {copied} bytes": lambda: {
            "gb_per_second": 2 * copied / seconds(copy) / 1e9
        },
    }
    for name, row in chosen(rows, only).items():
        yield {"name": name, **attempt(row)}


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
    "study": study,
}


def shown(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1e3
        else (f"{value:,.0f}" if isinstance(value, int | float) else str(value))
    )


def run_part(part: str, sizes: Sizes, only: str, file: Path | None) -> int:
    """Prints its rows as they come.

    Returns:
        The exit code: 1 if one has a fault, 2 if there is nothing to run.
    """
    faults, kind = 0, jax.devices()[0].device_kind
    print(f"\n{part}, on {kind}", flush=True)
    try:
        for row in PARTS[part](sizes, only):
            faults += "fault" in row
            figures = (f"{x} {shown(y)}" for x, y in row.items() if x != "name")
            print(f"{row['name']:64}", *figures, sep="  ", flush=True)
            if file:
                row = {"part": part, "device": kind, **row}
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(row) + "\n")
    except Nothing as reason:
        print(f"{part}: {reason}", file=sys.stderr)
        return NOTHING
    return int(faults > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--lengths", type=positive, nargs="+", help="of attention")
    parser.add_argument("--text", metavar="FILE", help="of part study")
    parser.add_argument("--seeds", default=Sizes().seeds, help="of study (%(default)s)")
    parser.add_argument("--out", default=Sizes().out, help="of study (%(default)s)")
    parser.add_argument("--json", type=output, metavar="FILE")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    try:
        items("--seeds", options.seeds, int)
    except ValueError as error:
        parser.error(str(error))
    if options.text is not None and not Path(options.text).is_file():
        parser.error(f"--text {options.text}: there is no such file")
    if options.part is None:
        command = [sys.executable, __file__, *arguments, "--part"]
        codes = [subprocess.run([*command, x]).returncode for x in PARTS]
        return max(
            (x if x >= 0 else 128 - x for x in codes if x != NOTHING), default=NOTHING
        )
    sizes = (SMALL if options.small else Sizes())._replace(
        text=options.text, seeds=options.seeds, out=options.out
    )
    if options.lengths:
        sizes = sizes._replace(lengths=tuple(options.lengths))
    return run_part(options.part, sizes, options.only, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
