"""`ropewalk bench`: time the rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource

from ropewalk import _checks


@click.command(short_help="Time the rotation on this machine.")
@click.option(
    "--tokens",
    type=click.IntRange(1, 2**20),
    multiple=True,
    help="Number of tokens; may be repeated. [1 128 1024 4096]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    multiple=True,
    help="The dtype of q and k; may be repeated. [both]",
)
@click.option(
    "--layout", type=click.Choice(["bshd", "bhsd"]), default="bshd", show_default=True, help="The layout of q and k."
)
@click.option(
    "--backward/--no-backward", default=True, show_default=True, help="Also time forward and backward together."
)
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="Also time torch.compile.")
@click.option(
    "--only",
    multiple=True,
    help="Besides copy_, time only contenders whose name contains this text; may be repeated.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of PyTorch and ONNX Runtime. [PyTorch's default]")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=30, show_default=True, help="Number of samples of each contender."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="After this many seconds, start no new round beyond the third.",
)
@click.option(
    "--stream",
    type=click.IntRange(min=0),
    help="Length of a sequence that is rotated in chunks, in tokens; 0 skips it. [1000000; 0 with --quick]",
)
@click.option(
    "--quick",
    is_flag=True,
    help="At most 5 rounds and 5 seconds for each table, and no long sequence unless --stream is given.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything as JSON.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Plot the times relative to copy_.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: an NVIDIA or AMD GPU. Its cases are fixed; of the options above it accepts --backward, --compile, "
    "--only, --rounds, --seconds and --json.",
)
@click.option(
    "--decode",
    is_flag=True,
    help="Measure instead how many tokens per second a small Qwen 3 decodes with ropewalk's cache and with "
    "the caches of transformers. Of the options above it accepts --dtype, --threads, --rounds and --json.",
)
@click.option(
    "--rehearse", is_flag=True, help="With --device cuda: run small cases on the CPU, to test the benchmark itself."
)
@click.pass_context
def bench(
    context: click.Context,
    tokens: tuple[int, ...],
    dtype: tuple[str, ...],
    layout: Literal["bshd", "bhsd"],
    backward: bool,
    compiled: bool,
    only: tuple[str, ...],
    threads: int | None,
    rounds: int,
    seconds: float,
    stream: int | None,
    quick: bool,
    json_file: Path | None,
    plot_file: Path | None,
    device: Literal["cpu", "cuda"],
    decode: bool,
    rehearse: bool,
) -> None:
    """Time ropewalk's rotation, a plain copy, the code that most projects use, and other libraries.

    Every contender's result is checked before it is timed. The benchmark runs on the CPU unless --device cuda is given.
    """
    _refuse_what_has_no_effect(context, "--decode" if decode else f"--device {device}")
    from ropewalk.programs import bench as the_bench

    if decode:
        decoded = the_bench.DecodeSettings(
            dtypes=dtype or the_bench.DecodeSettings.dtypes, rounds=rounds, threads=threads
        )
        the_bench.run_decode(decoded, click.echo, json_file=json_file)
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
        layout=layout,
        backward=backward,
        compiled=compiled,
        only=only,
        threads=threads,
        rounds=min(rounds, 5) if quick else rounds,
        seconds=min(seconds, 5.0) if quick else seconds,
        stream=stream if stream is not None else 0 if quick else the_bench.Settings.stream,
    )
    the_bench.run(settings, click.echo, json_file=json_file, plot_file=plot_file)


_SIZES = ("tokens", "layout", "stream", "quick", "plot_file")
_NO_EFFECT = {
    "--device cpu": ("rehearse",),
    "--device cuda": (*_SIZES, "dtype", "threads"),
    "--decode": (*_SIZES, "backward", "compiled", "only", "seconds", "device", "rehearse"),
}


def _refuse_what_has_no_effect(context: click.Context, measured: str) -> None:
    """Raise for options that have no effect with --decode or --device."""
    for option in context.command.params:
        name, flag = str(option.name), option.opts[0]
        if name in _NO_EFFECT[measured] and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            cure = "It has no effect there. Leave it out."
            raise _checks.error("bench", f"{flag} must be left out with {measured}", flag, cure)
