"""Correctness and speed of symjax on this machine's device, beside other libraries.

    python benchmarks/device.py --seconds 540 --json rows.json [--wheels FOLDER]

Rows are measured in the order of the list in device_rows.py. A row is compiled,
checked, timed, printed and added to --json before the next row starts. Rows that would
not fit into --seconds are skipped and named at the end.

The same command continues: rows that --json has from the same device, the same sources
of symjax and the same jax are not measured again. Rows that are tried again come after
all other rows: those with a fault, those that the end of a call cut off, those whose
rival was not ready in time (once), and those that lacked a library which is installed
now. Rows of the study also depend on --text, --seeds and --steps.
Exit code 1: a row of symjax has a fault. Exit code 2: a wrong option.

machine      ceilings of the device: speed of a matrix product and of a copy
attention    causal attention in bfloat16, forward + backward and forward alone,
             interleaved with our softmax and with other libraries: cuDNN through
             jax.nn, PyTorch's SDPA, flash-linear-attention (fla) and
             jax-linear-attention (jla)
correctness  outputs and gradients of float32 and bfloat16 inputs against float64 on the
             CPU: ‖found − wanted‖ / ‖wanted‖, the largest of all operands
decode       tokens per second after contexts of several lengths
steps        training steps of models of 125M and 350M parameters: tokens per second and
             MFU
crossover    attention beside our softmax, for longer sequences
study        the Shakespeare study on --text FILE. --together runs train at a time, each
             in a separate process, in --out; the same command resumes them
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

from arguments import folder, numbers, output, positive, text_file, wheels
from device_process import Found, Measuring
from device_rows import LONGEST, PARTS, ROWS, SECONDS, SMALL, Row, Sizes, attention
from trainings import SAVING

ROOT = Path(__file__).resolve().parents[1]
WEEK = 7 * 24 * 3600  # seconds
# Beginnings of the reasons why a rival is missing if time did not suffice.
OUT_OF_TIME = "OutOfTime", "not finished"
STUDY_LEAST = 45  # seconds: runs are stopped 30 s before the end, and take 10 to start


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=positive, help="limit of the whole call (none)")
    add("--json", type=output, metavar="FILE", help="write a line per row here")
    add("--wheels", type=wheels, metavar="FOLDER", help="install what is missing")
    add("--part", choices=PARTS)
    add("--only", default="", metavar="TEXT", help="rows whose name contains it")
    add("--lengths", type=positive, nargs="+", help="tokens of the attention rows")
    add("--text", type=text_file, metavar="FILE", help="text of the study")
    add("--seeds", type=numbers, default=Sizes().seeds, help="seeds of the study")
    add("--steps", type=positive, help="steps of each run of the study (30,000)")
    add(
        "--together",
        type=positive,
        default=Sizes().together,
        help="runs of the study at a time",
    )
    add("--out", default=Sizes().out, help="folder of the study (%(default)s)")
    add("--small", action="store_true", help="sizes for a CPU")
    return parser.parse_args(words)


def chosen(options: argparse.Namespace) -> list[Row]:
    """Return the rows that the options ask for, in order."""
    rows = list(ROWS)
    if options.lengths:
        others = [x for x in rows if x.part != "attention"]
        rows = [*attention(list(dict.fromkeys(options.lengths))), *others]
    if options.text is None and options.part != "study":
        rows = [x for x in rows if x.part != "study"]
    parts = [options.part] if options.part else PARTS
    return [x for x in rows if x.part in parts and options.only in x.name]


def install(found: Sequence[Path], target: str) -> None:
    """Install the wheels that are missing into a folder, and use this folder.

    Raises:
        CalledProcessError: pip failed; it has printed why.
    """
    missing = [x for x in found if not _installed(x)]
    if missing:
        words = "pip install --quiet --no-index --no-deps --no-compile".split()
        words += ["--disable-pip-version-check", "--target", target]
        subprocess.run([sys.executable, "-m", *words, *missing], check=True)
        use(target)


def _installed(wheel: Path) -> bool:
    name, version, *_ = wheel.name.split("-")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def use(folder: str) -> None:
    """Import from this folder first, in this process and in its children."""
    sys.path.insert(0, folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))


def revision() -> str:
    """Return a hash of the sources of symjax, without git."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "symjax").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def libraries() -> Found:
    """Return the versions of the libraries that rows compare with, by name."""
    found = {}
    rivals = "flash-linear-attention", "jax-linear-attention"
    for name in ("torch", "transformers", *rivals):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Records:
    """Measured rows of this device and these sources, in a file of JSON lines.

    Args:
        common: values that a row of the file must have to count: device, revision of
            symjax, version of jax, and --small.
        study: values that rows of the study must have, too: text, seeds and steps.
        libraries: the result of `libraries` now. A row that lacks a rival is measured
            again if the libraries were others when it was measured.

    A row with a rival that was not ready in time is measured again once, in a later
    call, when programs that Triton has tuned are in its cache.
    """

    def __init__(
        self,
        file: Path | None,
        common: Found,
        study: Found | None = None,
        libraries: Found | None = None,
    ):
        self.file, self.common, self.libraries = file, common, libraries or {}
        self.study = study or {}
        self.rows: dict[str, Found] = {}
        if file and file.exists():
            self._read(file)

    def _read(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                row = dict(json.loads(line))
                name, part, _ = (row[x] for x in ("name", "part", "seconds"))
            except (ValueError, TypeError, KeyError):
                print(f"{file}: line {number} is no row; left out", file=sys.stderr)
                continue
            if all(row.get(x) == y for x, y in self._wanted(part).items()):
                self.rows[name] = row
        if text and not text.endswith("\n"):  # a call was killed while it wrote
            with file.open("a", encoding="utf-8") as lines:
                lines.write("\n")

    def _wanted(self, part: str) -> Found:
        return self.common | (self.study if part == "study" else {})

    def add(self, row: Row, found: Found) -> None:
        record = {"name": row.name, "part": row.part, **self._wanted(row.part), **found}
        reasons = [x.get("missing") for x in found.get("rivals", {}).values()]
        if any(reasons):
            record["libraries"] = self.libraries
        late = any(x and x.startswith(OUT_OF_TIME) for x in reasons)
        if late and "rivals" not in self.rows.get(row.name, {}):
            record["again"] = True
        self.rows[row.name] = record
        if self.file:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")

    def complete(self, row: Row) -> bool:
        record = self.rows.get(row.name, {"fault": ""})
        same = record.get("libraries", self.libraries) == self.libraries
        return same and not record.keys() & {"fault", "again"}

    def estimate(self, row: Row) -> float:
        """Estimate the seconds of a row by those of measured rows of its part."""
        typical = SECONDS[row.part] / (4 if self.common["small"] else 1)
        if row.part == "study":
            return max(typical, STUDY_LEAST)
        rows = [x for x in self.rows.values() if x["part"] == row.part]
        alike = [x["seconds"] for x in rows if "again" not in x]
        return mean(alike) if alike else typical


def measure(rows: list[Row], records: Records, worker: Measuring, end: float) -> int:
    """Measure, record and print one row after the other.

    Args:
        end: time.monotonic() at which all must be over.

    Returns:
        The number of rows that have a fault.
    """
    faults, skipped = 0, []
    # Rows that were tried before have a fault, were cut off or lack a rival. They come
    # last, except those of the study, which continue.
    for row in sorted(rows, key=lambda x: x.part != "study" and x.name in records.rows):
        left = end - time.monotonic()
        if records.estimate(row) > left:
            skipped.append(row.name)
            continue
        longest = left if row.part == "study" else min(left, LONGEST)
        try:
            found = worker.measure(row, longest)
        except EOFError:
            print("the measuring process does not restart", file=sys.stderr)
            return faults + 1
        if found.pop("late", False) and left < LONGEST and row.part != "study":
            skipped.append(row.name)
            if row.name not in records.rows:
                records.add(row, {"seconds": found["seconds"], "again": True})
            continue
        records.add(row, found)
        faults += "fault" in found
        print(*row_lines(row.name, found), sep="\n", flush=True)
    if skipped:
        print(f"\n{len(skipped)} rows did not fit into the time:", *skipped, sep="\n  ")
    return faults


def row_lines(name: str, found: Found) -> Sequence[str]:
    """Return the line of a row, and a line for each rival."""
    rivals = found.get("rivals", {})
    figures = {x: y for x, y in found.items() if x != "rivals"}
    return [_line(f"{name:68}", figures)] + [
        _line(f"{'':8}{rival:60}", row) for rival, row in rivals.items()
    ]


def _line(head: str, figures: Found) -> str:
    return "  ".join([head, *(f"{x} {_number(y)}" for x, y in figures.items())])


def _number(value: object) -> str:
    if isinstance(value, float) and abs(value) < 1e3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="wheels-") as installed:
        return run(parse(words), installed)


