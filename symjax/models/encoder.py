"""Encoder: a model of texts or images whose tokens also see later tokens."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax import config
from symjax.layers.primitives import Linear
from symjax.models import transformer


class Encoder(nnx.Module):
    """Embedding or patches, positions, blocks, final norm and output layer.

    classes > 0   the mean over all tokens, then logits of the classes
    classes = 0   logits of the vocabulary at each position (masked-LM)
    patch > 0     tokens are squares of patch × patch pixels instead of ids

    Ids below 0 are padding: no token sees them, and the mean leaves them out.

    Raises:
        ValueError: sizes or choices that exclude each other, naming both.
    Source: Devlin et al. 2018, arXiv:1810.04805 (masked-LM); Dosovitskiy et al. 2020,
        arXiv:2010.11929 (patches), here with a mean in place of a class token.
    """

    length: int
    learned_positions: bool
    blocks: nnx.List
    period: int  # blocks per iteration if model.scan_layers loops over them, else 0
    final_norm: Any

    def __init__(self, options: config.Model, *, rngs: nnx.Rngs):
        transformer.check(options)
        if options.kind != "encoder":
            raise ValueError(f"an Encoder has model.kind 'encoder', not {options.kind}")
        if options.tie_embeddings and (options.classes or options.patch):
            raise ValueError(
                "model.tie_embeddings needs logits of tokens, but model.classes is "
                f"{options.classes} and model.patch {options.patch}"
            )
        self.patch, self.classes = options.patch, options.classes
        if self.patch:
            shared = {"dtype": jnp.dtype(options.dtype), "rngs": rngs}
            pixels, bias = _pixels(options), options.bias
            self.patches = Linear(pixels, options.width, use_bias=bias, **shared)
        outputs = options.classes or options.vocabulary
        transformer.assemble(self, options, outputs, rngs)

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B height width channels"],
        *,
        dropout_key: Array | None = None,
        watch: Callable | None = None,
    ) -> Float[Array, "B T outputs"]:
        """Return logits in float32: [B 1 classes], or [B T vocabulary] of a masked-LM.

        Args:
            dropout_key: turns dropout on, as in training.
            watch: function that is called in each block, as in `symjax.layers.Block`.
        Raises:
            ValueError: more tokens than learned positions, or images of another size.
        """
        x = self.hidden(inputs, dropout_key=dropout_key, watch=watch)
        return transformer.logits(self, x)

    def hidden(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B height width channels"],
        *,
        dropout_key: Array | None = None,
        watch: Callable | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the input of the output layer, [B 1 D] in a classifier.

        Arguments and errors are those of `__call__`.
        """
        x, padding_mask = self._embed(inputs)
        x = transformer.run_blocks(self, x, dropout_key, padding_mask, watch)
        x = self.final_norm(x)
        return _mean(x, padding_mask)[:, None] if self.classes else x

    def _embed(self, inputs: Array) -> tuple[Array, Bool[Array, "B T"] | None]:
        """Return embedded tokens with positions, and a mask of tokens that exist.

        The mask of images is None: all tokens exist.
        """
        if self.patch:
            x, padding_mask = self.patches(patchify(inputs, self.patch)), None
        else:
            padding_mask = inputs >= 0
            x = transformer.look_up(self, jnp.where(padding_mask, inputs, 0))
        x = transformer.with_positions(self, x, jnp.zeros(1, jnp.int32))
        if padding_mask is not None:
            x = jnp.where(padding_mask[..., None], x, 0)
        return x, padding_mask


def patchify(
    images: Float[Array, "B height width channels"], patch: int
) -> Float[Array, "B T pixels"]:
    """Split images into squares of patch × patch pixels, row by row, as vectors.

    Raises:
        ValueError: the squares do not fill the image.
    """
    if images.ndim != 4 or images.shape[1] % patch or images.shape[2] % patch:
        raise ValueError(
            f"images must be [batch, height, width, channels] of whole squares of "
            f"{patch} × {patch} pixels, got {images.shape}"
        )
    return rearrange(images, "b (y p) (x q) c -> b (y x) (p q c)", p=patch, q=patch)


def _pixels(options: config.Model) -> int:
    """Return the number of values in a patch.

    Raises:
        ValueError: images do not have model.length patches, or no classes are set.
    """
    height, width, channels = options.image
    patch, size = options.patch, f"{height} × {width} × {channels}"
    if not options.classes:
        raise ValueError("model.patch needs images with labels: set model.classes")
    if min(options.image) < 1 or height % patch or width % patch:
        raise ValueError(
            f"model.patch {patch} does not divide images of {size} (model.image)"
        )
    count = (height // patch) * (width // patch)
    if count != options.length:
        raise ValueError(
            f"model.length {options.length} must be {count}, the patches of {patch} × "
            f"{patch} in an image of {size}"
        )
    return patch * patch * channels


def _mean(
    x: Float[Array, "B T D"], padding_mask: Bool[Array, "B T"] | None
) -> Float[Array, "B D"]:
    """Return the mean over the tokens that exist, summed in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if padding_mask is None:
        return wide.mean(axis=1).astype(x.dtype)
    total = jnp.where(padding_mask[..., None], wide, 0).sum(axis=1)
    count = jnp.maximum(padding_mask.sum(axis=1, keepdims=True), 1)
    return (total / count.astype(total.dtype)).astype(x.dtype)
