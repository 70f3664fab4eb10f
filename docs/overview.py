"""Draw docs/overview.png: maps of three trained models on one line, and λ by layer.

    python docs/overview.py runs/gpt-tiny runs/sym-tiny runs/diff-tiny

docs/index.md has the commands that train the models.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from symjax.attention import lambda_initial
from symjax.evaluation.loading import LoadedRun, load
from symjax.evaluation.measures.reading import Layer, read
from symjax.models.lambdas import lambda_table

LINE = "x = [row for row in rows]"
LAYER = 1
TITLES = "softmax", "symmetric: keys are queries", "differential: A₁ − λA₂"
LIMIT = 0.6  # the size of weights that have the darkest colours
HIDDEN = "#e4e4e4"


def layer_of(run: LoadedRun) -> Layer:
    """Return what layer LAYER of a run does with LINE."""
    tokenizer = run.examples.tokenizer
    return read(run.model(), tokenizer.encode(LINE))[LAYER]


def draw_map(axes, layer: Layer, title: str):
    """Draw the mean of the heads' maps, in colours from −LIMIT to LIMIT."""
    values = layer.map.mean(axis=0).astype(np.float64)
    values[np.triu_indices(len(values), 1)] = np.nan
    axes.set_facecolor(HIDDEN)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(LINE)), LINE, fontsize=7)
    axes.set_yticks(range(len(LINE)), LINE, fontsize=7)
    axes.tick_params(length=0, pad=1)
    return axes.imshow(values, cmap="RdBu_r", vmin=-LIMIT, vmax=LIMIT)


def draw_lambda(axes, run: LoadedRun) -> None:
    """Draw λ of every layer beside its initial value."""
    learned = [row["lambda"] for row in lambda_table(run.model())]
    layers = range(len(learned))
    axes.plot(layers, list(map(lambda_initial, layers)), "o--", color="0.6")
    axes.plot(layers, learned, "o-", color="tab:red")
    axes.set_title("λ of differential attention", fontsize=10)
    axes.legend(["at the start", "after training"], fontsize=7)
    axes.set_xticks(layers)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylim(0, None)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def drawing(runs: list[LoadedRun]) -> Figure:
    """Draw the maps of the three runs, and λ of the last one."""
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    *places, last = figure.subplots(1, 4)
    for axes, run, title in zip(places, runs, TITLES, strict=True):
        shown = draw_map(axes, layer_of(run), title)
    bar = figure.colorbar(shown, ax=places, extend="max", shrink=0.85)
    bar.ax.tick_params(labelsize=7)
    draw_lambda(last, runs[-1])
    return figure


if __name__ == "__main__":
    figure = drawing([load(folder) for folder in sys.argv[1:]])
    path = Path(__file__).with_name("overview.png")
    figure.savefig(path, dpi=110, metadata={"Software": None})
