"""The encoder: every token sees all others, of a text or of an image."""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax import config
from symjax.layers.gau import GatedBlock
from symjax.layers.linear import Linear
from symjax.layers.norms import norm
from symjax.models import trunk


class Encoder(nnx.Module):
    """Embedding or patches, positions, blocks, final norm and output layer.

    classes > 0   the mean over all tokens, then scores of the classes
    classes = 0   scores of the token types at every place (masked-LM)
    patch > 0     tokens are squares of patch × patch pixels, instead of ids

    Ids below 0 are pads: no token sees them, and the mean leaves them out.

    Raises:
        ValueError: sizes or choices that exclude each other, naming both.
    Source: Devlin et al. 2018, arXiv:1810.04805 (masked-LM); Dosovitskiy et al. 2020,
        arXiv:2010.11929 (patches), here with a mean in place of a class token.
    """

    def __init__(self, options: config.Model, *, rngs: nnx.Rngs):
        trunk.check(options)
        if options.kind != "encoder":
            raise ValueError(f"an Encoder has model.kind 'encoder', not {options.kind}")
        if options.tie_embeddings and (options.classes or options.patch):
            raise ValueError(
                f"model.tie_embeddings is of scores of tokens: model.classes is "
                f"{options.classes}, model.patch {options.patch}"
            )
        self.length, self.classes = options.length, options.classes
        self.patch = options.patch
        self.remat = options.remat
        self.period = max(1, len(options.pattern)) if options.scan_layers else 0
        self.learned_positions = options.positions == "learned"
        self.sinusoidal_positions = options.positions == "sinusoidal"
        self.dtype = jnp.dtype(options.dtype)
        if self.patch:
            self.patches = Linear(
                _pixels(options),
                options.width,
                use_bias=options.bias,
                dtype=self.dtype,
                rngs=rngs,
            )
        else:
            self.embedding = trunk.embedding(options, rngs)
        if self.learned_positions:
            self.positions = trunk.learned_positions(options, rngs)
        self.blocks = trunk.blocks(options, rngs)
        self.final_norm = norm(
            options.norm, options.width, bias=options.bias, dtype=self.dtype, rngs=rngs
        )
        self.tied = options.tie_embeddings
        if not self.tied:
            scores = options.classes or options.vocabulary
            self.head = trunk.output(options, scores, rngs)
        self.dropout = nnx.Dropout(options.dropout)

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B height width channels"],
        *,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T scores"]:
        """Scores in float32: [B 1 classes], or [B T vocabulary] of a masked-LM.

        Args:
            dropout_key: a random key turns dropout on; None is evaluation.
        Raises:
            ValueError: more tokens than learned positions, images of another size.
        """
        x, present = self._read(inputs)
        x = trunk.run_blocks(self, x, dropout_key, present)
        x = self.final_norm(x)
        if self.classes:
            x = _mean(x, present)[:, None]
        scores = self.embedding.attend(x) if self.tied else self.head(x)
        return scores.astype(jnp.float32)

    def calibrate(self, inputs: Array) -> None:
        """As `Decoder.calibrate`; a short text is repeated until it fills its row."""
        if not self.patch:
            count = jnp.maximum((inputs >= 0).sum(axis=1, keepdims=True), 1)
            again = jnp.arange(inputs.shape[1])[None] % count
            inputs = jnp.take_along_axis(inputs, again, axis=1)
        x, _ = self._read(inputs)
        for block in self.blocks:
            if not isinstance(block, GatedBlock):
                block.calibrate(x)
            x = block(x)

    def _read(self, inputs: Array) -> tuple[Array, Bool[Array, "B T"] | None]:
        """Tokens in their places, and which of them exist; None: all."""
        if self.patch:
            x, present = self.patches(patchify(inputs, self.patch)), None
        else:
            present = inputs >= 0
            x = trunk.look_up(self.embedding, jnp.where(present, inputs, 0))
        x = trunk.placed(self, x, jnp.zeros(1, jnp.int32))
        if present is not None:
            x = jnp.where(present[..., None], x, 0)
        return x, present


def patchify(
    images: Float[Array, "B height width channels"], patch: int
) -> Float[Array, "B T pixels"]:
    """Squares of patch × patch pixels, row by row, each as one vector.

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
    """Numbers in a patch.

    Raises:
        ValueError: the image is not one of model.length patches, or has no classes.
    """
    height, width, channels = options.image
    patch, size = options.patch, f"{height} × {width} × {channels}"
    if not options.classes:
        raise ValueError("model.patch is of images with labels: set model.classes")
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
    x: Float[Array, "B T D"], present: Bool[Array, "B T"] | None
) -> Float[Array, "B D"]:
    """Over the tokens that exist, summed in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if present is None:
        return wide.mean(axis=1).astype(x.dtype)
    total = jnp.where(present[..., None], wide, 0).sum(axis=1)
    count = jnp.maximum(present.sum(axis=1, keepdims=True), 1)
    return (total / count.astype(total.dtype)).astype(x.dtype)
