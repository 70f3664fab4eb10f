"""Speed of `generate` of transformers, the rival of device.py's rows of decoding."""

import importlib
import time
from typing import Any

import numpy as np
from device_jobs import at_most
from device_rows import RIVAL, Sizes

DIFF_LLAMA = "generate of DiffLlama"


class Clock:
    """Streamer that notes when each new token has reached the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:  # first the prompt, then one token at a time
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def diff_llama(context: int, steps: int, size: str, sizes: Sizes) -> dict[str, Any]:
    """Measure greedy decoding of differential attention in transformers.

    The model is a random DiffLlama in bfloat16. It has the width, layers and heads of
    the models of a size, tied embeddings, and a gated feed-forward with as many weights
    as theirs. One row is decoded, and its last `steps` tokens are timed.

    Returns:
        Tokens per second, the seconds until the first row was decoded, and on a GPU
        the largest number of MiB in use.
    Raises:
        ImportError: torch or transformers is missing.
        OutOfTime: the first row was not decoded in time.
    """
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    width, depth, heads = dict(sizes.models)[size]
    options = transformers.DiffLlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context + 1,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    on_gpu = torch.cuda.is_available()
    began = time.perf_counter()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = transformers.DiffLlamaForCausalLM(options).to(torch.bfloat16).eval()
        prompt = torch.zeros((1, max(1, context - steps)), dtype=torch.long)

    def seconds_a_token() -> float:
        clock = Clock()
        # The first new token is made with the prompt, so it is not among the timed.
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=steps + 1,
            min_new_tokens=steps + 1,
            do_sample=False,
            streamer=clock,
        )
        return float(np.diff(clock.times[1:]).mean())

    with at_most(RIVAL):
        seconds_a_token()
    ready = time.perf_counter() - began
    times = [seconds_a_token() for _ in range(sizes.rounds)]
    found = {
        "tokens_per_second": 1 / float(np.median(times)),
        "ready_s": round(ready, 2),
    }
    if on_gpu:
        found["mib"] = torch.cuda.max_memory_allocated() / 2**20
    return found
