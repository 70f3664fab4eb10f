"""The model that a configuration asks for."""

from flax import nnx

from symjax import config
from symjax.models.decoder import Decoder
from symjax.models.encoder import Encoder

Model = Decoder | Encoder


def build(options: config.Model, *, rngs: nnx.Rngs) -> Model:
    """Raises: ValueError: sizes or choices that exclude each other, naming both."""
    kind = Encoder if options.kind == "encoder" else Decoder
    return kind(options, rngs=rngs)


def decoder_of(model: Model) -> Decoder:
    """The model itself. Raises: ValueError: it is an encoder."""
    if not isinstance(model, Decoder):
        raise ValueError("the model is an encoder: it predicts no next token")
    return model
