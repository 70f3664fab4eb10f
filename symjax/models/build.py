"""The model that a configuration asks for, and its arrays apart from it."""

from typing import Any

from flax import nnx

from symjax import config
from symjax.layers import Constant
from symjax.models.decoder import Decoder
from symjax.models.encoder import Encoder

Model = Decoder | Encoder


def build(options: config.Model, *, rngs: nnx.Rngs) -> Model:
    """Raises: ValueError: sizes or choices that exclude each other, naming both."""
    kind = Encoder if options.kind == "encoder" else Decoder
    return kind(options, rngs=rngs)


def abstract(options: config.Model) -> Model:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: build(options, rngs=nnx.Rngs(0)))


def merged(options: config.Model, params: Any, constants: Any) -> Model:
    """The model with these weights and constants."""
    return nnx.merge(nnx.graphdef(abstract(options)), params, constants)


def parts(model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """(weights, constants) of a model as nested dicts."""
    params, constants = (nnx.state(model, x) for x in (nnx.Param, Constant))
    return nnx.to_pure_dict(params), nnx.to_pure_dict(constants)


def attentions(model: Model) -> list[Any]:
    """The attention of every layer; that of a universal model as often as it steps."""
    return [layer for block in model.blocks for layer in block.attentions]


def decoder_of(model: Model) -> Decoder:
    """The model itself. Raises: ValueError: it is an encoder."""
    if not isinstance(model, Decoder):
        raise ValueError("the model is an encoder: it predicts no next token")
    return model
