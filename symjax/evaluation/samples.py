"""What a model writes."""

import jax
import jax.numpy as jnp

from symjax.data.corpus import Corpus
from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding
from symjax.evaluation.trained import Trained
from symjax.models.generate import generate

PROMPT = 16  # tokens of held-out text where no prompt is given


def sample(trained: Trained, asked: Asked) -> Finding:
    """A prompt, and what the model writes after it; nothing where there is no text."""
    if trained.corpus.text is None:
        return Finding({}, ["sample: none, the model has not learned a text"])
    prompt, more = continuation(trained, trained.corpus.text, asked)
    return Finding({}, [f"prompt {prompt!r}, sample:", prompt + more])


def continuation(trained: Trained, text: Corpus, asked: Asked) -> tuple[str, str]:
    """(prompt, what the model writes after it), at most as far as it has positions.

    Raises:
        ValueError: the prompt is empty, too long, or has unknown characters.
    """
    tokenizer = text.tokenizer
    count = asked.tokens
    if asked.prompt is None:
        ids = text.heldout[:PROMPT]
    else:
        ids = tokenizer.encode(asked.prompt)
    if not len(ids):
        raise ValueError("--prompt is empty: give text to go on from")
    model = trained.model()
    if model.learned_positions:
        count = min(count, model.length - len(ids))
        if count < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens fills the model's {model.length} "
                "learned positions"
            )
    tokens = generate(
        model,
        jnp.asarray(ids, jnp.int32)[None],
        count,
        jax.random.key(asked.seed),
        temperature=asked.temperature,
    )
    return tokenizer.decode(ids), tokenizer.decode(tokens[0])
