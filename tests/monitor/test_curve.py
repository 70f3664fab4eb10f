"""metrics.png is drawn if possible, and is never a reason to fail."""

import json
import sys

from symjax.monitor import curve


def write(folder, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


ROWS = [{"step": n, "train/loss": 5.0 / n} for n in range(1, 1001)]
HELDOUT = [{"step": n, "heldout/loss": 6.0 / n} for n in (500, 1000)]


def test_a_long_run_is_drawn_by_means_and_every_heldout_loss():
    nothing = {"step": 1001, "train/loss": None}
    figure = curve.loss_curve([*ROWS, *HELDOUT, nothing], "byte")
    x, y = figure.points["training"]
    assert len(x) == 400 and x[0] == 2 and y[0] == (5 + 5 / 2 + 5 / 3) / 3
    assert figure.series["held out"] == ([500, 1000], [6 / 500, 6 / 1000])
    assert figure.y_label == "nats/byte"


def test_the_curve_says_on_how_many_batches_it_is():
    rows = [row | {"heldout/batches": 20.0} for row in HELDOUT]
    assert [*curve.loss_curve(rows, "byte").series] == ["held out, 20 batches"]
    rows[1]["heldout/batches"] = 30.0
    assert [*curve.loss_curve(rows, "byte").series] == ["held out"]


def test_one_point_is_no_curve(tmp_path):
    write(tmp_path, ROWS[0], HELDOUT[0])
    curve.draw(tmp_path, "byte")
    assert not (tmp_path / curve.NAME).exists()


def test_it_is_written_whole(tmp_path):
    write(tmp_path, *ROWS[:9])
    curve.draw(tmp_path, "byte")
    assert (tmp_path / curve.NAME).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def test_without_matplotlib_nothing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(tmp_path, *ROWS[:9])
    curve.draw(tmp_path, "byte")
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / curve.NAME).exists()


def test_a_picture_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(figure):
        raise RuntimeError("no fonts")

    write(tmp_path, *ROWS[:9])
    monkeypatch.setattr(curve, "png", fail)
    curve.draw(tmp_path, "byte")
    assert capsys.readouterr().err == (
        "metrics.png is not drawn (RuntimeError: no fonts)\n"
    )


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    def full(folder, *names):
        raise OSError(28, "No space left on device")

    write(tmp_path, *ROWS[:9])
    monkeypatch.setattr(curve, "replaced", full)
    curve.draw(tmp_path, "byte")
    said = capsys.readouterr().err
    assert "metrics.png cannot be written (No space left on device)\n" in said
