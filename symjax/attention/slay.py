"""Random features of SLAY: attention by the angle of a query and a key.

With x the cosine of a query and a key and C = 2 + ε, the spherical Yat kernel is

    x² / (C − 2x) = x² ∫ exp(−s(C − 2x)) ds ≈ x² Σ_r a_r/C exp(2 s_r x)   s_r = t_r/C

The nodes t_r and weights a_r are those of Gauss–Laguerre quadrature. Row m of the
projection has one node s, and b = a/C divided by the number of rows with this node. For
q and k of length 1, Gaussian rows w and anchors u of length 1, the feature

    φ_m(q) = √b (u_m·q)² exp(√(2s) w_m·q − s)

is never negative. Products of its exponentials estimate exp(2 s x) without bias.
Products of its squares do not estimate x²: their mean is (1 + 2x²)/(H (H + 2)). So
φ(q)·φ(k) estimates a constant times

    (1 + 2x²) Σ_r a_r/C exp(2 s_r x)

With 2 nodes the sum is within 4.1 % of 1/(C − 2x) for x ≤ 1/2. At x = 1 the kernel is
1/ε and the sum is 3.0: the peak is not estimated.

Source: Luna, Bouhsine & Choromanski 2026, arXiv:2602.04915, and the code of its
authors. For each of R nodes that code multiplies each of P anchors with each of D
exponentials: R P D features. Here there are M of these products: row m has one node,
and its anchor is the direction of row m + M/2.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

NODES = 2  # as in the code of the authors
EPSILON = 1e-6  # ε of the kernel


def laguerre_rule(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return s_r and a_r/C, by which Σ_r a_r/C exp(2 s_r x) estimates 1/(C − 2x)."""
    points, weights = np.polynomial.laguerre.laggauss(nodes)
    return points / (2 + EPSILON), weights / (2 + EPSILON)


def spherical_features(
    projected: Float[Array, "*rows M"], lengths: Float[Array, " M"]
) -> Float[Array, "*rows M"]:
    """Return φ of vectors x of length 1 from their products with the projection.

    Rows alternate between the nodes. The estimate has no bias if rows m and m + M/2 are
    independent. Those of `orthogonal_projection` are if M is at least 2H.

    Args:
        projected: w_m·x.
        lengths: |w_m|. Directions u_m are w_{m + M/2} / |w_{m + M/2}|.
    """
    count = projected.shape[-1]
    places = np.arange(count) % NODES
    points, weights = laguerre_rule(NODES)
    points, weights = points[places], weights[places] / np.bincount(places)[places]
    slopes = jnp.asarray(np.sqrt(2 * points), projected.dtype)
    offsets = jnp.asarray(np.log(weights) / 2 - points, projected.dtype)
    batch = (1,) * (projected.ndim - 1)
    slopes, offsets = (x.reshape(*batch, count) for x in (slopes, offsets))
    anchored = projected / lengths.reshape(*batch, count)
    anchored = jnp.roll(anchored, -(count // 2), axis=-1)
    return jnp.square(anchored) * jnp.exp(slopes * projected + offsets)
