"""Docstrings say what a thing is or does, and a class name belongs to one class."""

import ast
from collections import defaultdict
from pathlib import Path

SYMJAX = Path(__file__).parent.parent / "symjax"
TREES = {path: ast.parse(path.read_text("utf-8")) for path in SYMJAX.rglob("*.py")}
QUESTIONS = set("What Which Where How Of Whether That Those As Who".split())
# A group of keys and the layer that they configure; both are public.
TWICE = {"Attention"}


def test_docstrings_begin_with_a_verb_or_a_noun():
    """ "Return …", "Split …" or "State of …", not "What …" or "Whether …"."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = [x for tree in TREES.values() for x in ast.walk(tree) if type(x) in kinds]
    lines = [line for x in nodes if (line := ast.get_docstring(x))]
    riddles = [line for line in lines if line.split()[0] in QUESTIONS]
    assert len(lines) > 1000
    assert len(riddles) <= 20, "\n".join(line.splitlines()[0] for line in riddles)


def test_a_class_name_is_defined_once():
    files = defaultdict(set)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(str(path.relative_to(SYMJAX)))
    twice = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert twice.keys() <= TWICE, twice
