"""A model from its configuration, and its arrays as nested dicts."""

from typing import Any

from flax import nnx

from symjax import config
from symjax.layers import Constant
from symjax.models.decoder import Decoder
from symjax.models.encoder import Encoder

Model = Decoder | Encoder


def build(options: config.Model, *, rngs: nnx.Rngs) -> Model:
    """Return a new model of model.kind.

    Raises:
        ValueError: sizes or choices that exclude each other, naming both.
    """
    kind = Encoder if options.kind == "encoder" else Decoder
    return kind(options, rngs=rngs)


def abstract(options: config.Model) -> Model:
    """Return the model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: build(options, rngs=nnx.Rngs(0)))


def merged(options: config.Model, params: Any, constants: Any) -> Model:
    """Return the model with these weights and constants."""
    return nnx.merge(nnx.graphdef(abstract(options)), params, constants)


def weights_and_constants(model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's arrays as two nested dicts: (weights, constants)."""
    params, constants = (nnx.state(model, x) for x in (nnx.Param, Constant))
    return nnx.to_pure_dict(params), nnx.to_pure_dict(constants)


def attentions(model: Model) -> list[Any]:
    """Return the attention layers by depth; a universal model's once for each step."""
    return [layer for block in model.blocks for layer in block.attentions]


def decoder_of(model: Model) -> Decoder:
    """Return the model if it is a decoder.

    Raises:
        ValueError: it is an encoder.
    """
    if not isinstance(model, Decoder):
        raise ValueError("the model is an encoder: it predicts no next token")
    return model
