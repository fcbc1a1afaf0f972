"""Test the progress of a training: a line that is updated on a terminal, and periodic lines elsewhere."""

from __future__ import annotations

import io

import pytest

from ropewalk.tools.lab import study
from ropewalk.tools.lab.study import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(study.time, "monotonic", lambda: now[0])
    return now


def run(shown: Progress, clock: list[float], first: int, steps: int) -> None:
    for done in range(first, steps + 1):
        clock[0] += 10.0
        shown(done, steps, loss=5.0 / done)


def test_a_line_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    run(Progress("text", stream, every=60.0), clock, 1, 16)
    assert stream.getvalue().splitlines() == [
        "text: 6 of 16, loss 0.833, 1:40 left",
        "text: 12 of 16, loss 0.417, 0:40 left",
        "text: 16 of 16, loss 0.312, 2:40",
    ]


def test_time_left_counts_only_what_this_run_did(clock: list[float]) -> None:
    stream = io.StringIO()
    run(Progress("text", stream, every=20.0), clock, 1001, 1004)
    assert stream.getvalue().splitlines() == [
        "text: 1002 of 1004, loss 0.005, 0:20 left",
        "text: 1004 of 1004, loss 0.005, 0:40",
    ]


def test_on_a_terminal(clock: list[float]) -> None:
    stream = Terminal()
    run(Progress("text", stream), clock, 1, 2)
    assert stream.getvalue() == (
        f"\r{'█' * 12}{'·' * 12} text: 1 of 2, loss 5.000, 0:10 left\x1b[K"
        f"\r{'█' * 24} text: 2 of 2, loss 2.500, 0:20\x1b[K\n"
    )


def test_a_terminal_is_not_drawn_at_every_step(clock: list[float]) -> None:
    stream = Terminal()
    shown = Progress("text", stream)
    for done in range(1, 50):
        clock[0] += 0.01
        shown(done, 100, 1.0)
    assert stream.getvalue().count("\r") == 4
