"""Values of --tune, and the held-out rows that choose them."""

from types import SimpleNamespace

import numpy as np
import pytest

from symjax.config import Data
from symjax.data import generated
from symjax.data.batches import Examples, heldout_windows
from symjax.data.examples import generated_examples
from symjax.programs.comparison import tuned
from symjax.programs.comparison.tuned import Choice, split, tune

LENGTH = 7


def examples(**parts):
    rest = dict.fromkeys(("read_training", "size", "unit"), "")
    rest |= {"check_length": None, "vocabulary": 0, "language": {}, "fingerprint": {}}
    return Examples(**rest, references={}, **parts)  # pyright: ignore


def text(tokens):
    """Windows of a text whose tokens are their own places."""
    return examples(
        read_heldout=lambda n, length: heldout_windows(np.arange(tokens), n, length),
        heldout_rows=lambda length: -(-(tokens - 1) // length),
        longest=tokens - 1,
    )


def labels(count):
    """Labelled rows; a row after the last one repeats it with weight 0."""

    def heldout(numbers, length):
        row = np.minimum(numbers, count - 1)[:, None]
        return row, row, (numbers < count).astype(np.float32)[:, None]

    return examples(
        read_heldout=heldout, heldout_rows=lambda _: count, labels=("a", "b")
    )


def targets(part, length=LENGTH, rows=3):
    """Return the targets of weight 1 of all batches of a part."""
    found = []
    for batch in part.heldout_batches((rows, length)):
        _, target, weights = batch(0, rows)
        assert set(np.unique(weights)) <= {0, 1}
        found += target[weights > 0].tolist()
    return found


@pytest.mark.parametrize("tokens", [9, 16, 60, 113])
def test_every_target_of_a_text_is_in_one_part(tokens):
    choosing, judging = split(text(tokens), LENGTH)
    both = targets(choosing), targets(judging)
    assert sorted(both[0] + both[1]) == list(range(1, tokens))
    assert both[0] and both[1]
    if tokens == 113:
        assert len(both[0]) / len(both[1]) == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("length", [3, 14, 28])
def test_windows_of_other_lengths_keep_to_the_rows_that_judge(length):
    choosing, judging = split(text(113), LENGTH)
    found = targets(judging, length)
    assert found and not {*found} & {*targets(choosing)}
    assert judging.longest == 84 and judging.heldout_rows(84) == 1


@pytest.mark.parametrize("count", [2, 4, 5, 23])
def test_every_label_is_in_one_part(count):
    choosing, judging = split(labels(count), LENGTH)
    chosen = targets(choosing)
    assert chosen == list(range(0, count, 4))
    assert sorted(chosen + targets(judging)) == list(range(count))


def test_rows_of_a_generated_task_choose_that_no_task_measures():
    data = Data(source="mqar", items=4, symbols=16, asked=2)
    choosing, judging = split(generated_examples(data), 32)
    (one, other) = (x.read_heldout(np.arange(9), 32)[0] for x in (choosing, judging))
    assert not {*map(bytes, one)} & {*map(bytes, other)}
    assert generated.is_heldout(one).all() and judging.heldout_rows is None


def test_a_single_row_cannot_be_divided():
    with pytest.raises(ValueError, match="--tune divides held-out rows: 1 row"):
        split(text(5), LENGTH)


def plan(losses, monkeypatch):
    """Return a plan of two seeds, and the list of the runs that will be trained."""
    commands = {
        name: {x: [(name, x, seed) for seed in (5, 6)] for x in values}
        for name, values in losses.items()
    }
    trained = []

    def measured(command, batches):
        trained.append(command)
        return losses[command[0]][command[1]]

    monkeypatch.setattr(tuned, "_choosing_loss", measured)
    return commands, trained


def test_the_value_of_least_loss_is_used_with_all_seeds(monkeypatch):
    losses = {"a": {"x=1": 3.0, "x=2": 2.0, "x=4": 2.5}, "b": {"x=1": 1.0, "x=2": 2.0}}
    commands, trained = plan(losses, monkeypatch)
    said = []
    runs, choices = tune(commands, None, said.append)
    assert runs == {"a": commands["a"]["x=2"], "b": commands["b"]["x=1"]}
    assert [x.value for x in choices] == ["x=2", "x=1"]
    assert [x[2] for x in trained] == [5] * 5  # the first seed alone
    assert said[0] == "--tune: a: x=2; losses: x=1 3.0000, x=2 2.0000, x=4 2.5000"
    assert "b: x=1 (the least tried); losses" in said[1]


def test_a_choice_at_the_end_of_what_was_tried_is_remarked():
    losses = {"x=1e-3": 3.0, "x=4e-3": 2.0, "x=1e-2": 1.0}
    assert "(the largest tried)" in str(Choice("a", "x=1e-2", losses))
    assert "tried" not in str(Choice("a", "x=4e-3", losses))
    assert "tried" not in str(Choice("a", "x=a", {"x=a": 1.0, "x=b": 2.0}))


def test_a_value_that_diverges_is_not_chosen(monkeypatch):
    def train(command):
        if command.value > 1:
            raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(tuned, "train_missing", train)
    run = SimpleNamespace(
        config=SimpleNamespace(batch_size=3, model=SimpleNamespace(length=LENGTH)),
        examples=text(113),
        **dict.fromkeys(("program", "params", "constants")),
    )
    shapes = []

    def means(*given):
        *_, shape, rows = given
        shapes.append((shape, len(list(rows))))
        return SimpleNamespace(loss=1.5)

    monkeypatch.setattr(tuned, "load", lambda _: run)
    monkeypatch.setattr(tuned, "means", means)
    values = {f"x={n}": [SimpleNamespace(value=n, workdir="w")] for n in (1, 2)}
    _, [choice] = tune({"a": values}, 1, str)  # pyright: ignore
    assert choice.losses == {"x=1": 1.5, "x=2": float("inf")} and choice.value == "x=1"
    assert shapes == [((3, LENGTH), 1)]
    with pytest.raises(ValueError, match="a diverges with every value: x=2"):
        tune({"a": {"x=2": values["x=2"]}}, 1, str)  # pyright: ignore
