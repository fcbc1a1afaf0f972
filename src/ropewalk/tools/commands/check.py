"""`ropewalk check`: find out what a rotary embedding computes, and which bug it has."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import ropewalk
from ropewalk.tools.commands import _options


@click.command(
    short_help="Find the bug in a rotary embedding.",
    epilog="""\b
Examples:
  ropewalk check my_model.py:Rotary --config config.json
  ropewalk check my_model.py:Rotary --pairing half --base 500000
  ropewalk check my_model.py:Rotary,apply_rotary_pos_emb --config config.json
  ropewalk check transformers:llama
""",
)
@click.argument("target")
@click.option(
    "--config",
    type=_options.Source(),
    metavar="SOURCE",
    help="The config that the code should implement: config.json, folder, params.json, GGUF file, hub id, or - for "
    "standard input.",
)
@click.option("--layer", type=click.IntRange(min=0), help="Compare with the rope of this layer, if the layers differ.")
@click.option(
    "--head-dim", type=click.IntRange(min=2), help="Without a config: the number of channels of a head. [default: 64]"
)
@click.option("--base", type=float, help="The expected base; needed if the config has none.")
@click.option(
    "--pairing",
    type=click.Choice(["half", "interleaved"]),
    help="The expected pairing; needed for an unknown model_type.",
)
@_options.factor
@_options.download
@click.option(
    "--layout",
    type=click.Choice(["bshd", "bhsd", "sbhd", "thd", "hsd", "td"]),
    help="The layout of the tensors; hsd: all heads of the batch in one axis, td: one head. [default: found by trying]",
)
@click.option(
    "--call",
    metavar="ROLES",
    help='The roles of the parameters of TARGET, in order, such as "q,k,cos,sin"; _ omits a parameter.',
)
@click.option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument for the constructor of TARGET. May be repeated.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="CODE|KEY",
    help="Accept the finding with this code: it is reported, but not counted. Or ignore this key of the config. May be "
    "repeated.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Stop with status 2 after this time, for example if TARGET never returns.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="The device on which TARGET runs, such as cuda. What it returns is measured on the CPU.",
)
@click.option("--strict", is_flag=True, help="Treat cautions as errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def check(
    ctx: click.Context,
    /,
    target: str,
    arguments: tuple[str, ...],
    as_json: bool,
    strict: bool,
    time_limit: float,
    **options: Any,
) -> None:
    """Measure what the rotary embedding TARGET computes, and name its bug.

    TARGET is a function or a class, given as module:name or file.py:name. Give two names, as in file.py:make,apply, if
    the first computes cos and sin for the second. transformers:MODEL checks the code of transformers for
    a model type.

    TARGET is imported and called, so check only code that you would run. What it prints appears on stderr.

    The exit status is 0 if the code is right, 1 if it is wrong (or, with --strict, if there are cautions), and 2 if it
    cannot be judged.
    """
    paths = [*sys.path]
    sys.path.insert(0, "")  # like `python -m`, find modules in the current folder
    _watch()
    try:
        click.echo(ropewalk.conformance.says_what_runs(target), err=True)
        with _limit_time(time_limit), _keep_running(), _redirect_stdout():
            report = ropewalk.conformance.check(target, arguments=_values(arguments), **options)
    except (ropewalk.RopeError, OSError, KeyboardInterrupt) as e:
        click.echo(f"Error: {str(e) or 'check was interrupted.'}", err=True)
        ctx.exit(2)
    finally:
        sys.path[:] = paths
    click.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False) if as_json else str(report))
    ctx.exit(int(report.verdict == "wrong" or (strict and bool(report.counted))))


def _watch() -> None:
    """Go on in a child process, so that this one can report a signal that ends it, such as a segmentation fault.

    Nothing is done if torch is already imported, since its threads would be missing in the child.
    """
    if "torch" in sys.modules or not hasattr(os, "fork") or (child := os.fork()) == 0:
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            break
        except KeyboardInterrupt:  # which the child reports
            os.kill(child, signal.SIGINT)
    if status < 0:
        name = signal.Signals(-status).name
        os.write(2, f"Error: check: TARGET must return from each call, got a process ended by {name}.\n".encode())
    os._exit(status if status >= 0 else 2)


@contextlib.contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    """End the process with status 2 if the block takes longer.

    A signal would not interrupt a call of compiled code, and TARGET could catch the exception.
    """

    leave, children = os._exit, _children()

    def stop() -> None:
        os.write(2, f"Error: check was stopped after {seconds:g} s (--time-limit).\n".encode())
        _end(_children() - children)
        leave(2)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def _keep_running() -> Iterator[None]:
    """Raise an error instead of `os._exit` in the block, and end the processes that the block has started.

    They would keep stdout open. A copy of this process, which TARGET has forked, ends where the block ends.
    """
    leave, me, children = os._exit, os.getpid(), _children()

    def refuse(status: int) -> None:
        if os.getpid() != me:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave
        if os.getpid() != me:
            leave(0)
        _end(_children() - children)


def _children() -> set[int]:
    """Return the processes that this one has started and that still run, on Linux. Elsewhere, return none."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(process) for path in lists for process in path.read_text().split()}


def _end(processes: set[int]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(process, signal.SIGKILL)


class _Limited(io.TextIOBase):
    """Writes text to a stream up to a limit, and drops the rest."""

    def __init__(self, stream: Any, limit: int) -> None:
        self.stream, self.left = stream, limit

    def write(self, text: str) -> int:
        """Write the part of the text that is within the limit."""
        if self.left > 0:
            self.stream.write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                self.stream.write("\nThe rest of what TARGET prints is not shown.\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()


@contextlib.contextmanager
def _redirect_stdout() -> Iterator[None]:
    """Send to stderr what Python code, compiled code and other processes write to stdout, which is for the report."""
    sys.stdout.flush()
    stdout, stderr = os.dup(1), os.dup(2)
    os.dup2(2, 1)
    try:
        printed = _Limited(sys.stderr, 100_000)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        with contextlib.suppress(OSError, AttributeError, TypeError):  # no such function on this system
            ctypes.CDLL(None).fflush(None)  # what compiled code has written
        for kept, number in ((stdout, 1), (stderr, 2)):  # TARGET may have closed them
            os.dup2(kept, number)
            os.close(kept)


def _values(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Parse arguments NAME=VALUE into a dict. A value that is not a Python literal is kept as text."""
    values = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{argument!r} is not NAME=VALUE", param_hint="--arg")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values
