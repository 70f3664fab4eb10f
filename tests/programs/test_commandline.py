"""The command line of train.py: the meaning of words, and refusals in one line."""

import errno
import importlib
import os
import signal
import sys
import tomllib

import pytest
from runs import ROOT, words

from symjax import validation
from symjax.distributed import exit_codes
from symjax.distributed.exit_codes import Interrupted, Stopped, run_and_exit
from symjax.programs import commandline
from symjax.programs.commandline import parse

CONFIG = f"{ROOT}/configs/diff_sym.py:tiny"


@pytest.mark.parametrize(
    "given",
    [
        "--config.model.depth=5",
        "--config.model.depth 5",
        "--config.model.depth=4 --config.model.depth=5",
    ],
)
def test_a_key_is_given_by_an_equals_sign_or_by_a_space(given):
    assert parse(["--config", CONFIG, *given.split()]).config.model.depth == 5


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.betas", "(0.8, 0.9)", (0.8, 0.9)),
        ("optimizer.betas", "0,0.5", (0.0, 0.5)),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("optimizer.clip", "2", 2.0),
        ("model.tie_embeddings", "True", True),
        ("model.tie_embeddings", "no", False),
        ("data.path", "a=b --c", "a=b --c"),
        ("mesh.fsdp", "-1", -1),
    ],
)
def test_a_value_has_the_type_of_its_key(key, text, value):
    found = validation.to_dict(
        parse(["--config", CONFIG, f"--config.{key}={text}"]).config
    )
    for part in key.split("."):
        found = found[part]
    assert found == value and type(found) is type(value)


def test_a_preset_is_named_after_a_colon():
    sizes = {
        preset: parse(["--config", f"{ROOT}/configs/gpt.py{preset}"]).config.model
        for preset in ("", ":3l", ":6l", ":8l", ":tiny")
    }
    assert [model.depth for model in sizes.values()] == [3, 3, 6, 8, 2]
    assert sizes[""] == sizes[":3l"]


@pytest.mark.parametrize("name", ["gpt", "sym", "diff", "diff_sym", "norm_sym"])
def test_the_workdir_is_named_after_the_configuration(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = f"{ROOT}/configs/{name}.py"
    assert parse(["--config", path]).workdir == tmp_path / "runs" / name
    tiny = parse(["--config", f"{path}:tiny"]).workdir
    assert tiny == tmp_path / "runs" / f"{name}-tiny"
    assert parse(["--config", path, "--workdir", "x/y"]).workdir == tmp_path / "x" / "y"


def test_each_allow_counts():
    words = ["--allow", "seed", "--allow=batch_size, steps"]
    command = parse(["--config", f"{ROOT}/configs/gpt.py", *words])
    assert command.allow == ("seed", "batch_size", "steps")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--config.model.widht=3"],
            "config.model.widht is unknown: choose from model.w",
        ),
        (["--config.wibble=3"], "choose from steps, batch_size, seed"),
        (["--config.model=3"], "config.model is unknown"),
        (["--config.model.width=abc"], "config.model.width must be int, got 'abc'"),
        (["--config.model.width=1.5"], "must be int, got '1.5'"),
        (["--config.model.bias=maybe"], "config.model.bias must be bool, got 'maybe'"),
        (["--config.optimizer.betas=1"], "must be tuple[float, float], got '1'"),
        (["--config.optimizer.betas=(1,2,3)"], "optimizer.betas"),
        (["--config.model.image=(0.9,1,3)"], "got (0.9, 1, 3)"),
        (["--config.optimizer.clip=nan"], "optimizer.clip"),
        (["--config.model.attention.mechanism=performr"], "performr"),
        (["--config.model.attention.mechanism=performr"], "cosine"),
        (["--config.data.source=web"], "'web' is unknown: choose from stdlib, text"),
        (["--config.log.profile=9:3"], "log.profile '9:3': the steps count from 1"),
        (["--config.log.profile=9000:9001"], "begins after the last step"),
        (["--config.steps=0"], "steps must be at least 1, got 0"),
        (["--config.steps"], "--config.steps needs a value"),
        (["--config.steps", "--dry_run"], "--config.steps needs a value"),
        (["wibble"], "stray argument 'wibble'"),
        (["--wibble"], "--wibble is unknown: choose from --config"),
        (["--workdir="], "--workdir is empty"),
        (["--workdir"], "--workdir"),
        (["--allow", "batch_sizes"], "config.batch_sizes is unknown: choose from bat"),
        (["--dry_run=1"], "--dry_run"),
        (
            ["--dry_run", "--pack"],
            "--dry_run packs and checks no data: leave --pack out",
        ),
        (
            ["--dry_run", "--verify"],
            "--dry_run packs and checks no data: leave --verify out",
        ),
        (["--config", "configs/wibble.py"], "configs/diff_sym.py"),
        (["--config", "wibble"], "configs/diff_sym.py"),
        (["--config", f"{ROOT}/configs/gpt.py:huge"], "choose from 3l, 6l, 8l, tiny"),
        (["--config", ""], "no configuration file"),
    ],
)
def test_bad_words_are_named_with_their_choices(given, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError) as error:
        parse(["--config", CONFIG, *given])
    assert said in str(error.value)


