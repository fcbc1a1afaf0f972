"""`ropewalk check`: find out what a rotary embedding computes, and which bug it has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ropewalk import _checks
from ropewalk.tools.commands import _options

_TO_START = 60.0
"""The time in which a new process imports torch, in seconds."""
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 10**6)
"""The status of a process that has used the CPU time that the system allows it."""


@click.command(
    short_help="Find the bug in a rotary embedding.",
    epilog="""\b
Examples:
  ropewalk check my_model.py:Rotary --config config.json
  ropewalk check my_model.py:Rotary --pairing half --base 500000
  ropewalk check my_model.py:Rotary,apply_rotary_pos_emb --config config.json
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
    help="The expected pairing; needed for an unknown model_type or converted weights.",
)
@_options.factor
@_options.download
@click.option(
    "--layout",
    type=click.Choice(["bshd", "bhsd", "sbhd", "thd", "bsd", "td", "bhds", "bds", "hd", "d", "1111d"]),
    help="The layout of the tensors; bsd, td, bds: one head; d, 1111d: one token. [default: found by trying]",
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
    help="Stop with status 2 after this CPU time, or, if TARGET waits, after a minute and twice this time.",
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
    as_json: bool,
    strict: bool,
    time_limit: float,
    **options: Any,
) -> None:
    """Measure what the rotary embedding TARGET computes, and name its bug.

    TARGET is a function or a class, given as module:name or file.py:name. Give two names, as in file.py:make,apply, if
    the first computes cos and sin for the second.

    TARGET is imported and called, so check only code that you would run. What it prints appears on stderr.

    The exit status is 0 if the code is right, 1 if it is wrong (or, with --strict, if there are cautions), and 2 if it
    cannot be judged.
    """
    options["config"] = options["config"] and str(options["config"])
    asked = {"target": target, "arguments": options, "seconds": time_limit}
    try:
        answer = _run({**asked, "options": dict(_checks.OPTIONS.get() or {})})
    except KeyboardInterrupt:
        answer = {"error": "check was interrupted."}
    if "error" in answer:
        click.echo(f"Error: {answer['error']}", err=True)
        ctx.exit(2)
    facts = answer["facts"]
    click.echo(json.dumps(facts, indent=2, allow_nan=False) if as_json else answer["text"])
    counted = any(not finding["ignored"] for finding in facts["findings"])
    ctx.exit(int(facts["verdict"] == "wrong" or (strict and counted)))


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a check in another process, which TARGET may end or fill with text, and return what it answers."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the other process ends, too
    # Threads that wait for work must not use up the CPU time.
    environment = {"OMP_WAIT_POLICY": "passive", "LOCAL_RANK": "0", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "asked.json").write_text(json.dumps(asked))
        command = [sys.executable, "-m", "ropewalk.tools.commands._check_process", folder]
        with subprocess.Popen(command, stdout=2, env=environment, start_new_session=True) as process:
            try:
                status = process.wait(2 * asked["seconds"] + _TO_START)
            except subprocess.TimeoutExpired:
                status = _OUT_OF_TIME
            finally:
                with contextlib.suppress(OSError):  # all that TARGET has started has ended
                    os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        if (report := Path(folder, "report.json")).exists():
            return dict(json.loads(report.read_text()))
    if status == _OUT_OF_TIME:
        return {"error": f"check was stopped after {asked['seconds']:g} s (--time-limit)."}
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return {"error": f"check: TARGET must return from each call, got a process that ended {how}."}
