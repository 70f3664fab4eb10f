"""The pages name every mechanism, their true costs, and error lines of the code."""

import ast
import importlib
import importlib.util
import inspect
import re

import pytest
from PIL import Image
from runs import ROOT, train, write_text

from symjax import attention, exchange, layers, models

PAGES = ROOT / "docs" / "mechanisms"
TEXTS = {path.stem: path.read_text() for path in sorted(PAGES.glob("*.md"))}
TYPES = {"Mechanism", "ScoreMechanism", "Statistics", "MECHANISMS"}
# Pages of mechanisms that users import; the index maps mechanisms to pages.
LISTED = re.findall(r"^\| \[.*?\]\((\w+)\.md\) \| (.*?) \|", TEXTS["index"], re.M)
PAGE_OF = {name: page for page, cell in LISTED for name in re.findall(r"`(\w+)`", cell)}
PUBLIC = [
    name
    for name, mechanism in attention.MECHANISMS.items()
    if mechanism.attend.__name__ in attention.__all__
]


def loaded(path):
    """Import a file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn():
    return loaded(PAGES / "draw.py")


@pytest.mark.parametrize("name", sorted({*attention.__all__} - TYPES))
def test_every_public_function_is_named_on_a_page(name):
    assert any(re.search(rf"\b{name}\b", text) for text in TEXTS.values())


def test_the_index_lists_the_mechanisms_that_users_import():
    assert PAGE_OF.keys() == {*PUBLIC} and len(PUBLIC) > 10


@pytest.mark.parametrize("name", PUBLIC)
def test_a_page_has_the_cost_the_key_and_the_source_of_its_mechanism(name):
    page, mechanism = TEXTS[PAGE_OF[name]], attention.MECHANISMS[name]
    assert f"`{name}`" in page or f"mechanism={name}`" in page
    assert f"mechanism={name}" in page or f"or `{name}`" in page
    assert mechanism.time in page
    assert mechanism.memory == "-" or mechanism.memory in page
    assert "**Source.**" in page


def calls():
    """Return (function, keywords, number of arguments) of calls on the pages."""
    for text in TEXTS.values():
        for code in re.findall(r"```python\n(.*?)```", text, re.S):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(
                    "attention."
                ):
                    name = ast.unparse(node.func).removeprefix("attention.")
                    yield name, [x.arg for x in node.keywords], len(node.args)


@pytest.mark.parametrize(("name", "keywords", "count"), list(calls()))
def test_the_code_of_the_pages_calls_functions_as_they_are(name, keywords, count):
    given = dict.fromkeys(keywords)
    inspect.signature(getattr(attention, name)).bind(*[None] * count, **given)


def test_pages_and_pictures_belong_together():
    pictures = {path.stem for path in PAGES.glob("*.png")}
    assert pictures == TEXTS.keys() - {"index"} == drawn().PICTURES.keys()
    for name in pictures:
        path = PAGES / f"{name}.png"
        assert f"]({path.name})" in TEXTS[name] and path.stat().st_size < 30_000


def test_the_first_pages_show_a_small_figure():
    figure = ROOT / "docs/overview.png"
    assert figure.stat().st_size < 150_000
    assert f"](docs/{figure.name})" in (ROOT / "README.md").read_text()
    assert f"]({figure.name})" in (ROOT / "docs/index.md").read_text()


@pytest.mark.slow
def test_the_figure_is_drawn_of_runs(tmp_path):
    assert train(write_text(tmp_path), tmp_path / "run", model__depth=2) == 0
    overview = loaded(ROOT / "docs/overview.py")
    figure = overview.drawing([overview.load(tmp_path / "run")] * 3)
    assert [axes.get_title() for axes in figure.axes[:3]] == [*overview.TITLES]
    (start, learned) = figure.axes[3].get_lines()
    assert start.get_ydata() == pytest.approx([0.2, 0.3555], abs=1e-4)
    assert len(learned.get_ydata()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"index"}))
def test_a_picture_is_what_the_code_draws(name, tmp_path):
    """Equal up to fonts and rounding."""
    (tmp_path / "new.png").write_bytes(drawn().picture(name))
    images = [Image.open(x) for x in (tmp_path / "new.png", PAGES / f"{name}.png")]
    one, two = (image.convert("L").resize((80, 30)) for image in images)
    pairs = zip(one.tobytes(), two.tobytes(), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 24


def messages():
    """Return every string of the code, with … for inserted values."""
    for path in (ROOT / "symjax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                known = (getattr(x, "value", None) for x in node.values)
                yield "".join(x if isinstance(x, str) else "…" for x in known)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_quoted_error_lines_are_those_of_the_code():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^`(.+)`\n\n:  ", text, re.M)
    assert len(quoted) > 20
    assert not set(quoted) - set(messages())


REFERENCE = "\n".join(x.read_text() for x in (ROOT / "docs/api").glob("*.md"))
ROOMS = (attention, layers, models, exchange)


def documented():
    """Return the dotted paths of all entries of the API reference and their members."""
    for path, options in re.findall(
        r"^::: (\S+)((?:\n    .*)*)", REFERENCE, flags=re.MULTILINE
    ):
        yield path
        for members in re.findall(r"members: \[(.*)\]", options):
            yield from (f"{path}.{name}" for name in members.split(", "))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_public_name_is_in_the_api_reference(room):
    known = {path.rpartition(".")[2] for path in documented()}
    tables = {"MECHANISMS", "TABLES"}  # entries in words
    assert {*room.__all__} - tables <= known
    assert all(f"`{name}`" in REFERENCE for name in tables)


@pytest.mark.parametrize("path", sorted(documented()))
def test_the_api_reference_names_what_is_there(path):
    parent, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(parent), name)


def test_formulas_become_mathml_that_needs_no_script():
    pytest.importorskip("latex2mathml")
    convert = loaded(ROOT / "docs/formulas.py").on_page_content
    page = convert(
        'a <span class="arithmatex">\\(s &lt; t\\)</span> b '
        '<div class="arithmatex">\\[\n\\frac{a}{b}\n\\]</div>'
    )
    assert page.count("<math") == 2 and "arithmatex" not in page
    assert "<mfrac>" in page and 'display="block"' in page and "&#x0003C;" in page


def test_pages_load_nothing_from_elsewhere():
    text = (ROOT / "mkdocs.yml").read_text()
    assert not re.search(r"https?://", text) and "font: false" in text


@pytest.fixture
def docstrings():
    pytest.importorskip("griffe")
    return loaded(ROOT / "docs/docstrings.py")


def test_sections_sources_and_tables_of_a_docstring_are_kept_apart(docstrings):
    text = """First line.

