"""Memory and time of packing, beside `datasets` and `tokenizers` used by hand.

    python -m benchmarks.packing --megabytes 200 --rounds 2

Writes parquet files of random words, learns 4,096 subwords from the first file, and
packs all files into token ids. `symjax` packs with `symjax.data`; `by hand` packs
with `Dataset.map` over batches in `--processes` processes. The two take turns, and each
packing is a separate process. Prints medians of the rounds:

memory      largest resident memory of the process and its children, sampled every 50 ms
            from /proc, minus the memory of the process before it begins. `anonymous` is
            the part that belongs to no file, so the system cannot drop it.
first line  seconds until the first byte on stderr, which is a terminal
total       seconds until all token ids are in a file
processor   seconds of all cores together, which depend less on other work
"""

import argparse
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

# Vocabulary, words per document, bytes per file.
WORDS, DOCUMENT, PART = 50_000, 600, 1 << 24
RIVALS = ("symjax", "by hand")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--megabytes", type=int, default=200, help="size of the text (%(default)s)")
    add(
        "--processes",
        type=int,
        default=os.cpu_count(),
        help="processes of `map` (%(default)s)",
    )
    add("--rounds", type=int, default=1)
    add("--rival", choices=RIVALS, help=argparse.SUPPRESS)
    add("--folder", type=Path, help="folder for files (a temporary one)")
    chosen = parser.parse_args(words)
    if chosen.rival:
        pack(chosen.rival, chosen.folder, chosen.processes)
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        folder = Path(place)
        write(folder, chosen.megabytes * 10**6)
        measured = {name: [] for name in RIVALS}
        for turn in range(chosen.rounds):
            for name in RIVALS[:: -1 if turn % 2 else 1]:
                measured[name].append(measure(name, folder, chosen.processes))
    for name, rounds in measured.items():
        shown = {x: statistics.median(row[x] for row in rounds) for x in rounds[0]}
        print(
            f"{name:<8} memory {shown['memory']:,.0f} MB above "
            f"{shown['idle']:,.0f} (anonymous {shown['anonymous']:,.0f}), first line "
            f"{shown['first']:.1f} s, total {shown['total']:.1f} s, "
            f"processor {shown['processor']:.1f} s, "
            f"{shown['tokens']:,.0f} tokens"
        )


def write(folder: Path, size: int) -> None:
    """Write parquet files of documents with `size` bytes of text, and a tokenizer."""
    import datasets
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draws = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)
    cuts = draws.integers(2, 12, WORDS).cumsum()
    spelt = letters[np.minimum(draws.zipf(1.3, cuts[-1]) - 1, 25)]
    words = np.array([x.tobytes().decode() for x in np.split(spelt, cuts[:-1])])
    (folder / "text").mkdir()
    number = 0
    while size > 0:
        texts, left = [], min(PART, size)
        while left > 0:
            chosen = np.minimum(draws.zipf(1.2, DOCUMENT) - 1, WORDS - 1)
            texts.append(" ".join(words[chosen]) + ".\n")
            left -= len(texts[-1])
            size -= len(texts[-1])
        rows = datasets.Dataset.from_dict({"text": texts})
        rows.to_parquet(folder / "text" / f"train-{number:05}.parquet")
        number += 1
        if number == 1:
            made = Tokenizer(models.BPE())
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=4096, special_tokens=["<|endoftext|>"], show_progress=False
            )
            made.train_from_iterator(texts, trainer)
            made.save(str(folder / "tokenizer.json"))


def measure(rival: str, folder: Path, processes: int) -> dict[str, float]:
    """Measure one packing, in a separate process whose stderr is a terminal."""
    seen, terminal = pty.openpty()
    before = os.times()
    words = ["--rival", rival, "--folder", str(folder), "--processes", str(processes)]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.packing", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": place, "HF_HOME": place},
        )
        os.close(terminal)
        assert run.stdin and run.stdout
        run.stdout.readline()  # the process is ready
        idle, first, peak = resident(run.pid), [], np.zeros(2)
        began = time.perf_counter()
        watch = threading.Thread(target=watch_terminal, args=(seen, began, first))
        watch.start()
        print(file=run.stdin, flush=True)
        answer = threading.Thread(target=lambda: said.append(run.stdout.readline()))
        said: list[str] = []
        answer.start()
        while answer.is_alive():
            peak = np.maximum(peak, resident(run.pid))
            answer.join(0.05)
        total = time.perf_counter() - began
        run.stdin.close()
        run.wait()
        watch.join()
        os.close(seen)
        after = os.times()
    above = (peak - idle) / 1e3
    return {
        "idle": idle[0] / 1e3,
        "memory": above[0],
        "anonymous": above[1],
        "first": first[0] if first else float("nan"),
        "total": total,
        "processor": sum(after[2:4]) - sum(before[2:4]),
        "tokens": json.loads(said[0]),
    }


def watch_terminal(terminal: int, began: float, first: list[float]) -> None:
    """Read the terminal until it is closed; append the time of the first byte."""
    try:
        while os.read(terminal, 1 << 16):
            if not first:
                first.append(time.perf_counter() - began)
    except OSError:  # Linux raises it when the other end is closed
        pass


def resident(process: int) -> np.ndarray:
    """Return the resident and the anonymous kilobytes of a process and its children."""
    parents, sizes = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(x.split(":", 1) for x in path.read_text().splitlines())
        except OSError:
            continue  # the process has ended
        number = int(path.parent.name)
        parents[number] = int(lines["PPid"])
        fields = (lines.get(name, "0 kB") for name in ("VmRSS", "RssAnon"))
        sizes[number] = np.array([float(x.split()[0]) for x in fields])
    total = np.zeros(2)
    for number, size in sizes.items():
        above = number
        while above not in (0, process):
            above = parents.get(above, 0)
        total += size if above == process else 0
    return total


def pack(rival: str, folder: Path, processes: int) -> None:
    """Import, print a line, wait for one, pack, and print the number of tokens."""
    import datasets

    from symjax import config
    from symjax.data.corpus import open_corpus

    text, file = folder / "text", folder / "tokenizer.json"
    import tokenizers

    print("ready", flush=True)
    sys.stdin.readline()
    if rival == "symjax":
        options = config.Data("hub", name=str(text), tokenizer=str(file))
        with tempfile.TemporaryDirectory(dir=folder) as run:
            opened = open_corpus(options, Path(run))
            print(len(opened.train) + len(opened.heldout), flush=True)
        return
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    end = tokenizer.token_to_id("<|endoftext|>")

    def encode(batch: dict) -> dict:
        found = tokenizer.encode_batch(batch["text"])
        return {"ids": [[*x.ids, end] for x in found]}

    rows = datasets.load_dataset("parquet", data_files=f"{text}/*", split="train")
    many = processes if processes > 1 else None
    rows = rows.map(encode, batched=True, num_proc=many, remove_columns=["text"])
    count = 0
    with tempfile.TemporaryFile(dir=folder) as out:
        for batch in rows.with_format("arrow").iter(1000):
            ids = batch["ids"].combine_chunks().flatten().to_numpy().astype(np.uint16)
            out.write(ids.tobytes())
            count += len(ids)
    print(count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
