"""`ropewalk bench`: time the rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ropewalk import _checks
from ropewalk.tools.commands._options import Length


@click.command(
    short_help="Time the rotation on this machine.",
    epilog="""\b
Examples:
  ropewalk bench --quick
  ropewalk bench --tokens 4096 --dtype bfloat16 --json results.json
  ropewalk bench --device cuda --json gpu.json
""",
)
@click.option(
    "--tokens",
    type=Length(1, 2**20),
    multiple=True,
    default=(1, 32, 1024, 4096, 16_384),
    help="Number of tokens; 4k is 4,096. May be repeated. [default: 1, 32, 1k, 4k, 16k]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    multiple=True,
    default=("float32", "bfloat16"),
    help="The dtype of q and k. May be repeated. [default: both]",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where to run. cuda is an NVIDIA or AMD GPU.",
)
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="Also time torch.compile.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=30, show_default=True, help="Number of samples for each contender."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Time limit of each table: after this many seconds, only the first three rounds still start.",
)
@click.option("--quick", is_flag=True, help="Measure at most 5 rounds and 5 seconds for each table.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all results to this file as JSON.")
def bench(
    tokens: tuple[int, ...],
    dtype: tuple[str, ...],
    device: str,
    compiled: bool,
    rounds: int,
    seconds: float,
    quick: bool,
    json_file: Path | None,
) -> None:
    """Time ropewalk's rotation, and compare it with a plain copy and with the formula of transformers.

    q and k are those of one layer of Llama 3. Every result is checked before its computation is timed. On a CPU,
    OMP_NUM_THREADS sets the number of threads.
    """
    import ropewalk
    from ropewalk.tools import bench as the_bench

    kernel = ropewalk.backends()["gpu kernel"]
    if device == "cuda" and kernel.startswith("not usable"):
        must, got = "--device cuda needs a GPU that the kernels can use", kernel.removeprefix("not usable: ")
        raise _checks.error("bench", must, got, "Run it on a machine with a GPU.")
    limits: dict[str, Any] = {
        "rounds": min(rounds, 5) if quick else rounds,
        "seconds": min(seconds, 5.0) if quick else seconds,
    }
    settings = {"tokens": tokens, "dtype": dtype, "device": device, **limits}
    found: dict[str, Any] = {**the_bench.describe(), "settings": settings, "rows": []}
    the_bench.write(found, json_file)  # raises now if the file cannot be written
    click.echo(the_bench.heading(found))
    contenders = [one for one in the_bench.CONTENDERS if compiled or "compiled" not in one.name]
    clock = the_bench.OnGpu() if device == "cuda" else the_bench.OnCpu()
    for case in (the_bench.Case(n, the_bench.DTYPES[name], device) for name in dtype for n in tokens):
        rows = the_bench.rows(case, contenders, clock, **limits)
        click.echo(the_bench.table(case.title, rows))
        found["rows"] += rows
        the_bench.write(found, json_file)