def test_without_a_configuration_the_choices_are_named(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match="--config FILE is needed.*configs/gpt.py"):
        parse([])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (:", "SyntaxError"),
        ("import wibble", "No module named 'wibble'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("x = 1", "has no function get_config"),
        ("def get_config(): return {}", "must return the ConfigDict"),
        ("def get_config():\n 1 / 0", "ZeroDivisionError"),
        (
            "from configs import base\ndef get_config():\n"
            " c = base.get_config()\n c.model.widht = 3\n return c",
            "model.widht is unknown: choose from",
        ),
        (
            "from configs import base\ndef get_config():\n"
            " c = base.get_config()\n c.model.width = '3'\n return c",
            "width",
        ),
    ],
)
def test_a_broken_configuration_file_is_named(content, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        parse(["--config", str(path)])
    assert said in str(error.value)


@pytest.mark.parametrize("former, present", [(True, "silu"), (False, "none")])
def test_a_configuration_file_may_have_former_values(former, present, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import base\ndef get_config():\n c = base.get_config()\n"
        f" c.model.attention.output_gate = {former}\n return c"
    )
    assert parse(["--config", str(path)]).config.model.attention.output_gate == present
    path.write_text(path.read_text().replace(str(former), "3"))
    with pytest.raises(ValueError, match="output_gate must be str, got 3"):
        parse(["--config", str(path)])


def test_a_configuration_finds_its_base_from_any_directory(tmp_path, monkeypatch):
    """The base of its own project: the nearest folder configs/ above it."""
    mine = tmp_path / "project" / "configs" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("from configs import ground\nget_config = ground.get_config\n")
    ground = "from symjax.programs.commandline import default as get_config\n"
    (mine.parent / "ground.py").write_text(ground)
    monkeypatch.chdir(tmp_path)
    elsewhere = [x for x in sys.path if x not in ("", str(ROOT))]
    monkeypatch.setattr(sys, "path", elsewhere)
    for name in [x for x in sys.modules if x.split(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    assert parse(["--config", CONFIG]).config.model.width == 128
    assert parse(["--config", "project/configs/mine.py"]).config.model.width == 256
    assert sys.path == elsewhere


def test_presets_of_a_file_without_presets_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def get_config(): return None")
    with pytest.raises(ValueError, match="no presets, got 'tiny'"):
        parse(["--config", f"{path}:tiny"])


def test_help_has_every_key_with_type_value_meaning_and_choices():
    text = commandline.help_text(parse(["--help"]).config)
    entries = {part.split(" ")[0]: part for part in text.split("  --config.")}
    for name, kind, field in validation.fields():
        assert f"{name} ({validation.type_name(kind)}, " in entries[name]
        assert field.metadata["meaning"] in entries[name]
        assert all(choice in entries[name] for choice in validation.choices(field))
    assert "--config.steps (int, 3000)" in text


def test_help_shows_the_values_of_the_configuration_it_is_given():
    command = parse(["--config", CONFIG, "--help", "--config.seed=7"])
    text = commandline.help_text(command.config)
    assert command.help == ""
    assert "--config.model.width (int, 128)" in text
    assert "--config.seed (int, 7)" in text


def test_help_of_a_group_has_its_keys_alone():
    command = parse(["--config", CONFIG, "--help", "model"])
    text = commandline.help_text(command.config, command.help)
    shown = {x.split(" ")[0] for x in text.split("  --config.")[1:]}
    assert shown == {x for x, _, _ in validation.fields() if x.startswith("model.")}
    assert text.startswith("model:\n") and "\n\nmodel.attention:\n" in text
    assert "--config.model.width (int, 128)" in text
    with pytest.raises(ValueError, match="--help modl: choose from model, model.rope"):
        commandline.help_text(command.config, "modl")


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("symjax-train", ["--config", CONFIG, "--help", "log"], "log.every (int, 20)"),
        ("symjax-eval", ["--list"], "loss "),
    ],
)
def test_the_installed_commands_run_from_any_directory(
    script, words, said, tmp_path, monkeypatch, capsys
):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts[script].partition(":")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as end:
        getattr(importlib.import_module(module), name)()
    assert end.value.code == 0 and said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("a\n  b"), 2, "error: a b"),
        (FloatingPointError("nan at step 3"), 1, "stopped: nan at step 3"),
        (OSError(errno.ENOSPC, "No space left", "file"), 2, "No space left: file"),
        (MemoryError("too much"), 1, "out of memory (too much)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Stopped(signal.SIGTERM), 143, "interrupted: nothing more was saved"),
        (Interrupted(15, "saved checkpoint 3"), 143, "saved checkpoint 3"),
    ],
)
def test_every_expected_end_is_one_line_and_a_code(error, code, said, capsys):
    def run():
        raise error

    with pytest.raises(SystemExit) as end:
        run_and_exit(run)
    captured = capsys.readouterr()
    assert end.value.code == code
    assert captured.out == ""
    assert said in captured.err and captured.err.count("\n") == 1


def test_an_unexpected_error_keeps_its_traceback():
    with pytest.raises(KeyError):
        run_and_exit(lambda: {}["wibble"])


def test_the_words_of_the_small_run_are_what_they_say(tmp_path):
    command = parse(words(tmp_path / "text", tmp_path / "w", "--dry_run", seed=9))
    assert command.dry_run and command.workdir == tmp_path / "w"
    assert command.config.model.width == 32 and command.config.seed == 9


def test_what_one_of_several_processes_meets_alone_ends_it_at_once(monkeypatch, capsys):
    """It does not wait for other processes, as an ordinary exit does.

    The same holds for a lost connection, which jax may raise as a ValueError.
    """
    ended = []
    monkeypatch.setattr(exit_codes, "is_distributed", lambda: True)
    monkeypatch.setattr(os, "_exit", ended.append)
    lost = "UNKNOWN: Gloo AllGather failed: Connection closed by peer"
    for error in (ValueError("no room"), ValueError(lost)):

        def run(error=error):
            raise error

        with pytest.raises(SystemExit):
            run_and_exit(run)
    said = capsys.readouterr().err.splitlines()
    assert ended == [2, 1]
    assert said == [
        "error: no room",
        f"stopped: another process or its connection has failed ({lost})",
    ]
