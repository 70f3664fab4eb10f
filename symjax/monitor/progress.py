"""Progress of a run: a bar on a terminal, plain lines in a file."""

import contextlib
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from symjax.distributed.launch import is_process_zero

SECONDS, SHARE = 5.0, 1 / 50  # between two lines, at least; the share is of the run


class Progress:
    """Loss, tokens a second and time left of a run of `total` steps.

    Of several processes only the first one shows anything.
    """

    def __init__(self, total: int, start: int):
        self.total = total
        self.shown = is_process_zero()
        self.bar = None
        if self.shown and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=start, unit="step", smoothing=0.1)
        self.began = time.monotonic()
        self.next = self.began
        self.compiled: set[str] = set()

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        left: float,
        more: str = "",
    ):
        """Called after every step; `left` is in seconds, `more` is shown as it is."""
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s{more}",
                refresh=False,
            )
            self.bar.update(step - self.bar.n)
        elif step == self.total or now >= self.next:
            self.next = now + max(SECONDS, SHARE * (now - self.began))
            self.line(
                f"step {step}/{self.total}  loss {loss:.3f}  "
                f"{tokens_per_second:,.0f} tokens/s{more}  {duration(left)} left"
            )

    def line(self, text: str) -> None:
        """A line above the bar."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def compiling(self, program: str) -> None:
        """Say, before a program runs for the first time, that it is compiled."""
        if program not in self.compiled:
            self.compiled.add(program)
            self.line(f"compiling {program}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def print_line(line: str) -> None:
    """Print a line on stderr, in process 0 alone."""
    if is_process_zero():
        print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    tail = f"{minutes:02d}:{seconds:02d}"
    return f"{hours}:{tail}" if hours else f"{minutes}:{seconds:02d}"


class Clock:
    """Tokens a second, pauses left out.

    Args:
        tokens: of a step.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.last = float(tokens)
        self.made = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """Here the first step begins."""
        self.first, self.paused = time.monotonic(), 0.0
        self.restart()

    def restart(self) -> None:
        self.steps, self.since, self.waited = 0, time.monotonic(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a step waits for its batch."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def step(self) -> None:
        """Count one step."""
        self.steps += 1

    def data_seconds(self) -> float:
        """What a step has waited for its batch since the start, on average."""
        return self.waited / max(1, self.steps)

    def speed(self) -> float:
        """Tokens a second since `restart`; the previous value if no step has passed."""
        if self.steps:
            passed = max(time.monotonic() - self.since, 1e-9)
            self.last = self.steps * self.tokens / passed
        return self.last

    def goodput(self) -> tuple[float, float]:
        """The share of the time since this clock was made that steps have taken, and
        that time in seconds."""
        now = time.monotonic()
        whole = max(now - self.made, 1e-9)
        return (now - self.first - self.paused) / whole, whole

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        passed = time.monotonic() - began
        self.since += passed
        self.paused += passed
