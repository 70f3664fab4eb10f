"""Judge a checkpoint: python eval.py --workdir runs/diff_sym-tiny (or --help)."""

import sys
from pathlib import Path

from symjax.evaluation import report
from symjax.evaluation.trained import load
from symjax.training.commandline import Parser, leave

NOTE = "Losses are nats a token; the JSON of a checkpoint is the same bytes each time."


def main(words: list[str]) -> None:
    parser = Parser(prog="eval.py", description=__doc__, epilog=NOTE)
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="the run to judge")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, help="a checkpoint; the newest whole one by default"
    )
    which.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint of the least held-out loss (checkpoint.best keeps it)",
    )
    add("--json", type=Path, help="also write the numbers to this file")
    add("--batches", type=int, help="held-out batches to measure; all by default")
    add("--prompt", help="text to go on from; held-out text by default")
    add("--tokens", type=int, default=200, help="tokens to write (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: likeliest (%(default)s)")
    add("--seed", type=int, default=0, help="of the sample (%(default)s)")
    chosen = parser.parse_args(words)
    for name in ("batches", "tokens"):
        if (value := getattr(chosen, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 <= chosen.temperature < float("inf"):
        raise ValueError(f"--temperature must be 0 or more, got {chosen.temperature}")
    if not 0 <= chosen.seed < 2**31:
        raise ValueError(f"--seed must be in [0, 2147483648), got {chosen.seed}")
    if chosen.json is not None:
        report.check_json(chosen.json)
    trained = load(chosen.workdir, chosen.step, best=chosen.best)
    prompt, text = report.sample(
        trained,
        chosen.prompt,
        count=chosen.tokens,
        temperature=chosen.temperature,
        seed=chosen.seed,
    )
    found = report.judge(trained, chosen.batches)
    unit = "byte" if trained.options.data.tokenizer == "byte" else "character"
    print(report.to_text(found, unit))
    print(f"\nprompt {prompt!r}, sample:\n{prompt}{text}", flush=True)
    if chosen.json is not None:
        report.write_json(found, chosen.json)


if __name__ == "__main__":
    leave(lambda: main(sys.argv[1:]))
