"""Time of a training step of the `:3l` models, beside PyTorch in eager mode.

    pip install '.[bench]'
    python benchmarks/torch_steps.py [rounds]

The models are configs/gpt.py and configs/diff.py at `:3l`, with 32 rows of 300 bytes,
and the same models in plain PyTorch: pre-LayerNorm, learned positions, ReLU, dropout
0.1, AdamW with clipped gradients. Softmax attention is `scaled_dot_product_attention`.
Differential attention subtracts two whole maps before it multiplies them by the values,
as the code of its authors does. Columns: milliseconds of a step of PyTorch and of
symjax, and the first divided by the second. Above 1 symjax is faster.
"""

import math
import sys

import jax
import numpy as np
import torch
from compiler_options import VOCABULARY, options_of, text_for, training_step
from torch import nn
from turns import in_turn, milliseconds, ratio

from symjax.config import Config


class Softmax(nn.Module):
    def __init__(self, width: int, heads: int, depth: int):
        super().__init__()
        self.heads = heads
        self.project, self.out = (
            nn.Linear(width, n * width, bias=False) for n in (3, 1)
        )

    def forward(self, x):
        heads = self.project(x).chunk(3, dim=-1)
        query, key, value = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in heads
        )
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return self.out(output.transpose(1, 2).flatten(2))


class Differential(nn.Module):
    def __init__(self, width: int, heads: int, depth: int):
        super().__init__()
        self.heads, self.size = heads, width // heads // 2
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.project, self.out = (
            nn.Linear(width, n * width, bias=False) for n in (3, 1)
        )
        self.vectors = nn.Parameter(torch.randn(4, self.size) * 0.1)
        self.norm = nn.RMSNorm(2 * self.size)

    def forward(self, x):
        heads = self.project(x).chunk(3, dim=-1)
        query, key = (
            y.unflatten(-1, (2 * self.heads, -1)).transpose(1, 2) for y in heads[:2]
        )
        value = heads[2].unflatten(-1, (self.heads, -1)).transpose(1, 2)
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.size)
        maps = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        maps = maps.unflatten(1, (self.heads, 2))
        one, two = (self.vectors[0::2] * self.vectors[1::2]).sum(dim=-1).exp()
        weights = maps[:, :, 0] - (one - two + self.initial) * maps[:, :, 1]
        output = self.norm(weights @ value) * (1 - self.initial)
        return self.out(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: type, width: int, heads: int, depth: int, drop):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = attention(width, heads, depth)
        self.feedforward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norms[0](x)))
        return x + self.drop(self.feedforward(self.norms[1](x)))


class Model(nn.Module):
    def __init__(self, attention: type, options: Config):
        super().__init__()
        model = options.model
        self.tokens = nn.Embedding(VOCABULARY, model.width)
        self.places = nn.Embedding(model.length, model.width)
        arguments = attention, model.width, model.heads
        self.blocks = nn.ModuleList(
            Block(*arguments, depth, model.dropout) for depth in range(model.depth)
        )
        self.norm = nn.LayerNorm(model.width)
        self.head = nn.Linear(model.width, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def torch_training_step(attention: type, options: Config, text: np.ndarray):
    """Return a function that runs one step, and the number of parameters."""
    model = Model(attention, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pairs = text[:, :-1], text[:, 1:]
    inputs, targets = (torch.tensor(x, dtype=torch.long) for x in pairs)

    def step():
        loss = nn.functional.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, sum(x.numel() for x in model.parameters())


def main(rounds: int = 7) -> None:
    print(
        f"jax {jax.__version__}, torch {torch.__version__}, a step of 32 x 300 tokens"
    )
    print(f"{'':14}{'torch ms':>10}{'ours ms':>10}{'torch/ours':>12}  parameters")
    models = {"softmax": (Softmax, "gpt"), "differential": (Differential, "diff")}
    for name, (attention, ours) in models.items():
        options = options_of(ours, "3l")
        text = text_for(options)
        torch_step, torch_count = torch_training_step(attention, options, text)
        our_step, our_count = training_step(options, text)
        times = in_turn({"torch": torch_step, "ours": our_step}, rounds)
        columns = [milliseconds(times, x) for x in times]
        print(f"{name:14}" + "".join(f"{x:10.0f}" for x in columns), end="")
        print(f"{ratio(times, 'torch', 'ours'):12.2f}", end="")
        print(f"  {torch_count:,} and {our_count:,}", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
