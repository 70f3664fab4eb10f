"""Singular values of scores and maps, similarity of tokens, chains (task `spectrum`).

If the largest singular value σ₁ of a map is far above σ₂, the map gives all tokens
almost the same vector, and a stack of such maps makes tokens alike ("rank collapse").
In softmax maps of random tokens, σ₁ belongs to the uniform map U of the visible keys:
A − U has a ratio σ₁/σ₂ near 1, and so has A₁ − λA₂ for λ near 1. The task has three
tables:

    spectrum             σ₁, σ₂ and σ₁/σ₂ of the matrices of each layer
    spectrum_similarity  how alike the tokens are after each layer
    spectrum_chains      maps without a causal mask as Markov chains (`chains`)

Numbers are means over heads and a few held-out windows, in float64.

Source: Nait Saada et al. 2024, arXiv:2410.07799 (the outlier and rank collapse); Dong
et al. 2021, arXiv:2103.03404 (collapse by depth).
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from symjax import config
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.approximation import exact_map
from symjax.evaluation.measures.attended import uniform_map
from symjax.evaluation.measures.chains import balance_error, is_stochastic, stationary
from symjax.evaluation.measures.ranks import PRODUCTS, ranks, singular_values
from symjax.evaluation.measures.reading import Layer, by_layer, nan_mean
from symjax.evaluation.measures.spread import entropies
from symjax.evaluation.measures.windows import Window
from symjax.evaluation.results import Options, Result, table
from symjax.figures import Lines
from symjax.layers.parts.table import part_of
from symjax.models.build import attentions

SMALLEST = 1e-6  # least σ/σ₁ in figures and ratios, near the rounding of float32

Spectra = dict[str, Float[np.ndarray, " k"]]


def spectrum(run: LoadedRun, options: Options) -> Result:
    """Measure singular values, the similarity of tokens, and Markov chains, by layer.

    σ₁/σ₂ is the mean of σ₁ divided by the mean of σ₂. QKᵀ (QQᵀ or QUQᵀ with symmetric
    keys) has neither scale nor mask; the maps of a decoder are causal.

    Chains need maps without a causal mask. In an encoder, the chains are the maps of
    the branches. In a decoder, they are softmax(QKᵀ/√H) without the mask, in layers
    whose mechanism is softmax.
    """
    causal = config.is_causal(run.config.model)
    layers = attentions(run.model())
    softmax = [part_of(layer.mixer.mechanism).exponential for layer in layers]

    def measure(window: Window, layer: Layer) -> tuple[Any, ...]:
        chains = layer.branches
        if causal:
            chains = unmasked(layer) if any(softmax) else None
        numbers = None if chains is None else chain_numbers(chains)
        return spectra(layer, window), likeness(layer.hidden), numbers

    matrices, curves, tokens, chains = [], {}, [], []
    for index, windows in by_layer(run, options, measure).items():
        of_spectra, of_tokens, of_chains = zip(*windows, strict=True)
        for name in of_spectra[0]:
            label = PRODUCTS[layers[index].symmetric] if name == "QKᵀ" else name
            curve = _mean_spectrum([window[name] for window in of_spectra])
            curves[index, label] = curve
            matrices.append({"layer": index, "matrix": label, **_largest(curve)})
        cosine, stable_rank = nan_mean(of_tokens).tolist()
        tokens.append({"layer": index, "cosine": cosine, "stable_rank": stable_rank})
        known = [x for x in of_chains if x is not None]
        if known and (softmax[index] or not causal):
            names = ("tokens", "largest", "balance_error")
            numbers = nan_mean(known).tolist()
            chains.append({"layer": index, **dict(zip(names, numbers, strict=True))})
    values = {"matrices": matrices, "tokens": tokens, "chains": chains}
    return _result(values, curves, causal=causal)


def _result(
    values: dict[str, list[dict[str, Any]]],
    curves: dict[tuple[int, str], list[float]],
    *,
    causal: bool,
) -> Result:
    """Return the tables and figures of the task."""
    matrices, tokens, chains = values.values()
    tables = [
        table("spectrum", ("layer", "matrix", "σ₁", "σ₂", "σ₁/σ₂"), matrices),
        table("spectrum_similarity", ("layer", "cosine", "stable rank"), tokens),
    ]
    text = [
        "singular values of scores and maps; U is the uniform map of the visible keys;",
        "cosine and stable rank of the tokens after a layer: 1 and 1 if all are alike",
    ]
    if chains:
        columns = ("layer", "tokens in π", "largest π", "error of detailed balance")
        tables.append(table("spectrum_chains", columns, chains))
        what = "softmax of QKᵀ without the causal mask" if causal else "the maps"
        text.append(f"chains: {what}; the error is 0 if reversible, and at most √2")
    elif causal:
        text.append("chains: none, the maps are causal and no layer has softmax")
    else:
        text.append("chains: none, weights are below 0 or rows do not sum to 1")
    places = [float(row["layer"]) for row in tokens]
    curve = {"cosine of two tokens": (places, [row["cosine"] for row in tokens])}
    title = "Similarity of tokens after each layer"
    figure = Lines("spectrum_similarity", "layer", "mean cosine", curve, title=title)
    return Result(
        {"spectrum": values}, text, tuple(tables), (_spectra_figure(curves), figure)
    )


def _spectra_figure(curves: dict[tuple[int, str], list[float]]) -> Lines:
    """Return the curves of σ/σ₁ by matrix: the median layer, and a band of all."""
    series, bands = {}, {}
    for name in dict.fromkeys(name for _, name in curves):
        layers = [x for (_, other), x in curves.items() if other == name and x[0] > 0]
        if layers:
            least = min(map(len, layers))  # gated layers have larger heads
            shares = np.array([np.array(x[:least]) / x[0] for x in layers])
            median = np.median(shares, axis=0)
            shares, median = (x[..., median > SMALLEST] for x in (shares, median))
            series[name] = list(map(float, range(1, median.size + 1))), median.tolist()
            low, high = np.maximum(shares, SMALLEST).min(axis=0), shares.max(axis=0)
            bands[name] = low.tolist(), high.tolist()
    return Lines(
        "spectrum",
        "number of the singular value",
        "σ / σ₁",
        series,
        log_x=True,
        title="Singular values ÷ the largest: median and range over layers",
        bands=bands,
        log_y=True,
    )


def spectra(layer: Layer, window: Window) -> Spectra:
    """Return the mean singular values of each matrix of a layer, largest first.

    The matrices are those of the task `rank`, and the map of each branch minus U.
    """
    found = singular_values(layer)
    centred = layer.branches.astype(np.float64) - uniform_map(window.visible)
    name = "A − U" if layer.lam is None else "A₁ − U, A₂ − U"
    found[name] = np.linalg.svd(centred, compute_uv=False)
    return {name: x.reshape(-1, x.shape[-1]).mean(axis=0) for name, x in found.items()}


def likeness(hidden: Float[np.ndarray, "T D"]) -> Float[np.ndarray, "2"]:
    """Return the mean cosine of two different tokens, and the stable rank Σ σ²/σ₁² of
    the matrix of all tokens.

    The cosine of a single token is NaN.
    """
    hidden = hidden.astype(np.float64)
    lengths = np.linalg.norm(hidden, axis=-1, keepdims=True)
    unit = hidden / np.where(lengths == 0, 1, lengths)
    count = len(hidden)
    pairs = count * (count - 1)
    others = np.linalg.norm(unit.sum(axis=0)) ** 2 - (unit * unit).sum()
    rank = ranks(np.linalg.svd(hidden, compute_uv=False), count).stable
    return np.array([others / pairs if pairs else np.nan, rank])


def unmasked(layer: Layer) -> Float[np.ndarray, "N P T T"]:
    """Return softmax(QKᵀ/√H) of all pairs of tokens, for every head and branch."""
    pairs = (x.reshape(-1, *x.shape[2:]) for x in (layer.query, layer.key))
    return exact_map(*pairs, causal=False).reshape(layer.branches.shape)


def chain_numbers(
    maps: Float[np.ndarray, "N P T T"],
) -> Float[np.ndarray, "3"] | None:
    """Return means of e^H, of the largest π and of the error of detailed balance.

    H is the entropy of the stationary distribution π, so e^H is its effective number of
    tokens. Chains in which not all tokens reach each other are left out. None if a map
    is no chain, because it has weights below 0 or rows that do not sum to 1.
    """
    if not is_stochastic(maps):
        return None
    maps = maps.astype(np.float64)
    maps = maps / maps.sum(axis=-1, keepdims=True)
    shares = stationary(maps)
    numbers = (
        np.exp(entropies(shares)),
        shares.max(axis=-1),
        balance_error(maps, shares),
    )
    return nan_mean(np.reshape(numbers, (3, -1)), axis=1)


def _mean_spectrum(windows: list[Float[np.ndarray, " k"]]) -> list[float]:
    """Return the mean of spectra over windows, cut to the shortest spectrum."""
    least = min(map(len, windows))
    return np.mean([x[:least] for x in windows], axis=0).tolist()


def _largest(spectrum: list[float]) -> dict[str, float | None]:
    """Return σ₁, σ₂ and σ₁/σ₂ of singular values; the ratio is at most 10⁶.

    A matrix with one singular value has neither σ₂ nor a ratio.
    """
    first, *others = spectrum
    if not others:
        return {"first": first, "second": None, "ratio": None}
    second = others[0]
    ratio = first / max(second, SMALLEST * first) if first else 0.0
    return {"first": first, "second": second, "ratio": ratio}
