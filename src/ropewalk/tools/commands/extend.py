"""`ropewalk extend`: what to type to run a model on longer texts."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ropewalk.tools.commands import _options


@click.command(
    short_help="Run a model on longer texts.",
    epilog="""\b
Examples:
  ropewalk extend path/to/model --to 128k
  ropewalk extend Qwen/Qwen2.5-7B-Instruct --download --to 128k --for vllm
  ropewalk extend path/to/model --to 128k --method yarn --factor 4 --write path/to/new
""",
)
@click.argument("source", type=_options.Source())
@click.option(
    "--to", "target", type=_options.Length(min=1), required=True, help="The length, in tokens; 128k is 131,072."
)
@click.option(
    "--for",
    "engines",
    metavar="ENGINES",
    default="vllm,sglang,llama.cpp,transformers",
    show_default=True,
    help="The engines, with commas between them.",
)
@click.option(
    "--method",
    type=click.Choice(["llama3", "yarn", "linear", "ntk", "dynamic"]),
    help="The scheme. ntk is a larger base. [default: the config's, or llama3, or else yarn]",
)
@click.option(
    "--factor", type=float, help="The factor of the scheme. [default: 1.5 or 2 times the ratio of the lengths]"
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
    default="5",
    show_default=True,
    help="The version of transformers that reads what --write writes.",
)
@_options.pairing
@_options.base
@_options.ignore
@_options.download
@_options.as_json
@click.pass_context
def extend(
    context: click.Context,
    source: Path,
    target: int,
    engines: str,
    method: str | None,
    factor: float | None,
    folder: Path | None,
    version: str,
    pairing: str | None,
    base: float | None,
    ignore: tuple[str, ...],
    download: bool,
    as_json: bool,
) -> None:
    """Find the config and the commands with which engines run the model SOURCE on texts of another length.

    SOURCE is a config.json, the folder of a model, a GGUF file, a params.json, or a hub id.

    The exit status is 2 if an engine has no command.
    """
    from ropewalk.tools import extend as extending

    found = extending.extend(
        source,
        target,
        engines=tuple(name.strip() for name in engines.split(",")),
        method=method,
        factor=factor,
        model=_model(source),
        pairing=pairing,
        base=base,
        ignore=ignore,
        download=download,
    )
    if folder is not None:
        extending.write(found, source, folder, version=int(version))
    click.echo(json.dumps(found.facts, indent=2, allow_nan=False) if as_json else found.text())
    if folder is not None:
        click.echo(f"\nwrote {folder}, whose config.json states this, so engines only need the length", err=as_json)
    context.exit(0 if found.complete else 2)


def _model(source: Path) -> str:
    """Return the model in the commands: the folder, the file, or the hub id that was passed."""
    if str(source) == "/dev/stdin":
        return "MODEL"
    return str(source.parent if source.suffix == ".json" else source)
