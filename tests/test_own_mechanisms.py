"""Mechanisms, feature maps and decays of users, in everything a model goes through.

The files have a logit soft-cap with an option, a feature map, and a gated recurrence
with an option.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mechanisms_of_users import OTHERS, SOFTCAP, USED, forgotten
from runs import ROOT, call, words, write_text

import symjax
from symjax import config, imports, layers, validation
from symjax.attention import MECHANISMS
from symjax.distributed.exit_codes import run_and_exit
from symjax.models.build import build, weights_and_constants
from symjax.models.convert import changes, convert
from symjax.programs import compare, harness
from symjax.programs.commandline import help_text, parse

pytestmark = pytest.mark.usefixtures("cache")
CAP = "model.attention.options.cap"


@pytest.fixture(autouse=True)
def new_process():
    with forgotten():
        yield


@pytest.fixture
def softcap(tmp_path):
    path = tmp_path / "softcap.py"
    path.write_text(SOFTCAP)
    return str(path)


def chosen(keys):
    return [f"--config.model.attention.{x}={y}" for x, y in (OTHERS | keys).items()]


def command(name, folder, *more):
    """Return words that train a small model with one of `USED`, whose file is
    written."""
    text, keys = USED[name]
    path = folder / f"{name}.py"
    path.write_text(text)
    given = ["--import", str(path), *chosen(keys), *map(str, more)]
    return words(write_text(folder), folder / "run", *given, steps=2)


def capped(path, *more):
    given = ["--config", f"{ROOT}/configs/gpt.py:tiny", "--import", path]
    return parse([*given, "--config.model.attention.mechanism=softcap", *more])


def test_an_option_of_a_mechanism_is_a_key_of_its_type(softcap):
    assert capped(softcap).config.model.attention.options == {"cap": 30.0}
    found = capped(softcap, f"--config.{CAP}=5").config.model.attention.options
    assert found == {"cap": 5.0} and type(found["cap"]) is float


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([f"--config.{CAP}=0"], f"{CAP} must be in [0.1, inf], got 0.0"),
        ([f"--config.{CAP}=nan"], f"{CAP} must be in [0.1, inf], got nan"),
        ([f"--config.{CAP}=x"], f"config.{CAP} must be float, got 'x'"),
        ([f"--config.{CAP[:-1]}=1"], f"is unknown: choose from {CAP}"),
        (["--config.model.attention.options=3"], "model.attention.options is unknown"),
        (["--allow", f"{CAP}s"], f"{CAP}s is unknown: choose from {CAP}"),
        (
            ["--config.model.attention.mechanism=softmax", f"--config.{CAP}=1"],
            "the mechanism declares no options",
        ),
    ],
)
def test_a_wrong_option_of_a_mechanism_is_named(more, said, softcap):
    with pytest.raises(ValueError) as error:
        capped(softcap, *more)
    assert said in str(error.value)


def test_a_configuration_sets_an_option(softcap, tmp_path):
    path = tmp_path / "capped.py"
    path.write_text(
        "from symjax.programs.commandline import default\n\n\n"
        "def get_config():\n    config = default()\n"
        "    config.model.attention.mechanism = 'softcap'\n"
        "    config.model.attention.options.cap = 7\n    return config\n"
    )
    found = parse(["--config", str(path), "--import", softcap]).config
    assert found.model.attention.options == {"cap": 7.0}
    with pytest.raises(ValueError, match=f"{CAP} 7: softmax has no such option"):
        more = ["--config.model.attention.mechanism=softmax"]
        parse(["--config", str(path), "--import", softcap, *more])


def test_help_shows_the_options_that_mechanisms_declare(softcap):
    text = help_text(capped(softcap, f"--config.{CAP}=5", "--help").config)
    assert f"--config.{CAP} (float, 5.0)" in text
    assert "of softcap: no score is larger" in text
    assert "one of: elu, identity" in text and "one of: retention" in text


def test_a_conversion_names_an_option_that_differs(softcap):
    before, after = (
        capped(softcap, f"--config.{CAP}={x}").config.model for x in (5, 6)
    )
    assert changes(before, before) == []
    assert changes(before, after) == [f"{CAP} 5.0 → 6.0"]


def test_an_option_is_stored_and_must_agree_with_the_checkpoint(softcap):
    before, after = (capped(softcap, f"--config.{CAP}={x}").config for x in (5, 6))
    tree = json.loads(json.dumps(validation.to_dict(before)))
    assert validation.from_dict(tree) == before
    found = validation.differences(before, after)
    assert found == {CAP: f"{CAP}: 5.0 → 6.0"}
    assert not validation.differences(before, before)
    tree["model"]["attention"]["options"] = {}  # a run from before the option existed
    assert validation.from_dict(tree).model.attention.options == {"cap": 30.0}


@pytest.mark.parametrize("tree", [3, {"cap": "x"}, {"cup": 1.0}, {"cap": [1.0]}])
def test_stored_options_that_are_none_are_refused(tree, softcap):
    stored = validation.to_dict(capped(softcap).config)
    stored["model"]["attention"]["options"] = tree
    with pytest.raises(ValueError, match=r"model\.attention\.options"):
        validation.from_dict(stored)


@pytest.mark.parametrize("differential", ["none", "v1", "v2"])
def test_a_layer_gives_its_mechanism_the_option(softcap, differential):
    """A large cap changes nothing; a small cap changes the output."""
    x = np.random.default_rng(0).normal(size=(2, 9, 32)).astype(np.float32)

    def output(**changes):
        chosen = config.Attention(differential=differential, **changes)
        options = config.Model(width=32, heads=2, attention=chosen)
        layer = layers.Attention(options, 0, rngs=nnx.Rngs(0))
        cache, rows = layer.init_cache(2, 9), []
        for t in range(9):
            row, cache = layer.decode(x[:, t : t + 1], cache, np.full(2, t))
            rows.append(row)
        whole = layer(x)
        np.testing.assert_allclose(jnp.concatenate(rows, axis=1), whole, atol=2e-6)
        return whole

    with imports.using(softcap):
        wide, narrow = (
            output(mechanism="softcap", options={"cap": cap}) for cap in (1e4, 0.1)
        )
    np.testing.assert_allclose(wide, output(), atol=1e-5)
    assert np.abs(wide - narrow).max() > 1e-3


def test_a_function_with_options_is_its_definition(softcap):
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 7, 3, 5))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(5)
    weights = np.tril(np.exp(0.5 * np.tanh(scores / 0.5)))
    weights /= weights.sum(axis=-1, keepdims=True)
    wanted = np.einsum("bnts,bsnv->btnv", weights, value)
    arrays = [np.asarray(x, np.float32) for x in (query, key, value)]
    with imports.using(softcap):
        attend = MECHANISMS["softcap"].attend
    found = attend(*arrays, is_causal=True, cap=0.5)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    with pytest.raises(ValueError, match=r"softcap: cap must be in \[0.1, inf\]"):
        attend(*arrays, cap=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cup'"):
        attend(*arrays, cup=1.0)


def test_two_mechanisms_that_declare_one_option_differently_are_refused(softcap):
    with imports.using(softcap):
        form = MECHANISMS["softcap"]
        option = form.declared["cap"]
        other = dataclasses.replace(form.attend, own={"cap": option._replace(least=1)})
        MECHANISMS["other"] = form._replace(attend=other)
        model = config.Model(pattern=("softcap", "other"))
        with pytest.raises(ValueError, match=f"{CAP} is declared in two ways"):
            validation.check(model, "model.")


def test_a_pattern_gives_each_mechanism_its_options(softcap):
    model = config.Model(
        width=32,
        heads=2,
        depth=2,
        vocabulary=9,
        length=8,
        pattern=("softcap", "softmax"),
        attention=config.Attention(options=config.OwnOptions(cap=0.5)),
    )
    with imports.using(softcap):
        built = build(model, rngs=nnx.Rngs(0))
        assert built(jnp.zeros((1, 8), int)).shape == (1, 8, 9)
        plain = dataclasses.replace(model, attention=config.Attention(), pattern=())
        weights = convert(weights_and_constants(built)[0], model, plain)
    assert weights.keys() == weights_and_constants(built)[0].keys()


def test_weights_of_a_decay_of_users_are_converted(tmp_path):
    """To two branches of a head, which share the gate of the head, and to softmax."""
    (tmp_path / "leaky.py").write_text(USED["leaky"][0])
    chosen = config.Attention(mechanism="leaky", decay="sigmoid")
    model = config.Model(width=16, heads=2, depth=1, vocabulary=9, attention=chosen)
    with imports.using(str(tmp_path / "leaky.py")):
        weights, _ = weights_and_constants(build(model, rngs=nnx.Rngs(0)))
        assert weights["blocks"][0]["attention"]["decay"]["up"]["bias"].shape == (2,)
        both = dataclasses.replace(chosen, differential="v1")
        target = dataclasses.replace(model, attention=both)
        twice = convert(weights, model, target)["blocks"][0]["attention"]["decay"]
        before = weights["blocks"][0]["attention"]["decay"]["up"]["kernel"]
        np.testing.assert_array_equal(
            twice["up"]["kernel"], np.repeat(before, 2, axis=-1)
        )
        softmax = dataclasses.replace(model, attention=config.Attention())
        found = convert(weights, model, softmax)["blocks"][0]["attention"]
        assert "decay" not in found and "head_norm" not in found


def program(main, *given):
    try:
        run_and_exit(lambda: main([*map(str, given)]))
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_a_run_goes_everywhere(name, tmp_path, monkeypatch, capsys):
    """A run is trained, resumed, evaluated by all tasks, compared and loaded.

    It is also continued, converted, exported and read again, and evaluated by the
    harness; each time as in a new process, and from another folder.
    """
    given = command(name, tmp_path)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert call("train", given) == 0
    monkeypatch.chdir(elsewhere)
    with forgotten():
        assert call("train", [*given, "--config.steps=4"]) == 0
    (tmp_path / f"{name}.py").unlink()
    stored = ["--import", "stored"]
    out = ["--json", elsewhere / "all.json", "--out", elsewhere / "out"]
    with forgotten():
        asked = ["--workdir", run, "--tasks", "all", "--batches", 1, *out, *stored]
        assert call("eval", [*map(str, asked)]) == 0
        assert json.loads((elsewhere / "all.json").read_text())["step"] == 4
    with forgotten():
        asked = ["--workdirs", run, "--out", elsewhere / "compared", "--batches", 1]
        assert program(compare.main, *asked) == 2
        assert "--import stored" in capsys.readouterr().err
        assert program(compare.main, *asked, *stored) == 0
    with forgotten():
        loaded = symjax.load(run, imports="stored")
        text = loaded.generate("3 sheep", 5, temperature=0)
        assert symjax.save_pretrained(loaded, elsewhere / "folder") == "symjax"
    with forgotten():
        with pytest.raises(ValueError, match=f"needs {name}.py .*--import stored"):
            symjax.load_pretrained(elsewhere / "folder")
        again = symjax.load_pretrained(elsewhere / "folder", imports="stored")
        assert again.generate("3 sheep", 5, temperature=0) == text
        assert again.config.model.attention == loaded.config.model.attention
    for origin in (run, elsewhere / "folder"):
        with forgotten():
            begun = words(tmp_path / "text.txt", elsewhere / f"from {origin.name}")
            changed = OTHERS | {"mechanism": "softmax"}
            begun += [*chosen(changed), f"--config.init_from={origin}"]
            assert call("train", [*begun, "--config.steps=1"]) == 2
            assert "init_from: " in capsys.readouterr().err
            assert call("train", [*begun, "--config.steps=1", *stored]) == 0
    (elsewhere / "tasks").mkdir()
    (elsewhere / "tasks" / "sheep.yaml").write_text(
        f"task: sheep\ndataset_path: json\ndataset_kwargs:\n"
        f"  data_files: {elsewhere}/sheep.json\noutput_type: loglikelihood\n"
        "test_split: train\ndoc_to_text: '{{asked}}'\ndoc_to_target: '{{answer}}'\n"
    )
    (elsewhere / "sheep.json").write_text('{"asked": "1 sheep", "answer": ", 1"}\n')
    with forgotten():
        asked = ["--workdir", run, "--tasks", "sheep", "--include", elsewhere / "tasks"]
        assert program(harness.main, *asked) == 2
        assert program(harness.main, *asked, *stored) == 0


@pytest.mark.slow
def test_compare_trains_runs_of_one_file_over_values_of_its_option(softcap, tmp_path):
    text = write_text(tmp_path)
    given = [x for x in words(text, None, steps=2)[2:]] + chosen({})
    asked = ["--configs", f"{ROOT}/configs/gpt.py:tiny", "--out", tmp_path / "out"]
    asked += ["--import", softcap, "--vary", f"{CAP}=5,50", "--batches", 1, *given]
    asked.append("--config.model.attention.mechanism=softcap")
    assert program(compare.main, *asked) == 0
    table = (tmp_path / "out" / "compare.csv").read_text()
    assert "gpt-tiny-cap=5" in table and "gpt-tiny-cap=50" in table
