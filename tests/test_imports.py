"""Code of users is stored with the run, and runs only when asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mechanisms_of_users import SOFTCAP, forgotten
from runs import ROOT, SECONDS, call, environment, words, write_text

import symjax
from symjax import imports
from symjax.attention import MECHANISMS
from symjax.imports.sources import sha256
from symjax.programs.commandline import parse

pytestmark = pytest.mark.usefixtures("cache")
OTHER = f"{SOFTCAP}\n# Another file.\n"
CHOSEN = {"model.attention.mechanism": "softcap", "model.attention.symmetric": "none"}
CHOSEN |= {"model.attention.differential": "none"}


@pytest.fixture(autouse=True)
def new_process():
    with forgotten():
        yield


@pytest.fixture
def softcap(tmp_path):
    path = tmp_path / "softcap.py"
    path.write_text(SOFTCAP)
    return path


def given(folder, *more, **changes):
    """Return words that train a small model with the mechanism of the file."""
    keys = {name.replace(".", "__"): value for name, value in CHOSEN.items()}
    keys |= {"steps": 2} | changes
    return words(write_text(folder), folder / "run", *map(str, more), **keys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """Return a run whose file of the mechanism is deleted."""
    folder = tmp_path_factory.mktemp("softcap")
    path = folder / "softcap.py"
    path.write_text(SOFTCAP)
    with forgotten():
        assert call("train", given(folder, "--import", path)) == 0
    path.unlink()
    return folder / "run"


def program(name, *arguments, folder):
    """Run a program in a process of its own; return (exit code, stdout, stderr)."""
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, arguments)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    more |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment() | more,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_run_outlives_the_file_of_its_mechanism(softcap, tmp_path):
    """One process trains, the next is refused, and one that may run the code reads it.

    The last one runs in another folder.
    """
    arguments = given(tmp_path, "--import", "softcap.py")
    code, out, err = program("train", *arguments, folder=tmp_path)
    assert code == 0, err
    softcap.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    asked = ["--workdir", tmp_path / "run", "--tasks", "loss", "--batches", "1"]
    code, out, err = program("eval", *asked, folder=elsewhere)
    hashed = sha256(SOFTCAP)
    assert code == 2 and err.count("\n") == 2 and "\nerror: " in err
    assert f"needs softcap.py (sha256 {hashed[:12]})" in err
    assert "--import stored" in err
    code, out, err = program("eval", *asked, "--import", "stored", folder=elsewhere)
    assert code == 0 and "held-out loss" in out and "sha256" not in err, err


def test_an_unknown_mechanism_names_the_flag(tmp_path):
    with pytest.raises(ValueError, match="'softcap' is unknown: .*--import FILE"):
        parse(given(tmp_path))


def test_stored_code_never_runs_unasked(trained):
    for asked in ((), "show"):
        with pytest.raises(ValueError, match="run it with --import stored"):
            symjax.load(trained, imports=asked)
        assert "softcap" not in MECHANISMS
    symjax.load(trained, imports="stored")
    assert "softcap" in MECHANISMS


def test_consent_ends_with_the_call(trained):
    symjax.load(trained, imports="stored")
    with forgotten():
        with pytest.raises(ValueError, match="--import stored"):
            symjax.load(trained)


def test_the_stored_code_can_be_printed(trained, capsys):
    asked = ["--workdir", str(trained), "--import", "show"]
    assert call("eval", asked) == 2
    said = capsys.readouterr()
    assert SOFTCAP in said.out and sha256(SOFTCAP) in said.out
    assert said.err.count("\n") == 1


def test_a_file_that_differs_from_the_stored_one_is_named(trained, softcap, capsys):
    softcap.write_text(OTHER)
    symjax.load(trained, imports=softcap)
    said = capsys.readouterr().err
    assert "code differs from what checkpoint 2" in said and said.count("\n") == 1
    assert sha256(SOFTCAP)[:12] in said


def test_resuming_with_other_code_is_refused_unless_allowed(softcap, tmp_path, capsys):
    assert call("train", given(tmp_path, "--import", softcap)) == 0
    softcap.write_text(OTHER)
    with forgotten():
        again = given(tmp_path, "--import", softcap, steps=3)
        assert call("train", again) == 2
        assert "imports: softcap.py (sha256 " in capsys.readouterr().err
        assert call("train", [*again, "--allow", "imports"]) == 0
        said = capsys.readouterr().err
        assert "changed from step 2: imports: softcap.py (sha256 " in said


def test_a_run_resumes_from_its_stored_code(softcap, tmp_path, capsys):
    assert call("train", given(tmp_path, "--import", softcap)) == 0
    softcap.unlink()
    with forgotten():
        again = given(tmp_path, steps=3)
        assert call("train", again) == 2
        assert call("train", [*again, "--import", "stored"]) == 0
        assert "resumed at step 2" in capsys.readouterr().err


def test_weights_come_from_a_run_by_its_stored_code(trained, tmp_path, capsys):
    changes = {"init_from": trained, "model__attention__mechanism": "softmax"}
    begun = given(tmp_path, **changes)
    assert call("train", begun) == 2
    said = capsys.readouterr().err
    assert "init_from: " in said and "--import stored" in said
    assert call("train", [*begun, "--import", "stored"]) == 0
    own = given(tmp_path, "--import", "stored", "--workdir", str(tmp_path / "own"))
    assert call("train", [*own, f"--config.init_from={trained}"]) == 0


def test_a_configuration_that_adds_its_mechanism_is_stored(tmp_path, capsys):
    """With the helpers that it imports, which are deleted afterwards."""
    (tmp_path / "capped_scores.py").write_text(SOFTCAP)
    path = tmp_path / "capped.py"
    path.write_text(
        "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\n"
        "import capped_scores\nsys.path.pop(0)\n"
        "from symjax.programs.commandline import default\n\n\n"
        "def get_config():\n    config = default()\n"
        "    config.model.attention.mechanism = 'softcap'\n    return config\n"
    )
    sizes = [x for x in given(tmp_path) if "attention" not in x][2:]
    assert call("train", ["--config", str(path), *sizes]) == 0
    sys.modules.pop("capped_scores")
    for name in ("capped_scores.py", "capped.py"):
        (tmp_path / name).unlink()
    with forgotten():
        with pytest.raises(ValueError, match="needs capped.py .* adds mechanism soft"):
            symjax.load(tmp_path / "run")
        symjax.load(tmp_path / "run", imports="stored")
        assert "softcap" in MECHANISMS
    sys.modules.pop("capped_scores")


def test_a_mechanism_that_no_import_added_is_named(softcap, tmp_path, capsys):
    exec(SOFTCAP, {})
    assert call("train", given(tmp_path)) == 0
    assert "not stored: the code of mechanism softcap" in capsys.readouterr().err


def test_a_module_is_found_from_the_current_folder(tmp_path, monkeypatch):
    package = tmp_path / "zoo_of_users"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "capped.py").write_text("from .scores import *\n")
    (package / "scores.py").write_text(SOFTCAP)
    monkeypatch.chdir(tmp_path)
    with imports.using("zoo_of_users.capped"):
        (stored,) = imports.to_store({"attention": {"mechanism": "softcap"}})
    names = ["zoo_of_users/capped.py", "zoo_of_users/__init__.py"]
    assert {*stored["files"]} == {*names, "zoo_of_users/scores.py"}
    assert next(iter(stored["files"])) == names[0] == stored["name"]
    for name in [x for x in sys.modules if x.startswith("zoo_of_users")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(ROOT)
    with forgotten():
        model = {"attention": {"mechanism": "softcap"}}
        with imports.using("stored"):
            imports.require([stored], model, "checkpoint 1")
        assert "softcap" in MECHANISMS


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package with an entry point."""

    def install(name, text):
        site = tmp_path / "site"
        about = site / f"{name}-1.2.dist-info"
        about.mkdir(parents=True)
        (site / f"{name}.py").write_text(text)
        (about / "METADATA").write_text(f"Name: {name}\nVersion: 1.2\n")
        points = f"[{imports.GROUP}]\n{name} = {name}\n"
        (about / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(str(site))

    yield install
    for name in ("symjax_capped", "symjax_broken"):
        sys.modules.pop(name, None)


def test_an_installed_package_adds_mechanisms_when_a_name_is_unknown(
    installed, tmp_path
):
    installed("symjax_capped", SOFTCAP)
    assert parse(given(tmp_path, model__attention__mechanism="softmax"))
    assert "symjax_capped" not in sys.modules
    assert parse(given(tmp_path)).config.model.attention.mechanism == "softcap"
    (stored,) = imports.to_store({"attention": {"mechanism": "softcap"}})
    assert stored["package"] == "symjax_capped 1.2"


def test_a_broken_entry_point_is_named_in_one_line(installed, tmp_path):
    installed("symjax_broken", "import missing_module")
    with pytest.raises(ValueError) as error:
        parse(given(tmp_path))
    assert "package symjax_broken 1.2: ModuleNotFoundError" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (:", "SyntaxError"),
        ("import missing_module", "No module named 'missing_module'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        (f"{SOFTCAP}\n1 / 0", "ZeroDivisionError"),
    ],
)
def test_code_that_fails_is_one_line_and_adds_nothing(text, said, softcap, tmp_path):
    softcap.write_text(text)
    with pytest.raises(ValueError) as error:
        parse(given(tmp_path, "--import", softcap))
    assert str(error.value).startswith(f"--import {softcap}: ")
    assert said in str(error.value) and "softcap" not in MECHANISMS


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("missing.py", "there is no such file"),
        ("missing_module.part", "No module named 'missing_module'"),
        ("two words", "give a file (FILE.py), a module (PACKAGE.MODULE)"),
        ("", "give a file (FILE.py)"),
        ("itertools", "ModuleNotFoundError|has no Python source"),
    ],
)
def test_what_cannot_be_imported_is_named(word, said, tmp_path):
    with pytest.raises(ValueError) as error:
        parse(given(tmp_path, "--import", word))
    assert any(x in str(error.value) for x in said.split("|"))


