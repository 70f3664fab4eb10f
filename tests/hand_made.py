"""Models with hand-made weights, whose next token is known without training."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from symjax import config
from symjax.data.subwords import SubwordTokenizer
from symjax.exchange.loaded import Loaded
from symjax.models.decoder import Decoder

SURE = 30.0  # logit of the next token; all others have 0


def hand_made(tokenizer, follows=None, language=None, **options) -> Loaded:
    """Return an untrained decoder with a tokenizer.

    Args:
        follows: {token: the token that follows it}, where the token None stands for all
            others. None: random weights.
        language: additional entries beside those of the tokenizer.
        options: of the model.
    """
    sizes = {"width": 16, "depth": 1, "heads": 2, "length": 64, "positions": "rope"}
    if follows is not None:
        sizes |= {"width": 2 * tokenizer.vocabulary, "heads": 1}
    chosen = config.Model(vocabulary=tokenizer.vocabulary, **sizes | options)
    model = Decoder(chosen, rngs=nnx.Rngs(0))
    if follows is not None:
        _follow(model, follows, tokenizer.vocabulary)
    about = tokenizer.describe() | (language or {})
    return Loaded(model, tokenizer, config.Config(model=chosen), 1, (), about)


def _follow(model: Decoder, follows: dict, vocabulary: int) -> None:
    """Set the weights so that the last token alone decides the next one."""
    table = np.zeros((vocabulary, vocabulary), np.float32)
    for token, following in follows.items():
        table[slice(None) if token is None else token] = 0
        table[slice(None) if token is None else token, following] = SURE
    for block in model.blocks:
        for layer in (block.attention.out, block.feedforward.down):
            layer.kernel[...], layer.bias[...] = 0 * layer.kernel, 0 * layer.bias
    one_hot = np.eye(vocabulary, dtype=np.float32)
    model.embedding.embedding[...] = jnp.concatenate([one_hot, -one_hot], axis=1)
    # The norm divides by the root of the mean square.
    scale = np.sqrt(1 / vocabulary)
    model.head.kernel[...] = scale * np.concatenate([table, 0 * table])
    model.head.bias[...] = 0 * model.head.bias


def spaced() -> SubwordTokenizer:
    """Return a byte-level vocabulary whose tokenizer adds a space before a text."""
    library = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.pre_tokenizer, library.decoder = level, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=sorted(level.alphabet())
    )
    library.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    return SubwordTokenizer(library.to_str(), "")


def byte_fallback(decoder: str = "strip") -> SubwordTokenizer:
    """Return a small vocabulary as Llama 2 has it, with a token for each byte.

    Args:
        decoder: "strip" for the steps of Llama 2, "metaspace" for one step.
    """
    texts = ["the cat sat on the mat"] * 9
    letters = pre_tokenizers.Metaspace(prepend_scheme="first")
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = letters
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    if decoder == "metaspace":
        made.decoder = decoders.Metaspace(prepend_scheme="first")
    return SubwordTokenizer(made.to_str(), "</s>")
