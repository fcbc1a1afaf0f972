"""Show the progress of a training: completed steps, loss, time left."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """Show the progress of one training: a line that is updated on a terminal, or periodic lines otherwise.

    Args:
        label: a short name of the training.
        stream: output stream, usually `sys.stderr`.
        every: seconds between lines if stream is not a terminal. On a terminal, the line is updated at most 10 times
            per second.
    """

    def __init__(self, label: str, stream: TextIO, *, every: float = 60.0) -> None:
        self._label, self._stream = label, stream
        self._terminal = stream.isatty()
        self._every = 0.1 if self._terminal else every
        self._began = self._shown = time.monotonic()
        self._first: int | None = None

    def step(self, done: int, steps: int, loss: float) -> None:
        """Report the number of completed steps, and the loss of the last one in nats."""
        now = time.monotonic()
        if self._first is None:
            self._first = done - 1  # steps of an earlier run do not count for the time left
        if now - self._shown < self._every and done < steps:
            return
        self._shown = now
        left = (now - self._began) / (done - self._first) * (steps - done)
        text = f"{self._label}: {done} of {steps}, loss {loss:.3f}, "
        text += f"{_clock(left)} left" if done < steps else f"{_clock(now - self._began)}"
        if self._terminal:
            filled = 24 * done // steps
            bar = "█" * filled + "·" * (24 - filled)
            self._stream.write(f"\r{bar} {text}\x1b[K" + ("\n" if done == steps else ""))
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
