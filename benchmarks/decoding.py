"""One decoding step after a short and after a long context, as a ratio.

    python benchmarks/decoding.py

A model of width 128 with 2 layers reads one token, with room for 256 and for 8192
tokens of context: the time of the longer over that of the shorter, the median of
rounds that take turns, and the bytes that each keeps.
"""

import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from symjax import config
from symjax.models import Decoder

MODEL = config.Model(vocabulary=256, width=128, depth=2, heads=4, positions="rope")
CHOICES = {
    "softmax": {"mechanism": "softmax"},
    "differential": {"mechanism": "softmax", "differential": "v1"},
    "cosine": {"mechanism": "cosine"},
    "linear": {"mechanism": "linear"},
    "performer": {"mechanism": "performer", "feature_count": 64},
    "decay": {"mechanism": "decay"},
    "flash": {"mechanism": "flash"},
}
SHORT, LONG = 256, 8192
ROUNDS, STEPS = 9, 20


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(graph, weights, cache, tokens):
    logits, cache = nnx.merge(graph, weights).decode(tokens, cache)
    return logits, cache


def main() -> None:
    print(f"{'mechanism':14}{'time':>8}{'kept':>22}")
    for name, choice in CHOICES.items():
        options = replace(MODEL, attention=config.Attention(**choice))
        model = Decoder(options, rngs=nnx.Rngs(0))
        graph, weights = nnx.split(model)
        tokens = jnp.zeros((1, 1), jnp.int32)
        caches, times = {}, {SHORT: [], LONG: []}
        for length in times:
            cache = model.init_cache(1, length)
            caches[length] = cache._replace(
                position=cache.position + length - ROUNDS * STEPS - STEPS
            )
        kept = [
            sum(x.nbytes for x in jax.tree.leaves(caches[length].layers))
            for length in times
        ]
        for turn in range(ROUNDS + 1):  # the first compiles
            for length, found in times.items():
                cache = caches[length]
                start = time.perf_counter()
                for _ in range(STEPS):
                    logits, cache = step(graph, weights, cache, tokens)
                logits.block_until_ready()
                if turn:
                    found.append(time.perf_counter() - start)
                caches[length] = cache
        ratio = np.median(np.array(times[LONG]) / np.array(times[SHORT]))
        sizes = " → ".join(f"{size / 1024:.0f} KiB" for size in kept)
        print(f"{name:14}{ratio:7.2f}×{sizes:>22}")


if __name__ == "__main__":
    main()
