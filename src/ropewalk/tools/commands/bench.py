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
@click.option("--quick", is_flag=True, help="Measure at most 5 rounds and 5 seconds for each table, instead of 30.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all results to this file as JSON.")
def bench(device: str, quick: bool, **asked: Any) -> None:
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
    the_bench.run(device=device, limit=5 if quick else 30, say=click.echo, **asked)
