"""Time of causal softmax attention beside PyTorch, forward + backward.

    pip install '.[bench]'
    python benchmarks/torch_attention.py [rounds]

Columns: milliseconds of `torch.nn.functional.scaled_dot_product_attention` and of
`symjax.attention.softmax`, both in float32, and the first divided by the second. Above
1 symjax is faster. Inputs have the layout that each prefers: [B T N H] for symjax,
[B N T H] for PyTorch.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
from turns import in_turn, milliseconds, ratio

from symjax import attention

SIZES = ((32, 300, 8, 32), (4, 1024, 8, 64), (1, 4096, 8, 64))  # B T N H


def ours(arrays: list[np.ndarray]):
    def loss(query, key, value):
        return jnp.square(attention.softmax(query, key, value, is_causal=True)).sum()

    inputs = [jnp.asarray(x) for x in arrays]
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*inputs).compile()
    return lambda: jax.block_until_ready(gradient(*inputs))


def theirs(arrays: list[np.ndarray]):
    tensors = [torch.tensor(x).transpose(1, 2).contiguous() for x in arrays]
    tensors = [x.requires_grad_() for x in tensors]

    def call():
        output = torch.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=True
        )
        loss = output.square().sum()
        return loss, *torch.autograd.grad(loss, tensors)

    return call


def main(rounds: int = 15) -> None:
    print(f"jax {jax.__version__}, torch {torch.__version__}")
    print(f"{'B T N H':20}{'torch ms':>10}{'ours ms':>10}{'torch/ours':>12}")
    for shape in SIZES:
        arrays = list(np.random.default_rng(0).normal(size=(3, *shape)))
        arrays = [x.astype(np.float32) for x in arrays]
        rivals = {"torch": theirs(arrays), "ours": ours(arrays)}
        # Times are comparable only if both compute the same.
        one, other = (rival()[0].item() for rival in rivals.values())
        if abs(one - other) > 1e-3 * abs(one):
            raise SystemExit(f"torch's loss is {one}, ours {other}")
        times = in_turn(rivals, rounds)
        columns = [milliseconds(times, x) for x in rivals]
        print(f"{str(shape):20}" + "".join(f"{x:10.1f}" for x in columns), end="")
        print(f"{ratio(times, 'torch', 'ours'):12.2f}", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