def test_two_files_that_add_one_name_are_refused(softcap, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(OTHER)
    with pytest.raises(ValueError, match="softcap.py both add mechanism softcap"):
        parse(given(tmp_path, "--import", softcap, "--import", other))


def test_a_file_runs_once_in_a_process_and_must_not_change(softcap):
    with imports.using(str(softcap)):
        first = MECHANISMS["softcap"]
    with imports.using([str(softcap)]):
        assert MECHANISMS["softcap"] is first
    softcap.write_text(OTHER)
    with pytest.raises(ValueError, match="has changed since this process ran it"):
        with imports.using(str(softcap)):
            pass


@pytest.mark.parametrize(
    "harm",
    [
        lambda x: x["files"].update({"../out.py": ""}),
        lambda x: x["files"].update({"/out.py": ""}),
        lambda x: x["files"].update({"softcap.py": "print('other')"}),
        lambda x: x["files"].update({"": ""}),
        lambda x: x["files"].update({"folder/./out.py": ""}),
        lambda x: x["files"].update({"out.txt": ""}),
        lambda x: x["files"].update({"line\nend.py": ""}),
        lambda x: x["files"].update({"out.py": "\ud800"}),
        lambda x: x.update(module="os"),
        lambda x: x.update(adds=["mechanism softcap", "\x1b[2J"]),
        lambda x: x.update(files=3),
        lambda x: x.update(files={}),
        lambda x: x.pop("sha256"),
    ],
)
def test_damaged_stored_code_is_refused(harm, softcap):
    model = {"attention": {"mechanism": "softcap"}}
    with imports.using(str(softcap)):
        stored = json.loads(json.dumps(imports.to_store(model)))
    harm(stored[0])
    with forgotten(), imports.using("stored"):
        with pytest.raises(ValueError, match="are damaged"):
            imports.require(stored, model, "checkpoint 1")
    assert not Path("../out.py").exists()


def stored_code(folder, text=SOFTCAP, **modules):
    """Return what a run stores of a file that imports these modules."""
    for name, content in modules.items():
        (folder / f"{name}.py").write_text(content)
    path = folder / "capped_by_parts.py"
    path.write_text("".join(f"import {name}\n" for name in modules) + text)
    with forgotten(), imports.using(path):
        (stored,) = imports.to_store({"attention": {"mechanism": "softcap"}})
    for name in modules:
        sys.modules.pop(name, None)
    while str(folder) in sys.path:
        sys.path.remove(str(folder))
    return stored


def require(stored, given="stored"):
    with imports.using(given):
        imports.require([stored], {"attention": {"mechanism": "softcap"}}, "run")


@pytest.mark.parametrize("name", ["antigravity", "tensorboardX", "symjax", "jax"])
def test_stored_code_takes_the_place_of_no_installed_module(name, tmp_path):
    stored = stored_code(tmp_path)
    stored["files"][f"{name}.py"] = f"raise RuntimeError('this is no {name}')"
    with pytest.raises(ValueError, match=f"{name}.py has the name of an installed"):
        require(stored)
    assert "softcap" not in MECHANISMS
    stored = stored_code(tmp_path, f"import {name}\n{SOFTCAP}")
    stored["files"] = {f"{name}.py": [*stored["files"].values()][0]}
    require(stored)  # a program of this name is not imported by the file
    assert "symjax-import" not in sys.modules[name].__file__


def test_stored_code_refuses_another_module_of_its_name(tmp_path):
    stored = stored_code(tmp_path, parts_of_a_cap="cap = 3")
    assert [*stored["files"]] == ["capped_by_parts.py", "parts_of_a_cap.py"]
    other = stored | {"files": stored["files"] | {"parts_of_a_cap.py": "cap = 4"}}
    with pytest.raises(ValueError, match=r"needs .*, parts_of_a_cap.py \(sha256"):
        require(other, ())
    require(stored)
    with forgotten():
        with pytest.raises(ValueError, match="imported another parts_of_a_cap.py"):
            require(other)
        assert "softcap" not in MECHANISMS
    del sys.modules["parts_of_a_cap"]


def test_a_module_that_is_imported_in_a_function_is_found_and_stored(tmp_path):
    (tmp_path / "late_cap.py").write_text("import still_later\n")
    (tmp_path / "still_later.py").write_text("CAP = 3\n")
    late = "    import late_cap\n    weights = jax.nn"
    text = SOFTCAP.replace("    weights = jax.nn", late)
    stored = stored_code(tmp_path, text)
    names = ["capped_by_parts.py", "late_cap.py", "still_later.py"]
    assert sorted(stored["files"]) == names
    for name in names:
        (tmp_path / name).unlink()
    require(stored)
    x = np.ones((1, 2, 1, 2), np.float32)
    MECHANISMS["softcap"].attend(x, x, x)
    for name in ("late_cap", "still_later"):
        del sys.modules[name]


def test_code_that_failed_runs_again_as_a_whole(tmp_path):
    (tmp_path / "parts_of_a_cap.py").write_text(SOFTCAP)
    path = tmp_path / "capped.py"
    path.write_text("import parts_of_a_cap\n1 / 0")
    with pytest.raises(ValueError, match="division by zero"), imports.using(path):
        pass
    path.write_text("import parts_of_a_cap")
    with imports.using(path):
        assert "softcap" in MECHANISMS
    del sys.modules["parts_of_a_cap"]


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path):
    stored = stored_code(tmp_path, f"\ufeff{SOFTCAP}")
    require(stored)
    assert "softcap" in MECHANISMS


