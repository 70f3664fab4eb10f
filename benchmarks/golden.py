"""Golden numbers: show whether a change of the code moves what small models compute.

    python -m benchmarks.golden record golden.json         # before a change
    python -m benchmarks.golden compare golden.json        # after it: losses, cost
    python -m benchmarks.golden compare golden.json --evaluations --only softmax,flash
    python -m benchmarks.golden compare golden.json --float64   # losses, in float64

`record` trains each model for 20 steps in float32 on a text that this file generates.
It stores the losses, the compiled cost of the training step, and the JSON of eval.py
for the last checkpoint. The runs stay in a folder beside the JSON file, so that
`compare --evaluations` can evaluate the old checkpoints with the new code. `compare`
exits with 1 if

- a loss moved by more than 1e-6,
- a number of an evaluation is printed differently and moved by more than 1e-6 (numbers
  are printed with 4 decimals, and a smaller move may change the last one),
- FLOPs, bytes accessed or temporary bytes of the step grew by more than 2 %.

Another order of sums, or another processor, also moves float32 losses. Training
amplifies such differences, in 20 steps up to 4e-4. --float64 distinguishes them from a
change of the function: it trains from a copy of the sources in which float32 is
replaced by float64, and exits with 1 if a loss moved by more than 1e-12. Losses in
float64 are equal on all machines. The other numbers depend on the compiler, so record
and compare with the same version of jax on the same kind of machine. `compare` names a
version or processor that differs.

This file imports nothing from symjax. It relies on the command lines of train.py and
eval.py, on configuration keys, on `step` and `train/loss` in metrics.jsonl, on the JSON
of eval.py, and on training compiling its step by `jax.stages.Lowered.compile`.
"""

import argparse
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Largest change of a loss, largest ratio of a cost, largest change of an evaluation.
LOSS, COST, EDGE = 1e-6, 1.02, 1e-6
EXACT = 1e-12  # largest change of losses in float64

KEYS = {
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 2,
    "model.length": 48,
    "model.dropout": 0.0,
    "batch_size": 4,
    "steps": 20,
    "data.source": "text",
    "evaluate.every": 0,
    "evaluate.batches": 2,
    "checkpoint.every": 10,
    "log.every": 1,
    "mesh.data": 1,
}
CHUNKS = {"model.attention.chunk_size": 16}  # three chunks or groups per row
PERFORMER = {**CHUNKS, "model.attention.feature_count": 16}
# Name → file of configs/, and keys that are set in addition to KEYS.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("gpt", {}),
    "diff_sym": ("diff_sym", {}),
    "performer": ("performer", PERFORMER),
    "mixed": ("mixed", PERFORMER),
    "retnet": ("retnet", CHUNKS),
    "gau": ("gau", {}),
    "flash": ("flash", CHUNKS),
    "universal": ("universal", {}),
    "encoder": ("encoder:masked", {"model.pattern": "softmax,linear"}),
}
# Tasks of all models. Tasks of one data source are left out, and so are `speed`, whose
# numbers are times, `maps`, `spectrum` and `symmetry`. `sample` is last since its text
# is cut from the end of the output. `length` compiles eight models, so only two models
# run it.
TASKS = (
    "loss,lambda,position,noise,self_share,dilution,entropy,support,rank,outliers,"
    "approximation,gradients,dimension,sample"
)
LONG = ("softmax", "performer")


def main(words: list[str]) -> int:
    if words[:1] == ["train"]:  # this file runs itself in this way for each model
        return _train(Path(words[1]), words[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="the JSON of golden numbers")
    parser.add_argument(
        "--only", default=",".join(MODELS), help="models, between commas"
    )
    parser.add_argument(
        "--evaluations", action="store_true", help="compare evaluations too"
    )
    parser.add_argument(
        "--float64", action="store_true", help="compare losses in float64"
    )
    chosen = parser.parse_args(words)
    names = chosen.only.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"--only {unknown}: choose from {', '.join(MODELS)}")
    if chosen.action == "record":
        return record(chosen.file, names)
    if chosen.float64:
        return compare_in_float64(chosen.file, names)
    return compare(chosen.file, names, chosen.evaluations)


def runs(file: Path) -> Path:
    """Return the folder of the runs of a recording."""
    return file.with_suffix("")


