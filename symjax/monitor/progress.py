"""Progress of a run: a bar on a terminal, plain lines in a file; and its speed."""

import contextlib
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from symjax.distributed.launch import is_process_zero

# Two lines are at least SECONDS apart, or SHARE of the time since the start if that is
# longer.
SECONDS, SHARE = 5.0, 1 / 50


class Progress:
    """Display of loss, tokens a second and time left, on stderr.

    With several processes only the first one shows anything.

    Args:
        total: number of steps of the run.
        start: number of steps before the run resumed.
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
        suffix: str = "",
    ):
        """Show the progress after a step.

        Args:
            left: seconds until the end of the run.
            suffix: shown after the tokens a second.
        """
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s{suffix}",
                refresh=False,
            )
            self.bar.update(step - self.bar.n)
        elif step == self.total or now >= self.next:
            self.next = now + max(SECONDS, SHARE * (now - self.began))
            self.line(
                f"step {step}/{self.total}  loss {loss:.3f}  "
                f"{tokens_per_second:,.0f} tokens/s{suffix}  {duration(left)} left"
            )

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def compiling(self, program: str) -> None:
        """Print that a program is compiled, the first time that it is named."""
        if program not in self.compiled:
            self.compiled.add(program)
            self.line(f"compiling {program}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def print_line(line: str) -> None:
    """Print a line on stderr, only in process 0."""
    if is_process_zero():
        print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss, or as m:ss below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    tail = f"{minutes:02d}:{seconds:02d}"
    return f"{hours}:{tail}" if hours else f"{minutes}:{seconds:02d}"


class Clock:
    """Clock of a run: tokens a second without pauses, and goodput.

    Args:
        tokens: number of tokens of a step.
    Attributes:
        peak: tokens a second that the devices reach at their peak FLOP/s; 0 if it is
            unknown.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.peak = 0.0
        self.last_speed = float(tokens)
        self.created = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """Note that the first step begins now."""
        self.began, self.paused = time.monotonic(), 0.0
        self.restart()

    def restart(self) -> None:
        """Restart the measurement of `speed` and `data_seconds`."""
        self.steps, self.measured_since, self.waited = 0, time.monotonic(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for a batch."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def step(self) -> None:
        """Count one step."""
        self.steps += 1

    def data_seconds(self) -> float:
        """Return the mean wait of a step for its batch since `restart`, in seconds."""
        return self.waited / max(1, self.steps)

    def speed(self) -> float:
        """Return tokens a second since `restart`; before any step, the last value."""
        if self.steps:
            passed = max(time.monotonic() - self.measured_since, 1e-9)
            self.last_speed = self.steps * self.tokens / passed
        return self.last_speed

    def goodput(self) -> tuple[float, float]:
        """Return the goodput, and the seconds since this clock was made.

        The goodput is the share of these seconds that steps have taken.
        """
        now = time.monotonic()
        total = max(now - self.created, 1e-9)
        return (now - self.began - self.paused) / total, total

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the time of the block out of `speed` and goodput."""
        began = time.monotonic()
        yield
        passed = time.monotonic() - began
        self.measured_since += passed
        self.paused += passed