def test_a_file_that_replaces_what_symjax_has_is_refused(softcap):
    before = MECHANISMS["softmax"]
    softcap.write_text(
        SOFTCAP.replace('MECHANISMS["softcap"]', 'MECHANISMS["softmax"]')
    )
    with pytest.raises(ValueError, match="replaces mechanism softmax, which symjax"):
        with imports.using(softcap):
            pass
    assert MECHANISMS["softmax"] is before


def test_a_module_leaves_the_order_of_the_path(softcap, monkeypatch):
    monkeypatch.chdir(softcap.parent)
    softcap.rename("module_of_a_cap.py")
    monkeypatch.syspath_prepend(str(softcap.parent))
    before = list(sys.path)
    with imports.using("module_of_a_cap"):
        assert sys.path == before
    assert sys.path == before
    del sys.modules["module_of_a_cap"]


def test_printed_code_hides_nothing_in_a_terminal(tmp_path, capsys):
    stored = stored_code(tmp_path, f"{SOFTCAP}x = 1  # \u202e \x1b[1A\x1b[2K\n")
    with pytest.raises(ValueError, match="--import stored"):
        require(stored, "show")
    out = capsys.readouterr().out
    assert r"\u202e \x1b[1A\x1b[2K" in out and "\x1b" not in out


def test_a_run_stores_only_what_its_model_may_need(softcap):
    with imports.using(str(softcap)):
        assert imports.to_store({"attention": {"mechanism": "softcap"}})
        assert not imports.to_store({"attention": {"mechanism": "softmax"}})
        pattern = {"attention": {"mechanism": "softmax"}, "pattern": ["softcap"]}
        assert imports.to_store(pattern)


def test_a_folder_of_weights_stores_the_code(trained, tmp_path):
    symjax.save_pretrained(symjax.load(trained, imports="stored"), tmp_path / "out")
    with forgotten():
        with pytest.raises(ValueError, match="symjax.json needs softcap.py"):
            symjax.load_pretrained(tmp_path / "out")
        loaded = symjax.load_pretrained(tmp_path / "out", imports="stored")
        assert loaded.config.model.attention.mechanism == "softcap"
