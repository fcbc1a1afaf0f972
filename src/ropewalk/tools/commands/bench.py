"""`ropewalk bench`: time the rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource

from ropewalk import _checks
from ropewalk.tools.commands._options import Length


@click.command(
    short_help="Time the rotation on this machine.",
    epilog="""\b
Examples:
  ropewalk bench --quick
  ropewalk bench --tokens 4096 --dtype bfloat16 --json results.json
  ropewalk bench --device cuda --json gpu.json
  ropewalk bench --decode --rows 8 --held 8k --dtype bfloat16
""",
)
@click.option(
    "--tokens",
    type=Length(1, 2**20),
    multiple=True,
    help="Number of tokens; 4k is 4,096. May be repeated. [default: 1, 32, 128, 1k, 4k, 16k]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    multiple=True,
    help="The dtype of q and k. May be repeated. [default: both]",
)
@click.option(
    "--backward/--no-backward", default=True, show_default=True, help="Also time forward and backward together."
)
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="Also time torch.compile.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Time only the contenders whose name contains this text, and the one with which all are compared. May be "
    "repeated.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Number of threads of PyTorch and ONNX Runtime. [default: that of PyTorch]",
)
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
@click.option(
    "--quick",
    is_flag=True,
    help="Measure at most 5 rounds and 5 seconds for each table.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all results to this file as JSON.")
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), help="Plot the times relative to copy_ into this file."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where to run. cuda is an NVIDIA or AMD GPU. It has fixed cases and accepts only --backward, --compile, "
    "--only, --rounds, --seconds and --json of the options above.",
)
@click.option(
    "--decode",
    is_flag=True,
    help="Instead of the rotation, time the attention of one layer over the caches of ropewalk and of transformers, "
    "and a decode step of a small Qwen 3 with each of them. It accepts only --dtype, --only, --threads, --rounds, "
    "--seconds and --json of the options above.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    multiple=True,
    help="With --decode: number of rows that are decoded together. May be repeated. [default: 1, 8]",
)
@click.option(
    "--held",
    type=Length(1, 2**20),
    multiple=True,
    help="With --decode: number of tokens that each row of the caches holds. May be repeated. [default: 1024]",
)
@click.option(
    "--sweep",
    is_flag=True,
    help="Instead, time ropewalk with many sizes of heads and layouts of memory. It accepts only --dtype, --threads, "
    "--rounds, --seconds and --json of the options above, and one --tokens. [default: 1024]",
)
@click.option(
    "--rehearse", is_flag=True, help="With --device cuda: run small cases on the CPU, to test the benchmark itself."
)
@click.pass_context
def bench(
    context: click.Context,
    tokens: tuple[int, ...],
    dtype: tuple[str, ...],
    backward: bool,
    compiled: bool,
    only: tuple[str, ...],
    threads: int | None,
    rounds: int,
    seconds: float,
    quick: bool,
    json_file: Path | None,
    plot_file: Path | None,
    device: Literal["cpu", "cuda"],
    decode: bool,
    rows: tuple[int, ...],
    held: tuple[int, ...],
    sweep: bool,
    rehearse: bool,
) -> None:
    """Time ropewalk's rotation, and compare it with a plain copy, the code that most projects use, and other libraries.

    Every result is checked before its computation is timed. The benchmark runs on the CPU unless --device cuda
    is given.
    """
    mode = "--decode" if decode else "--sweep" if sweep else f"--device {device}"
    _refuse_options_without_effect(context, mode)
    from ropewalk.tools import bench as the_bench

    if decode:
        decoded = the_bench.DecodeSettings(
            rows=rows or the_bench.DecodeSettings.rows,
            held=held or the_bench.DecodeSettings.held,
            dtypes=dtype or the_bench.DecodeSettings.dtypes,
            only=only,
            rounds=rounds,
            seconds=seconds,
            threads=threads,
        )
        the_bench.run_decode(decoded, click.echo, json_file=json_file)
        return

    if sweep:
        if len(tokens) > 1:
            raise _checks.error("bench", "--tokens must be given at most once with --sweep", str(tokens), "Pass one.")
        swept = the_bench.SweepSettings(
            tokens=tokens[0] if tokens else the_bench.SweepSettings.tokens,
            dtypes=dtype or the_bench.SweepSettings.dtypes,
            threads=threads,
            rounds=rounds,
            seconds=seconds,
        )
        the_bench.run_sweep(swept, click.echo, json_file=json_file)
        return

    if device == "cuda":
        on_gpu = the_bench.GpuSettings(
            backward=backward, compiled=compiled, only=only, rounds=rounds, seconds=seconds, rehearse=rehearse
        )
        the_bench.run_on_gpu(on_gpu, click.echo, json_file=json_file)
        return
    settings = the_bench.Settings(
        tokens=tokens or the_bench.Settings.tokens,
        dtypes=dtype or the_bench.Settings.dtypes,
        backward=backward,
        compiled=compiled,
        only=only,
        threads=threads,
        rounds=min(rounds, 5) if quick else rounds,
        seconds=min(seconds, 5.0) if quick else seconds,
    )
    the_bench.run(settings, click.echo, json_file=json_file, plot_file=plot_file)


_SIZES = ("tokens", "quick", "plot_file")
_CONTENDERS = ("backward", "compiled", "device", "rehearse")
_NO_EFFECT = {
    "--device cpu": ("rehearse", "rows", "held"),
    "--device cuda": (*_SIZES, "dtype", "threads", "rows", "held"),
    "--decode": (*_SIZES, *_CONTENDERS, "sweep"),
    "--sweep": (*_SIZES[1:], *_CONTENDERS, "only", "rows", "held"),
}


def _refuse_options_without_effect(context: click.Context, mode: str) -> None:
    """Raise a RopeError if an option was passed that has no effect in `mode`, a key of _NO_EFFECT."""
    for option in context.command.params:
        name, flag = str(option.name), option.opts[0]
        if name in _NO_EFFECT[mode] and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            fix = "It has no effect there. Omit it."
            raise _checks.error("bench", f"{flag} must be omitted with {mode}", flag, fix)
