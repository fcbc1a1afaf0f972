"""The command line: `explain`, `demo`, `bench`, `lab`, `generate`, `export`, `doctor`. Shows what the library returns.

`explain` and `--help` start without torch; whatever needs it is imported inside its command.
"""

from __future__ import annotations

import importlib
import io
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

import ropewalk
from ropewalk import _checks


class _Group(click.Group):
    """What all commands have in common: no traceback, whatever the arguments, the files and the terminal are."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command. Characters that the encoding of the terminal does not have are written as escapes."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        """Errors of ropewalk and of the system become one line on stderr and exit status 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # nobody reads on: click ends in silence, with exit status 1
            raise
        except (ropewalk.RopeError, OSError) as e:
            raise click.ClickException(str(e)) from e


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ropewalk.__version__, prog_name="ropewalk")
def main() -> None:
    """Rotary position embeddings: what a config means, the exact angle of every token, q and k turned."""


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--length", type=click.IntRange(min=1), help="Also say what holds for sequences of so many tokens.")
@click.option("--pairing", type=click.Choice(["half", "interleaved"]), help="For a model_type ropewalk does not know.")
@click.option("--base", type=float, help="For a config that states no base.")
@click.option("--factor", type=float, help="For Meta's params.json, which does not carry it: 8 or 32.")
@click.option(
    "--text-only",
    is_flag=True,
    help="The rope of text tokens (M-RoPE), without the vision tower; no effect on models of one axis.",
)
@click.option("--ignore", multiple=True, metavar="KEY", help="Read past a key of the config; may be given again.")
@click.option("--download", is_flag=True, help="Download the config of a hub id that is not in the local cache.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw inverse frequencies before and after.")
def explain(
    source: Path,
    length: int | None,
    pairing: str | None,
    base: float | None,
    factor: float | None,
    text_only: bool,
    ignore: tuple[str, ...],
    download: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Say what the config SOURCE means for rotation.

    SOURCE is a config.json, the folder of a model, Meta's params.json, a GGUF file, or a hub id such as
    meta-llama/Llama-3.1-8B.
    """
    ropes = ropewalk.from_config(
        source, pairing=pairing, base=base, factor=factor, text_only=text_only, ignore=ignore, download=download
    )
    pictures = [] if plot is None else _pictures(ropes, length, plot)
    facts = ropes.facts(length)
    click.echo(json.dumps(facts, indent=2, allow_nan=False) if as_json else ropes.explain(length))
    for rope, layers, path in pictures:
        from ropewalk import plots

        plots.save(plots.inv_freq(rope), path)
        click.echo(f"drew {path}: {layers}", err=as_json)


def _pictures(ropes: ropewalk.ModelRopes, length: int | None, plot: Path) -> list[tuple[ropewalk.Rope, str, Path]]:
    """What to draw and where: one picture for each distinct rope, numbered where there are several."""
    from ropewalk import plots

    plots.check_path(plot)
    groups = [(rope, layers) for rope, layers in ropes.groups() if rope is not None]
    if not groups:
        raise click.ClickException("--plot: no layer rotates, so there is nothing to draw.")
    if length is None and not all(rope.is_static for rope, _ in groups):
        raise click.ClickException("--plot: the frequencies depend on the length. Pass --length N too.")
    drawn = [
        (rope if length is None else rope.at_length(length), f"layer {rows[0]} and {len(rows) - 1} more")
        for rope, rows in groups
    ]
    if len(drawn) == 1:
        return [(*drawn[0], plot)]
    return [(*one, plot.with_stem(f"{plot.stem}-{i}")) for i, one in enumerate(drawn, start=1)]


@main.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ropewalk-demo"),
    show_default=True,
    help="Where the pictures go.",
)
def demo(folder: Path) -> None:
    """Turn q and k on the published numbers of Llama 3.1 8B, check them, time them, draw them. No download."""
    from ropewalk.programs import demo as the_demo

    the_demo.run(folder, click.echo)


@main.command()
@click.option(
    "--tokens", type=click.IntRange(1, 2**20), multiple=True, help="A size; may be repeated. [1 128 1024 4096]"
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), multiple=True, help="May be repeated. [both]")
@click.option("--layout", type=click.Choice(["bshd", "bhsd"]), default="bshd", show_default=True)
@click.option("--backward/--no-backward", default=True, show_default=True, help="Also forward and backward together.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="Also under torch.compile.")
@click.option(
    "--only",
    multiple=True,
    help="Only contenders with this in their name, beside copy_, which is always measured; may be repeated.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Of PyTorch and ONNX Runtime. [as PyTorch finds]")
@click.option("--rounds", type=click.IntRange(min=1), default=30, show_default=True, help="Samples of each contender.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="No round begins later, after the third.",
)
@click.option(
    "--stream",
    type=click.IntRange(min=0),
    help="Tokens of a long sequence in chunks, 0 for none. [1000000; 0 with --quick]",
)
@click.option(
    "--quick",
    is_flag=True,
    help="At most 5 rounds and 5 seconds for a table, no long sequence unless --stream says one.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything as JSON.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw time over that of copy_.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: on a GPU of NVIDIA or AMD. Its cases are fixed; of the options above it takes --backward, --compile, "
    "--only, --rounds, --seconds and --json.",
)
@click.option("--rehearse", is_flag=True, help="With --device cuda: small, on the CPU, to see that it works.")
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
    rehearse: bool,
) -> None:
    """Time the rotation against a copy, the usual code and other libraries; only what is right is timed.

    On this CPU, unless --device cuda is passed.
    """
    _refuse_what_has_no_effect(context, device)
    from ropewalk.programs import bench as the_bench

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


_NO_EFFECT = {"cpu": ("rehearse",), "cuda": ("tokens", "dtype", "layout", "threads", "stream", "quick", "plot_file")}


def _refuse_what_has_no_effect(context: click.Context, device: str) -> None:
    """Of the options of `bench`, on this device."""
    for option in context.command.params:
        name, flag = str(option.name), option.opts[0]
        if name in _NO_EFFECT[device] and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            cure = "It has no effect there: leave it out, or pass another --device."
            raise _checks.error("bench", f"{flag} must be left out with --device {device}", flag, cure)


@main.command()
@click.option(
    "--task", type=click.Choice(["copy", "text"]), help="Only this task, on one seed; text: about 13 minutes."
)
@click.option("--quick", is_flag=True, help="The same as --task copy: a few minutes.")
@click.option("--baselines", is_flag=True, help="Also train models with learned, sinusoidal and no positions.")
@click.option("--seed", type=click.IntRange(0, 2**28), default=0, show_default=True, help="The first of them.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ropewalk-lab"),
    show_default=True,
    help="Where everything is kept. The same folder again goes on where the last run stopped.",
)
def lab(task: str | None, quick: bool, baselines: bool, seed: int, out: Path) -> None:
    """Train small models on short sequences; see what each scaling makes of long ones, and short fine-tunes.

    Two tasks, copying and the text that Python ships, on three seeds: about an hour on two cores, and it says
    beforehand how long here; --quick takes less than 6 minutes. No scaling, PI, NTK, by parts, Llama 3, YaRN, PI, NTK
    and YaRN as dynamic, Self-Extend; fine-tunes with none, PI, NTK, YaRN and a larger base. Tables, JSON, pictures and
    words are written at the end, of what this command was asked for: name another --out to keep both of two.

    For a model that writes text, run `ropewalk lab --task text`. It is in ropewalk-lab/parts/text-0-trained.safetensors
    (under --out; 0 is the seed) from its first step on, and is trained to the end before anything else is done. Pass
    that file to `ropewalk generate` and `ropewalk export`.
    """
    from ropewalk.lab import study

    if quick and task == "text":
        raise click.UsageError("--quick is the copy task, so it cannot be combined with --task text. Drop one of them.")
    chosen = {None: study.full, "copy": study.quick, "text": study.text}["copy" if quick else task]
    study.run(chosen(seed, baselines=baselines), out, click.echo)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--prompt", default="def ", show_default=True, help="What the text begins with.")
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="How many bytes to make.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True, help="0 takes the likeliest byte."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of what is drawn.")
def generate(checkpoint: Path, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Text from a prompt by the CHECKPOINT of a text model of the lab, and tokens per second."""
    from ropewalk.lab import generate as the_generator

    def write(text: str) -> None:
        click.echo(text, nl=False)

    speed = the_generator.run(checkpoint, prompt, tokens=tokens, temperature=temperature, seed=seed, write=write)
    click.echo(speed, err=True)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["hf", "llama2.c"]), required=True, help="A folder, or one file.")
