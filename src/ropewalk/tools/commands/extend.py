"""`ropewalk extend`: what to type to run a model on longer texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ropewalk.tools.commands import _options


@click.command(
    short_help="Run a model on longer texts.",
    epilog="""\b
Examples:
  ropewalk extend path/to/model --to 128k
  ropewalk extend Qwen/Qwen2.5-7B-Instruct --download --to 128k --for vllm
  ropewalk extend path/to/config.json --for llama.cpp
  ropewalk extend path/to/model --to 128k --measure --keep measured.json
  ropewalk extend path/to/model --to 128k --method yarn --factor 4 --write path/to/new
""",
)
@click.argument("source", type=_options.Source())
@click.option(
    "--to",
    "target",
    type=_options.Length(min=1),
    help="The length, in tokens; 128k is 131,072. [default: what the config states]",
)
@click.option(
    "--for",
    "engine",
    multiple=True,
    metavar="NAME",
    callback=_options.names,
    help="Only this engine. May be repeated, or a list with commas. [default: vllm,sglang,llama.cpp,transformers]",
)
@click.option(
    "--method",
    type=click.Choice(["llama3", "yarn", "linear", "ntk", "dynamic"]),
    help="The scheme. ntk is a larger base. [default: the config's, or llama3, or else yarn]",
)
@click.option(
    "--factor",
    "new_factor",  # the `factor` of from_config is that of the file
    type=float,
    help="The factor of the scheme. [default: 2 times the ratio of the lengths, or what the authors recommend]",
)
@click.option(
    "--original",
    type=_options.Length(min=1),
    help="The length before scaling; 128k is 131,072. [default: that of the config]",
)
@click.option(
    "--write",
    "folder",
    type=click.Path(path_type=Path),
    help="Write the config into this new folder, with links to the weights.",
)
@click.option(
    "--version",
    type=click.Choice(["5", "4"]),
    help="The version of transformers whose schema --write writes. [default: that of the file]",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Load the model with transformers, and measure its reach, the method and the factor.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="With --measure: keep results in this JSON file, and continue."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="With --measure: the dtype of the model.",
)
@click.option("--device", default="cpu", show_default=True, help="With --measure: the device of the model.")
@_options.pairing
@_options.base
@_options.ignore
@_options.download
@_options.as_json
@click.pass_context
def extend(
    context: click.Context,
    /,
    source: Path,
    target: _options.Tokens | None,
    engine: tuple[str, ...],
    method: str | None,
    new_factor: float | None,
    folder: Path | None,
    version: str | None,
    measure: bool,
    keep: Path | None,
    dtype: str,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the config and the commands with which engines run the model SOURCE on texts of another length.

    Without --to, find the commands with which they rotate as the config says, if their defaults do not.

    SOURCE is a config.json, the folder of a model, a GGUF file, a params.json, litgpt's model_config.yaml, or a hub id.
    With --measure, it must have weights.

    The exit status is 2 if an engine has no command. One that takes no arguments for this, such as mlx-lm, needs none
    if it reads the config that --write writes.
    """
    from ropewalk.tools import extend as extending

    _refuse_without(context, "write", ("version",), passed=folder is not None)
    _refuse_without(context, "measure", ("keep", "dtype", "device"), passed=measure)
    _refuse_without(context, "to", ("measure",), passed=target is not None)
    measured: dict[str, Any] | None = None
    if measure and target is not None:
        if any(each is not None for each in (method, new_factor, options["original"])):
            what = "--method, --factor and --original"
            raise click.UsageError(f"--measure finds the method and the factor. Drop {what}, or --measure.")
        from ropewalk.tools.extend.measure import measure as measure_model
        from ropewalk.tools.extend.measured import measured_text

        measured = measure_model(source, target, dtype=dtype, device=device, keep=keep)
        if not as_json:
            click.echo(f"{measured_text(measured)}\n")
        if measured["method"] is None:
            nothing = json.dumps({"measured": measured}, indent=2, allow_nan=False)
            click.echo(nothing if as_json else "No factor was found.")
            context.exit(2)
    found = extending.extend(
        source,
        target,
        decimal=None if target is None else target.decimal,
        engines=engine or extending.DEFAULT,
        method=measured["engines"] if measured and measured["engines"] else method,
        new_factor=new_factor,
        model=_model(source),
        **options,
    )
    if folder is not None:
        found = extending.write(found, source, folder, version=None if version is None else int(version))
    facts = {**found.facts, "measured": measured}
    click.echo(json.dumps(facts, indent=2, allow_nan=False) if as_json else found.text())
    if folder is not None:
        click.echo(f"\nwrote {folder}, whose config.json states these ropes and this length", err=as_json)
    context.exit(0 if found.complete else 2)


def _refuse_without(context: click.Context, option: str, names: tuple[str, ...], *, passed: bool) -> None:
    """Raise an error if an option was passed that only another one, which was not passed, makes effective."""
    for name in names:
        if not passed and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name} has no effect without --{option}. Pass both.")


def _model(source: Path) -> str:
    """Return the model in the commands: the folder, the GGUF file, or the hub id that was passed, if it is known."""
    if source.name == "config.json":
        return str(source.parent)
    return "MODEL" if str(source) == "/dev/stdin" or source.suffix == ".json" else str(source)