one    a row
three  another row

Args:
    x: a number.
Raises:
    ValueError: no number.
Source: Somebody 2020,
    arXiv:2006.16236."""
    assert docstrings.prepared(text).split("\n\n") == [
        "First line.",
        "```text\none    a row\nthree  another row\n```",
        "Args:\n    x: a number.",
        "Raises:\n    ValueError: no number.",
        "**Source.** Somebody 2020, arXiv:2006.16236.\n",
    ]
    short = "First line.\nRaises: ValueError: no\n    number."
    assert docstrings.prepared(short).split("\n\n") == [
        "First line.",
        "Raises:\n    ValueError: no number.",
    ]


@pytest.mark.slow
def test_score_mechanisms_are_functions_and_keys_attributes(docstrings):
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(docstrings.Docstrings())
    options = {"search_paths": [ROOT], "extensions": extensions}
    package = griffe.load("symjax", docstring_parser="google", **options)
    softmax = package["attention.softmax.softmax"]
    assert softmax.is_function and "is_causal" in softmax.parameters
    kinds = [section.kind.value for section in softmax.docstring.parsed]
    assert kinds == ["text", "parameters", "raises", "text"]
    _, keys = package["config.Mesh"].docstring.parsed
    assert [key.name for key in keys.value] == ["data", "fsdp", "tensor", "sequence"]