def run(options: argparse.Namespace, installed: str) -> int:
    """Measure the rows that the options ask for, and return the exit code.

    Args:
        installed: an empty folder for wheels.
    """
    began = time.monotonic()
    if options.part == "study" and options.text is None:
        print("study: it needs a text: --text FILE", file=sys.stderr)
        return 2
    rows = chosen(options)
    if not rows:
        wanted, options.only = options.only, ""
        names = "\n  ".join(x.name for x in chosen(options))
        print(f"no name contains {wanted!r}: choose from\n  {names}", file=sys.stderr)
        return 2
    sizes = (SMALL if options.small else Sizes())._replace(
        text=options.text and str(options.text),
        seeds=options.seeds,
        together=options.together,
        out=options.out,
    )
    if options.steps:
        sizes = sizes._replace(steps=options.steps)
    # PyTorch needs memory of the device, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    use(str(ROOT))
    try:
        if options.wheels:
            install(options.wheels, installed)
        if any(x.part == "study" for x in rows):
            folder(options.out)
    except subprocess.CalledProcessError:
        print("--wheels: pip cannot install them, as it says above", file=sys.stderr)
        return 2
    except argparse.ArgumentTypeError as error:
        print(f"--out: {error}", file=sys.stderr)
        return 2
    try:
        worker = Measuring(sizes)
    except EOFError:
        return 1
    common = {
        "device": worker.device,
        "revision": revision(),
        "jax": importlib.metadata.version("jax"),
        "small": options.small,
    }
    study = {"seeds": sizes.seeds, "steps": sizes.steps}
    if options.text:
        study["text"] = hashlib.sha256(options.text.read_bytes()).hexdigest()[:12]
    records = Records(options.json, common, study, libraries())
    left = [x for x in rows if not records.complete(x)]
    passed = time.monotonic() - began
    print(f"{worker.device}, ready after {passed:.0f} s, {len(left)} rows", end="")
    print(f", {len(rows) - len(left)} more are in the file already", flush=True)
    end = began + (options.seconds or WEEK)
    try:
        return int(measure(left, records, worker, end) > 0)
    finally:
        worker.end(SAVING)


if __name__ == "__main__":
    # Let `main` delete the folder of installed wheels, and end its process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
