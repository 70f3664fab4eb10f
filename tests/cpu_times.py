"""Measure the processor time of tests, and write the slow ones to tests/slow.txt.

    PYTHONPATH=tests python -m pytest -p cpu_times -m "" -n auto --dist loadfile

Tests in that file only run with `pytest -m slow`. The cheapest case of a test function
is slow if it takes 1.5 seconds of processor time or more, setup included. Every other
case is slow if it takes more than 0.3 seconds. Tests that are marked `always` or `slow`
in their own file are not listed. Tests that did not run keep their line.
"""

import os
from functools import cache
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parent / "slow.txt"
LIMIT, CHEAPEST = 0.3, 1.5  # seconds
KEY = "cpu seconds"
MARKS = "slow", "always"


@cache
def listed() -> frozenset[str]:
    return frozenset(FILE.read_text(encoding="utf-8").splitlines())


def slow(seconds: dict[str, float]) -> set[str]:
    """Return the slow tests, given the seconds of all tests."""
    cheapest: dict[str, str] = {}
    for name in sorted(seconds, key=lambda x: seconds[x]):
        cheapest.setdefault(name.partition("[")[0], name)
    kept = {x for x in cheapest.values() if seconds[x] < CHEAPEST}
    return {x for x, taken in seconds.items() if taken > LIMIT} - kept


def _used() -> float:
    """Return the processor seconds of this process and of its finished children."""
    return sum(os.times()[:4])


_began: dict[str, float] = {}
_seconds: dict[str, float] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _began[item.nodeid] = _used()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    marks = [mark.name for mark in item.iter_markers() if mark.name in MARKS]
    if call.when == "call" and len(marks) == (item.nodeid in listed()):
        taken = _used() - _began[item.nodeid]
        item.user_properties.append((KEY, taken))
    return (yield)


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed and KEY in dict(report.user_properties):
        _seconds[report.nodeid] = dict(report.user_properties)[KEY]


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        names = (listed() - _seconds.keys()) | slow(_seconds)
        FILE.write_text("".join(f"{x}\n" for x in sorted(names)), encoding="utf-8")