def record(file: Path, names: list[str]) -> int:
    """Train and evaluate the models, and write their numbers to the file."""
    models = {}
    if file.exists():  # --only keeps the other models
        models = json.loads(file.read_text())["models"]
    found: dict[str, Any] = {"made_with": made_with(), "models": models}
    for name in names:
        workdir = runs(file) / name
        shutil.rmtree(workdir, ignore_errors=True)
        workdir.parent.mkdir(parents=True, exist_ok=True)
        models[name] = train(name, workdir)
        models[name]["evaluation"] = evaluate(name, workdir)
        models[name]["float64"] = losses_in_float64(name)
        file.write_text(_json(found))
        print(f"{name:10} loss {models[name]['losses'][-1]:.4f}", flush=True)
    return 0


def compare(file: Path, names: list[str], evaluations: bool) -> int:
    """Train the models again, and print what differs from the file; 1 if too much."""
    golden = json.loads(file.read_text())
    complete = all((runs(file) / name).is_dir() for name in names)
    if evaluations and not complete:
        sys.exit(f"{runs(file)} misses runs that `record` writes beside {file}")
    there, here = golden["made_with"], made_with()
    for key in ("jax", "jaxlib", "machine"):
        if there[key] != here[key]:
            print(f"{key} differs: {there[key]} recorded, {here[key]} here")
    moved = False
    for name in names:
        if name not in golden["models"]:
            print(f"{name:10} is not recorded")
            continue
        wanted = golden["models"][name]
        with tempfile.TemporaryDirectory() as folder:
            lines = differences(wanted, train(name, Path(folder, "run")))
        if evaluations:
            lines += evaluation_differences(
                wanted["evaluation"], evaluate(name, runs(file) / name)
            )
        print("\n".join(f"{name:10} {line}" for line, _ in lines), flush=True)
        moved |= any(beyond for _, beyond in lines)
    print("moved" if moved else "nothing moved")
    return int(moved)


def compare_in_float64(file: Path, names: list[str]) -> int:
    models, moved = json.loads(file.read_text())["models"], False
    for name in names:
        found = losses_in_float64(name)
        line, beyond = loss_difference(models[name]["float64"], found, EXACT)
        print(f"{name:10} {line}", flush=True)
        moved |= beyond
    print("moved" if moved else "nothing moved")
    return int(moved)


Line = tuple[str, bool]  # a line to print, and whether it names a forbidden change


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[Line]:
    """Return a line on the losses and a line on the cost."""
    lines = [loss_difference(wanted["losses"], found["losses"], LOSS)]
    ratios = {key: found["cost"][key] / max(n, 1) for key, n in wanted["cost"].items()}
    shown = ", ".join(f"{key} {ratio:.3f}" for key, ratio in ratios.items())
    above = any(ratio > COST for ratio in ratios.values())
    lines.append((f"cost: {shown}" + (f", above {COST}" if above else ""), above))
    return lines


def loss_difference(wanted: list[float], found: list[float], bound: float) -> Line:
    apart = [abs(a - b) for a, b in zip(wanted, found, strict=True)]
    step = next((i for i, d in enumerate(apart, 1) if not d <= bound), 0)
    where = f", above {bound:g} from step {step} on" if step else ""
    return f"losses moved by at most {max(apart):.1e}{where}", step > 0


def evaluation_differences(wanted: Any, found: Any) -> list[Line]:
    """Return a summary, and a line for each value that is printed differently."""
    there, here = dict(_leaves(wanted)), dict(_leaves(found))
    lines = [
        (f"{path}: {value} recorded, {here.get(path, 'nothing')} now", True)
        for path, value in there.items()
        if path not in here or not _printed_alike(value, here[path])
    ]
    more = len(here.keys() - there.keys())
    summary = f"evaluation: {len(there)} values, {len(lines)} differ, {more} are new"
    return [(summary, False), *lines]


def _printed_alike(a: Any, b: Any) -> bool:
    if not isinstance(a, float) or not isinstance(b, float):
        return a == b
    decimals = 0 if abs(a) >= 1000 else 4
    near = abs(a - b) <= EDGE * max(1, abs(a))
    return near or f"{a:.{decimals}f}" == f"{b:.{decimals}f}"


def _leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for k, v in items for leaf in _leaves(v, f"{path}/{k}")]
    return [(path, tree)]


def made_with() -> dict[str, str]:
    """Return the versions and the machine that the numbers depend on."""
    words = ["import jax, jaxlib; print(jax.__version__, jaxlib.__version__)"]
    versions = _run("-c", *words).split()
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "jax": versions[0],
        "jaxlib": versions[1],
        "python": platform.python_version(),
        "machine": _processor(),
        "commit": commit or "unknown",
    }