@click.option("--max-positions", type=click.IntRange(min=1), required=True, help="The length to write, in tokens.")
@click.option("--force", is_flag=True, help="Replace an export that is there already.")
def export(checkpoint: Path, target: Path, form: str, max_positions: int, force: bool) -> None:
    """Write the model of a CHECKPOINT of the lab to TARGET: a Llama of Hugging Face, or llama2.c's file.

    hf: TARGET is a folder, new or empty. It gets config.json, model.safetensors and, for a model of bytes,
    tokenizer.json and tokenizer_config.json, all at once. llama2.c: TARGET is a new file; a model of bytes also gets a
    tokenizer.bin beside it.

    Nothing that exists is replaced without --force. With it, the files named above are, but never CHECKPOINT itself,
    nor a folder that holds anything else.
    """
    from ropewalk.lab import export as the_export

    the_export.run(checkpoint, target, form, max_positions=max_positions, force=force)
    click.echo(f"wrote {target}")


@main.command()
def doctor() -> None:
    """Say which versions are here, and which backends are usable and why the others are not."""
    click.echo(f"ropewalk    {ropewalk.__version__}")
    click.echo(f"python      {platform.python_version()} on {platform.platform()}")
    for package in ("torch", "numpy", "triton", "matplotlib"):
        click.echo(f"{package:<10}  {_version(package)}")
    for backend, state in _backends().items():
        click.echo(f"{backend:<10}  {state}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> dict[str, str]:
    """Each backend and whether it can be used."""
    try:
        importlib.import_module("torch")
        return ropewalk.backends()
    except (ImportError, OSError) as e:
        return {"reference": f"not usable: torch cannot be imported ({e})"}
