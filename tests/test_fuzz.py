"""Random wrong configurations give one line, exit code 2, and no run.

Every case is wrong by construction. A seed draws what is wrong, and right choices
beside it. `pytest -m slow tests/test_fuzz.py` also draws configurations without knowing
whether they are right.
"""

import random
from dataclasses import replace

import jax
import pytest
import runs

from symjax import config, validation
from symjax.training.sharding import make_mesh
from symjax.training.step import build_program

CASES = 400
FIELDS = {name: (kind, field) for name, kind, field in validation.fields()}
# Contradicting keys, or impossible sizes: `width` is 32, `heads` 4.
IMPOSSIBLE = [
    {"model.heads": 5},
    {"model.heads": 64},
    {"model.width": 33},
    {"model.kv_heads": 3},
    {"model.kv_heads": 2},
    {"model.head_size": 7, "model.positions": "rope"},
    {"model.positions": "rope", "model.rope_share": 0.3},
    {"model.positions": "rope", "model.rope_share": 1.5},
    {"model.positions": "learned", "model.rope_base": 500.0},
    {"model.positions": "sinusoidal", "model.width": 33, "model.heads": 1},
    {"model.positions": "alibi", "model.attention.mechanism": "linear"},
    {"model.vocabulary": 10},
    {"model.vocabulary": 2**30, "model.width": 2**20},
    {"model.length": 100_000},
    {"model.dropout": 1.0},
    {"model.ponder": 0.5},
    {"model.kind": "universal", "model.pattern": "softmax,linear"},
    {"model.kind": "universal", "model.attention.mechanism": "gau"},
    {"model.attention.differential": "v2"},  # its keys are symmetric
    {"model.attention.symmetric": "none", "model.attention.key_norm": "unit"},
    {"model.attention.differential": "none", "model.attention.depth_offset": 2},
    {"model.attention.length_base": 1},
    {"model.attention.features": "relu"},
    {"model.attention.features": "hedgehog"},
    {"model.attention.feature_count": 31},
    {"model.attention.feature_norms": "constant"},
    {"model.attention.decay": "gated"},
    {"model.attention.chunk_size": 32},
    {"model.attention.mechanism": "cosine", "model.attention.mask_self": True},
    {"model.attention.mechanism": "performer", "model.attention.length_base": 9},
    {"model.attention.mechanism": "performer", "model.attention.features": "elu"},
    {"model.attention.mechanism": "linear", "model.attention.features": "positive"},
    {"model.attention.mechanism": "linear", "model.attention.implementation": "whole"},
    {"model.attention.mechanism": "gau", "model.attention.output_gate": "silu"},
    {"model.attention.mechanism": "decay", "model.attention.length_base": 7},
    {"mesh.data": 3},
    {"mesh.data": 0},
    {"mesh.data": -2},
    {"mesh.data": -1, "mesh.fsdp": -1},
    {"mesh.data": 64},
    {"mesh.tensor": 3, "mesh.data": 1},
    {"mesh.sequence": 5, "mesh.data": 1},
    {"batch_size": 9, "mesh.data": 2},
    {"batch_size": 8, "optimizer.accumulate": 3},
    {"batch_size": 2**30},
    {"optimizer.betas": "(0.9, 1.0)"},
    {"optimizer.betas": "(-0.1, 0.9)"},
    {"optimizer.eps": 0.0},
    {"optimizer.clip": -1.0},
    {"optimizer.learning_rate": -1e-3},
    {"optimizer.weight_decay": -0.1},
    {"optimizer.final": -1.0},
    {"optimizer.warmup": 6},
    {"optimizer.warmup": -1},
    {"data.source": "stdlib"},  # beside a data.path
    {"data.path": ""},
    {"data.path": "no/such/file.txt"},
    {"data.path": "/"},
    {"data.path": "*.nothing"},
    {"init_from": "no/such/run"},
    {"model.depth": 10**6},
    {"data.source": "copy", "data.path": "", "data.items": 2 * 10**9},
    {"data.source": "mqar", "data.path": "", "data.symbols": 2 * 10**9},
]
# Right choices, which do not mend any case.
BESIDE = {
    "steps": ("3", "6"),
    "seed": ("0", "77"),
    "model.activation": ("relu", "gelu", "swiglu"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.bias": ("true", "false"),
    "model.tie_embeddings": ("true", "false"),
    "model.dtype": ("float32", "bfloat16"),
    "optimizer.name": ("adamw", "lion", "sgd"),
    "checkpoint.every": ("0", "5"),
    "log.every": ("1", "7"),
}


def plain(kind):
    return getattr(kind, "__origin__", kind)


def unknown_key(draw):
    name = draw.choice(sorted(FIELDS))
    place = draw.randrange(len(name))
    letter = draw.choice("abcxyz_.0")
    wrong = draw.choice([name[:place] + name[place + 1 :], f"{name[:place]}{letter}"])
    wrong = wrong or "x"
    return [f"--config.{wrong}=1"] if wrong not in FIELDS else [f"--config.{wrong}x=1"]


def wrong_type(draw):
    texts = {
        int: ("", "one", "1.5", "[3]", "None", "1e3", "0x10", "--", "3,4", "٣x"),
        float: ("", "much", "1,5", "(1.0,)", "None", "1e", "0.1.2"),
        bool: ("", "maybe", "2", "None", "yess", "[]"),
        tuple: ("(1", "x,", "{", "(0.9,)", "(0.9, 0.9, 0.9)", "1", "('a', 'b')"),
    }
    names = [n for n, (kind, _) in FIELDS.items() if plain(kind) in texts]
    names.remove("model.pattern")  # every text is a name
    name = draw.choice(names)
    return [f"--config.{name}={draw.choice(texts[plain(FIELDS[name][0])])}"]


def out_of_range(draw):
    names = [n for n, (kind, _) in FIELDS.items() if plain(kind) in (int, float)]
    name = draw.choice(names)
    kind, field = FIELDS[name]
    least = field.metadata["least"]
    values = ["99999999999999999999", str(2**31)]
    values += [str(int(least) - 1)] if least > -1e9 else []
    values += ["nan", "inf", "-inf"] if kind is float else []
    return [f"--config.{name}={draw.choice(values)}"]


def unknown_choice(draw):
    names = [n for n, (_, field) in FIELDS.items() if validation.choices(field)]
    name = draw.choice(names)
    known = validation.choices(FIELDS[name][1])
    one = draw.choice(known)
    wrong = draw.choice([one + "s", one[:-1] or "q", one.upper(), "?", "0", "λ"])
    return [f"--config.{name}={'nothing' if wrong in known else wrong}"]


def impossible(draw):
    return [f"--config.{k}={v}" for k, v in draw.choice(IMPOSSIBLE).items()]


def stray_words(draw):
    return draw.choice(
        [
            ["now"],
            ["--config.steps"],
            ["--steps=3"],
            ["--config"],
            ["--workdir="],
            ["-x"],
            ["--config=configs/nothing.py"],
            ["--config=configs"],
            ["--config=README.md"],
            [f"--config={runs.ROOT}/configs/diff_sym.py:enormous"],
            [f"--config={runs.ROOT}/train.py"],
            ["--config.model=3"],
            ["--config.model.attention=softmax"],
            ["--config.=1"],
            ["--config..steps=1"],
        ]
    )


KINDS = (
    unknown_key,
    wrong_type,
    out_of_range,
    unknown_choice,
    impossible,
    impossible,
    stray_words,
)


@pytest.mark.parametrize("seed", range(4))
def test_wrong_configurations_end_in_one_line_and_start_nothing(
    seed, text, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    wrong = []
    for number in range(CASES // 4):
        beside = draw.sample(sorted(BESIDE), k=3)
        right = {name.replace(".", "__"): draw.choice(BESIDE[name]) for name in beside}
        words = KINDS[number % len(KINDS)](draw)
        given = runs.words(text, tmp_path / "run", *words, **right)
        code = runs.call("train", given)
        said = capfd.readouterr().err
        if code != 2 or said.count("\n") != 1 or not said.startswith("error: "):
            wrong.append((words, right, code, said))
    assert not wrong
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_any_configuration_is_refused_by_a_line_or_makes_a_training_step(seed):
    """30 configurations per seed, traced and not compiled."""
    draw = random.Random(seed)
    made = 0
    for _ in range(30):
        tree = validation.to_dict(config.Config())
        names = [n for n in FIELDS if n.startswith("model.")]
        for name in draw.sample(names, k=draw.randrange(1, 7)):
            kind, field = FIELDS[name]
            known = validation.choices(field)
            value = {
                int: draw.choice([0, 1, 2, 3, 4, 5, 8, 16, 33]),
                float: draw.choice([0.0, 0.25, 0.5, 1.0, 3.0]),
                bool: draw.random() < 0.5,
                str: draw.choice(known or ("elu", "positive", "favor#", "t2r", "")),
                tuple: tuple(draw.sample(known, k=2)) if known else (),
            }[plain(kind)]
            *groups, last = name.split(".")
            place = tree
            for group in groups:
                place = place[group]
            place[last] = value
        try:
            options = validation.from_dict(tree)
            small = replace(options.model, depth=min(options.model.depth, 2))
            small = replace(small, vocabulary=max(small.vocabulary, 1))
            options = replace(options, model=small, mesh=config.Mesh(data=1))
            program = build_program(options, make_mesh(options.mesh))
            tokens = jax.ShapeDtypeStruct((32, options.model.length), "int32")
            key = jax.eval_shape(lambda: jax.random.key(0))
            with jax.set_mesh(program.mesh):
                program.train.trace(
                    program.state, program.constants, tokens, tokens, key
                )
        except ValueError as error:
            assert "\n" not in str(error), tree
        else:
            made += 1
    assert 0 < made < 30
