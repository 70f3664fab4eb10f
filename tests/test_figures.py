"""Figures: colours of values, and curves through points."""

import io

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from symjax.figures import Dots, Grid, Lines, Panels, Spread, png, smoothed


def shows(figure, name, *shares):
    """Return whether areas of the image have these colours, up to rounding."""
    image = Image.open(io.BytesIO(png(figure, dpi=40))).convert("RGB")
    areas = [colour for count, colour in image.getcolors(1 << 20) if count > 100]
    wanted = 255 * colormaps[name](np.array(shares))[:, None, :3]
    return (np.abs(wanted - areas).max(axis=-1) < 2).any(axis=1).tolist()


def leaves(figure):
    """Return whether something is drawn at the edge of the image, where it is cut
    off."""
    image = np.array(Image.open(io.BytesIO(png(figure))).convert("L"))
    edges = image[[0, -1]].ravel(), image[:, [0, -1]].ravel()
    return bool((np.concatenate(edges) < 255).any())


def grid(*values, **more):
    labels = [str(i) for i in range(len(values))]
    return Grid("grid", "key", "query", labels, ["0"], [list(values)], **more)


def test_signed_numbers_have_colours_on_both_sides_of_zero():
    figure = grid(-1.0, 0.0, 4.0, None)
    assert all(shows(figure, "RdBu_r", 3 / 8, 0.5, 1.0))
    assert shows(figure, "RdBu_r", 1 / 8) == [False]


def test_positive_numbers_begin_at_zero_also_where_none_is_there():
    assert all(shows(grid(2.0, 4.0), "Blues", 0.5, 1.0))


def test_grids_side_by_side_have_one_scale():
    figure = Panels("both", "in words", (grid(1.0, 2.0), grid(0.5, 0.25)))
    assert all(shows(figure, "Blues", 0.5, 1.0, 0.25, 0.125))
    figure = figure._replace(signed=True)
    assert all(shows(figure, "RdBu_r", 0.75, 1.0, 0.625, 0.5625))


def test_beyond_the_limit_is_the_last_colour():
    assert all(shows(grid(1.0, 9.0, limit=2.0), "Blues", 0.5, 1.0))


LONG = "Random features against exact softmax, the model's own queries and keys, " * 3


@pytest.mark.parametrize(
    "figure",
    [
        Lines("lines", LONG, LONG, {"a": ([1, 2], [1.0, 2.0])}, title=LONG),
        grid(1.0, 2.0, title=LONG)._replace(x_label=LONG, y_label=LONG),
        Panels("both", LONG, (grid(1.0, 2.0, title=LONG), grid(0.5, 0.25))),
        Dots("dots", LONG, {"a": Spread([1.0, 2.0], 1.5, 0.5, 2.5)}, LONG),
    ],
    ids=lambda figure: type(figure).__name__,
)
def test_long_titles_and_labels_stay_in_the_figure(figure):
    assert not leaves(figure)


def test_a_band_is_drawn_around_its_curve():
    lines = Lines("lines", "x", "y", {"a": ([1, 2, 3], [1.0, 1.5, 2.0])})
    bands = {"a": ([0.0, 1.0, 1.0], [2.0, 2.0, 4.0])}
    image = Image.open(io.BytesIO(png(lines._replace(bands=bands)))).convert("RGB")
    bluish = [
        count
        for count, (red, _, blue) in image.getcolors(1 << 20)
        if blue - red > 25 and red > 190  # the line's colour, and much white
    ]
    assert sum(bluish) > 0.05 * image.width * image.height


def test_a_band_around_a_single_point_is_drawn():
    lines = Lines("lines", "x", "y", {"a": ([30.0], [1.0])})
    image = Image.open(io.BytesIO(png(lines._replace(bands={"a": ([0.0], [2.0])}))))
    red, _, blue = np.moveaxis(np.array(image.convert("RGB"), int), -1, 0)
    rows = (blue - red > 25).any(axis=1)
    assert rows.mean() > 0.5


def test_whole_numbers_are_the_ticks_of_a_single_point(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self)
    )
    png(Lines("rank", "layer", "y", {"a": ([0], [1.0])}))
    [axes] = drawn[0].axes
    assert [n for n in axes.get_xticks() if abs(n) < 1] == [0]


def test_rows_of_dots_are_sorted_by_their_means_and_have_intervals(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self)
    )
    rows = {
        "best": Spread([-1.0, -3.0], -2.0, -4.0, 0.5),
        "worst": Spread([2.0], 2.0),
        "middle": Spread([0.0, 1.0], 0.5, -1.0, 2.5),
    }
    png(Dots("differences", "x", rows))
    [axes] = drawn[0].axes
    labels = [x.get_text() for x in axes.get_yticklabels()]
    assert labels == ["worst", "middle", "best"]  # from below
    dots = [tuple(x.get_xdata()) for x in axes.get_lines() if len(x.get_xdata()) == 2]
    assert (-4.0, 0.5) in dots and (-1.0, 2.5) in dots and (-1.0, -3.0) in dots


def test_the_same_figure_is_the_same_bytes_and_a_title_changes_them():
    lines = Lines("lines", "x", "y", {"a": ([1, 2, 3], [1.0, None, 2.0])})
    assert png(lines) == png(lines) != png(lines._replace(title="in words"))


def test_smoothing_is_a_mean_by_a_gaussian_without_what_is_unknown():
    x, y, weights = [0.0, 1.0, 3.0, 4.0], [1.0, None, 5.0, -2.0], [1, 2, 3, 1]
    for place, found in zip(x, smoothed(x, y, 1.5, weights), strict=True):
        near = np.exp(-(((place - np.array(x)) / 1.5) ** 2) / 2) * weights
        known = [(n, v) for n, v in zip(near, y, strict=True) if v is not None]
        wanted = sum(n * v for n, v in known) / sum(n for n, _ in known)
        assert found == pytest.approx(wanted)
    assert smoothed(x, [2.0] * 4, 0.1) == pytest.approx([2.0] * 4)
