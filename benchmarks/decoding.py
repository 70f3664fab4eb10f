"""Time and memory of a decoding step after a short and after a long context.

    python benchmarks/decoding.py

A model of width 128 with 2 layers decodes one token after another. The baseline is a
cache for 256 tokens that is nearly full. Columns, with times as medians of interleaved
rounds:

8192        time with a nearly full cache for 8192 tokens, divided by the baseline
256 of it   time with a cache for 8192 tokens that holds about 256, divided by the
            baseline
kept        bytes of the cache for 256 tokens → for 8192 tokens
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
# Tokens that the cache has room for, and tokens that it holds at the end.
TURNS = {"short": (SHORT, SHORT), "long": (LONG, LONG), "part": (LONG, SHORT)}
ROUNDS, STEPS = 9, 20


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(graph, weights, cache, tokens):
    logits, cache = nnx.merge(graph, weights).decode(tokens, cache)
    return logits, cache


def main() -> None:
    print(f"{'mechanism':14}{'8192':>8}{'256 of it':>12}{'kept':>22}")
    for name, choice in CHOICES.items():
        options = replace(MODEL, attention=config.Attention(**choice))
        model = Decoder(options, rngs=nnx.Rngs(0))
        graph, weights = nnx.split(model)
        tokens = jnp.zeros((1, 1), jnp.int32)
        caches, times = {}, {turn: [] for turn in TURNS}
        for turn, (room, filled) in TURNS.items():
            cache = model.init_cache(1, room)
            caches[turn] = cache._replace(
                position=cache.position + filled - ROUNDS * STEPS - STEPS
            )
        kept = [
            sum(x.nbytes for x in jax.tree.leaves(caches[turn].layers))
            for turn in ("short", "long")
        ]
        for index in range(ROUNDS + 1):  # the first round compiles
            for turn, seconds in times.items():
                cache = caches[turn]
                start = time.perf_counter()
                for _ in range(STEPS):
                    logits, cache = step(graph, weights, cache, tokens)
                logits.block_until_ready()
                if index:
                    seconds.append(time.perf_counter() - start)
                caches[turn] = cache
        short = np.array(times["short"])
        full, part = (np.median(times[x] / short) for x in ("long", "part"))
        sizes = " → ".join(f"{size / 1024:.0f} KiB" for size in kept)
        print(f"{name:14}{full:7.2f}×{part:11.2f}×{sizes:>22}")


if __name__ == "__main__":
    main()
