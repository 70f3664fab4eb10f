"""The first line of a program appears before slow imports, from one process alone."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from symjax.starting import is_first

ROOT = Path(__file__).parent.parent
# Run a program whose slow imports fail: its output comes before them.
WITHOUT = """
import runpy, sys
for name in ("jax", "flax", "numpy", "orbax", "datasets", "etils", "ml_collections"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
program = sys.argv[0]
if program.endswith(".py"):
    runpy.run_path(program, run_name="__main__")
else:
    runpy.run_module(program, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("train.py", "train.py starts: importing jax, which takes a while"),
        ("eval.py", "eval.py starts: importing jax, which takes a while"),
        ("symjax.programs.compare", "compare starts: importing jax, which"),
        ("symjax.programs.harness", "harness starts: importing jax and lm_eval, whi"),
    ],
)
def test_a_program_speaks_before_its_slow_imports(program, line):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, program], cwd=ROOT, capture_output=True
    )
    assert done.stderr.decode().startswith(line) and not done.stdout
    assert b"import of" in done.stderr  # the next import, which fails


def test_installed_programs_speak_before_their_slow_imports():
    with open(ROOT / "pyproject.toml", "rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    for place in scripts.values():
        module, _, function = place.partition(":")
        code = WITHOUT.split("sys.argv")[0] + f"import {module} as m; m.{function}()"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True
        )
        assert done.stderr.startswith(b"symjax-"), done.stderr


@pytest.mark.parametrize(
    ("words", "environment", "first"),
    [
        ("", {}, True),
        ("--process 0", {}, True),
        ("--process 1", {}, False),
        ("--process=1 --steps 0", {}, False),
        ("--process 0", {"RANK": "1"}, True),  # flags decide
        ("", {"RANK": "0"}, True),
        ("", {"RANK": "3"}, False),
        ("", {"SLURM_PROCID": "2"}, False),
        ("", {"OMPI_COMM_WORLD_RANK": "1"}, False),
        ("", {"TPU_WORKER_ID": "1"}, False),
        ("", {"TPU_WORKER_ID": ""}, True),
    ],
)
def test_one_process_speaks(words, environment, first):
    assert is_first(words.split(), environment) == first
