"""Keys of the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from symjax.config.keys import Keys, key


@dataclass(frozen=True, repr=False)
class Optimizer(Keys):
    """Keys of the optimizer and its schedule."""

    name: str = key(
        "adamw",
        "optax optimizer; muon updates the matrices of blocks, and adamw all other "
        "weights",
        ("adamw", "adam", "lion", "sgd", "muon"),
    )
    learning_rate: float = key(3e-4, "peak learning rate", least=0)
    schedule: str = key(
        "warmup_cosine_decay_schedule",
        "optax schedule; or wsd: warm-up, stable, decay, which can be extended later",
        (
            "constant_schedule",
            "cosine_decay_schedule",
            "linear_schedule",
            "warmup_constant_schedule",
            "warmup_cosine_decay_schedule",
            "wsd",
        ),
    )
    warmup: float = key(
        0.05,
        "steps of the linear warm-up of wsd and the warmup_ schedules; the last of "
        "them has the peak rate; below 1: a share of decay_steps (not for wsd)",
        least=0,
    )
    cooldown: float = key(
        0.2,
        "wsd: steps of the decay, which ends at decay_steps; below 1: a share of "
        "decay_steps",
        least=0,
    )
    final: float = key(0.1, "learning rate at the end, as a share of the peak", least=0)
    decay_steps: int = key(
        0,
        "step at which the learning rate reaches its end and stays; 0: the last step "
        "of the run",
        least=0,
    )
    weight_decay: float = key(
        0.1, "weight decay of matrices; norms, biases and λ never decay", least=0
    )
    embedding_learning_rate: float = key(
        1.0,
        "factor of learning_rate for the embeddings of tokens, positions and patches "
        "and for the output layer",
        least=0,
    )
    embedding_weight_decay: float = key(
        -1.0,
        "weight decay of the embeddings and the output layer; -1: as weight_decay",
        least=-1,
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "decay of the two moments; sgd takes the first as its momentum; with muon they "
        "are those of adamw, and the momentum of muon is 0.95",
    )
    eps: float = key(
        1e-8, "added to the root of the second moment (not by lion and sgd)"
    )
    clip: float = key(
        1.0, "largest norm of the gradient of all weights; 0: off", least=0
    )
    nonfinite: str = key(
        "stop",
        "response to a gradient that is not finite or is a spike. stop: end the run; "
        "skip: count the step and leave the weights as they are",
        ("stop", "skip"),
    )
    spike: float = key(
        0.0,
        "a gradient is a spike if its norm is above this many times the mean of about "
        "the last 50 steps, after the first 20 steps; 0: off",
        least=0,
    )
    z_loss: float = key(
        0.0, "weight of the mean of (log Σ exp(logit))² in the loss", least=0
    )
    ema: float = key(
        0.0,
        "decay of an exponential moving average of the weights (eval.py --ema); 0: no "
        "average",
        least=0,
    )
    accumulate: int = key(1, "micro-batches per step; must divide batch_size", least=1)
    version: int = key(
        2,
        "rules of the optimizer. 1: those of runs that began before this key existed: "
        "warm-up begins at a rate of 0, ema begins with the first weights, and muon "
        "updates convolutions as matrices; 2: the present rules",
        least=1,
        most=2,
    )