def _processor() -> str:
    """Return architecture and vector instructions, which decide the order of sums."""
    flags: set[str] = set()
    if (path := Path("/proc/cpuinfo")).exists():
        flags = set(path.read_text().split())
    known = ("avx512f", "avx2", "amx_tile", "asimd", "sve")
    return " ".join([platform.machine(), *(x for x in known if x in flags)])


def train(name: str, workdir: Path, root: Path = ROOT, **environment: str) -> dict:
    """Train a model; return the losses of all steps, and the cost of a step."""
    config, changes = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        text, cost = Path(folder, "text.txt"), Path(folder, "cost.json")
        text.write_text(generated_text())
        keys = KEYS | changes | {"data.path": text}
        words = ["--config", f"configs/{config.replace(':', '.py:', 1)}"]
        if ":" not in config:
            words[1] += ".py:tiny"
        words += [f"--config.{key}={value}" for key, value in keys.items()]
        words += ["--workdir", str(workdir.absolute())]
        words = [str(root / "benchmarks" / "golden.py"), "train", str(cost), *words]
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "0"
        _run(*words, root=root, **environment)
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "train/loss" in row]
        return {
            "losses": [row["train/loss"] for row in rows],
            "cost": json.loads(cost.read_text()),
        }


def losses_in_float64(name: str) -> list[float]:
    """Return the losses of a copy of the sources with float64 in place of float32."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "copy")
        for part in ("symjax", "configs", "benchmarks"):
            shutil.copytree(ROOT / part, root / part)
        shutil.copy(ROOT / "train.py", root)
        for file in (root / "symjax").rglob("*.py"):
            file.write_text(file.read_text().replace("float32", "float64"))
        return train(name, Path(folder, "run"), root, JAX_ENABLE_X64="1")["losses"]


def _train(cost: Path, words: list[str]) -> int:
    """Run train.py in this process, and write the cost of its largest program."""
    import jax

    if jax.config.read("jax_enable_x64"):
        jax.numpy.float32 = jax.numpy.float64  # the default dtype of Flax's weights
    compile_it, most = jax.stages.Lowered.compile, -1.0

    def compiled(self, *arguments, **options):
        nonlocal most
        program = compile_it(self, *arguments, **options)
        found, memory = program.cost_analysis(), program.memory_analysis()
        if found and memory and found["flops"] > most:
            most = found["flops"]
            names = {"flops": most, "bytes accessed": found["bytes accessed"]}
            names["temporary bytes"] = memory.temp_size_in_bytes
            cost.write_text(json.dumps(names))
        return program

    jax.stages.Lowered.compile = compiled
    sys.argv = ["train.py", *words]
    sys.path[0] = str(ROOT)
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return 0


def evaluate(name: str, workdir: Path) -> dict[str, Any]:
    """Return the JSON of eval.py, and the text that it samples."""
    tasks = f"length,{TASKS}" if name in LONG else TASKS
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        words = ["--workdir", str(workdir.absolute()), "--json", str(file)]
        words += ["--tasks", tasks, "--batches", "2", "--tokens", "24"]
        _, _, sample = _run("eval.py", *words).partition("sample:\n")
        return json.loads(file.read_text()) | {"sample": sample}


def _run(*words: str, root: Path = ROOT, **environment: str) -> str:
    """Return the output of a Python program on one CPU device; exit if it fails."""
    changes = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=root, env=os.environ | changes, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def generated_text(words: int = 12_000) -> str:
    """Return sentences of a Markov chain over forty made-up words.

    A linear congruential generator makes the text the same in all versions of Python.
    """
    state = 1

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) * below >> 31

    letters = "aeiou", "bdfgklmnprst"
    names = [
        "".join(letters[(i + 1) % 2][draw(5 + 7 * ((i + 1) % 2))] for i in range(n))
        for n in (2 + draw(6) for _ in range(40))
    ]
    followers = [[draw(40) for _ in range(4)] for _ in names]
    found, word = [], 0
    for place in range(words):
        end = "\n" if place % 12 == 11 else " "
        found.append(names[word] + end)
        word = followers[word][min(draw(4), draw(4))]  # the first is the likeliest
    return "".join(found)


def _json(found: dict[str, Any]) -> str:
    """Return the JSON with a line for each part of a model."""
    lines = [f' "made_with": {json.dumps(found["made_with"])},', ' "models": {']
    for name, model in found["models"].items():
        parts = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in model.items()]
        lines += [f"  {json.dumps(name)}: {{", ",\n".join(parts), "  },"]
    lines[-1] = "  }"
    return "\n".join(["{", *lines, " }", "}"]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
