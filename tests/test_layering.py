"""Imports run in one direction: a part of symjax imports only from lower parts."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SYMJAX = ROOT / "symjax"
# The parts of symjax, the lowest first; docs/getting-started.md draws the lowest last.
# A part may import from itself and from lower parts.
ORDER = (
    {"optional", "starting", "storage", "tables"},
    {"attention", "figures"},
    {"config", "imports"},
    {"validation"},
    {"layers"},
    {"models", "data", "distributed"},
    {"checkpoints", "monitor"},
    {"training"},
    {"estimate", "exchange"},
    {"evaluation"},
    {"programs"},
)
# Exceptions: lower parts that a part must not import.
MAY_NOT = {
    "attention": {"optional", "starting", "storage"},
    "data": {"attention", "layers", "imports", "validation"},
}
MAY: dict[str, set[str]] = {"__init__": set()}
for line_of_name in ORDER:
    for name in line_of_name:
        lower = {other for line in ORDER[: ORDER.index(line_of_name)] for other in line}
        MAY[name] = {name} | lower - MAY_NOT.get(name, set())
MAY["starting"] = {"programs"}  # inside functions, after its line is printed
FILES = sorted(SYMJAX.rglob("*.py"))


def part_of(path):
    return path.relative_to(SYMJAX).parts[0].removesuffix(".py")


def imported(path, tree=None):
    """Return every absolute module name that a file imports."""
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def parts_of(path, tree=None):
    names = [name.split(".") for name in imported(path, tree)]
    return {name[1] for name in names if name[0] == "symjax" and len(name) > 1}


def is_alias(path):
    """Return whether a file only runs a program of a newer name."""
    return "run_module" in path.read_text() and path.parent.name == "evaluation"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_in_one_direction(path):
    assert parts_of(path) <= MAY[part_of(path)] or is_alias(path)


def test_every_part_is_known_and_no_file_is_called_utils():
    assert {part_of(path) for path in FILES} <= MAY.keys()
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers")]


@pytest.mark.parametrize("module", ["jax", "flax", "numpy"])
def test_configuration_and_data_know_no_framework(module):
    """Data knows numpy, configurations not even that; neither knows the model."""
    for path in FILES:
        if part_of(path) in ("config", "validation") or (
            part_of(path) == "data" and module != "numpy"
        ):
            assert module not in {name.split(".")[0] for name in imported(path)}


PACKAGES = [path for path in FILES if path.name == "__init__.py"]


@pytest.mark.parametrize(
    "path", PACKAGES, ids=lambda x: str(x.parent.relative_to(ROOT))
)
def test_the_docstring_of_a_package_names_its_files(path):
    document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    files = {other.stem for other in path.parent.glob("*.py")} - {"__init__"}
    assert files <= set(re.findall(r"\w+", document))


def test_attention_never_mentions_flax():
    for path in FILES:
        if part_of(path) == "attention":
            assert not re.search("flax", path.read_text(encoding="utf-8"), re.I)


def test_the_library_knows_neither_the_programs_nor_the_configurations():
    for path in FILES:
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"train", "eval", "configs", "tests", "benchmarks"}


ATTENTION = SYMJAX / "attention"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in ATTENTION.rglob("*.py")
    if path.name != "__init__.py"
}


def modules_of_attention(path):
    """Return the modules of attention that a file imports, or names of which."""
    names = set(imported(path))
    return {x for x in MODULES if any(y == x or y.startswith(f"{x}.") for y in names)}


@pytest.mark.parametrize(
    "path", sorted(ATTENTION.glob("*.py")), ids=lambda path: path.stem
)
def test_a_mechanism_imports_no_kernel(path):
    """It names the family of its kernels, and `kernels.dispatch` chooses."""
    assert not [x for x in modules_of_attention(path) if ".kernels." in x]


@pytest.mark.parametrize(
    "path",
    sorted((ATTENTION / "kernels").rglob("*.py")),
    ids=lambda path: str(path.relative_to(ATTENTION / "kernels")),
)
def test_a_kernel_imports_only_the_core_and_kernels(path):
    parts = {x.split(".")[2] for x in modules_of_attention(path)}
    assert parts <= {"core", "kernels"}


def test_no_import_inside_attention_leads_back_and_levels_are_few():
    """Adapters of kernels are imported by `kernels.dispatch` when they are called."""
    left = {name: modules_of_attention(path) - {name} for name, path in MODULES.items()}
    levels = 0
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
        levels += 1
    assert not left
    assert levels <= 8


def test_configurations_are_data():
    for path in (ROOT / "configs").glob("*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"jax", "flax", "optax", "numpy"}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from symjax import data", {"data"}),
        ("import symjax.training.loop", {"training"}),
        ("def f():\n    from symjax.evaluation import report", {"evaluation"}),
        ("from ..models import decoder", {"models"}),
        ("from . import rows", {"layers"}),
        ("import numpy", set()),
    ],
)
def test_every_way_of_importing_is_seen(code, found):
    assert parts_of(SYMJAX / "layers" / "block.py", ast.parse(code)) == found


def test_attention_is_there_after_the_plain_import():
    code = "import symjax; assert callable(symjax.attention.softmax)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_two_test_files_have_one_name():
    """pytest imports them by it."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
