"""`ropewalk explain`: show what a config means for the rotation."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import click

import ropewalk
from ropewalk.tools.commands import _options


@click.command(
    short_help="Show what a config means.",
    epilog="""\b
Examples:
  ropewalk explain path/to/config.json --length 128k
  ropewalk explain meta-llama/Llama-3.1-8B --download
  ropewalk explain params.json --factor 8
  ropewalk explain path/to/config.json --for vllm
  cat config.json | ropewalk explain -
  ropewalk explain --list
""",
)
@click.argument("source", type=_options.Source(), required=False)
@click.option(
    "--length",
    type=_options.Length(min=1),
    help="Also show what happens at this sequence length, in tokens; 128k is 131,072.",
)
@_options.pairing
@click.option("--like", metavar="MODEL_TYPE", help="Read an unknown model_type by the rules of this known one.")
@_options.base
@_options.factor
@click.option(
    "--text-only",
    is_flag=True,
    help="For multimodal models: show only the rope of text tokens; no effect on text models of one axis.",
)
@_options.ignore
@click.option(
    "--for",
    "engine",
    metavar="ENGINE",
    help="Say how to make this engine rotate as the config says: transformers, vllm, sglang or llama.cpp.",
)
@_options.download
@click.option("--list", "as_list", is_flag=True, help="List the model types that can be read, without a SOURCE.")
@_options.as_json
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Plot the inverse frequencies before and after scaling into this file.",
)
@click.pass_context
def explain(
    context: click.Context,
    source: Path | None,
    length: int | None,
    pairing: str | None,
    like: str | None,
    base: float | None,
    factor: float | None,
    text_only: bool,
    ignore: tuple[str, ...],
    engine: str | None,
    download: bool,
    as_list: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Show what the config SOURCE means for the rotation, and where each value comes from.

    SOURCE is a config.json, the folder of a model, a params.json, a GGUF file, or a hub id such as
    meta-llama/Llama-3.1-8B. With -, a config.json or params.json is read from standard input.

    With --for, the exit status is 2 if the engine was not judged, because what it reads for this model is not known, or
    because --ignore left out a key.
    """
    if as_list:
        _print_model_types(context, as_json=as_json)
        return
    if source is None:
        raise click.UsageError("Missing argument 'SOURCE'.")
    if engine is not None:
        _refuse_others(context, "--for", {"source", "length", "pairing", "base", "ignore", "download", "as_json"})
        found = ropewalk.diff.for_engine(
            source, engine, length=length, pairing=pairing, base=base, ignore=ignore, download=download
        )
        click.echo(json.dumps(found.facts, indent=2, allow_nan=False) if as_json else found.text())
        context.exit(2 if found.verdict == "not judged" else 0)
    with warnings.catch_warnings(action="ignore"):  # the text contains them
        ropes = ropewalk.from_config(
            source,
            pairing=pairing,
            base=base,
            factor=factor,
            text_only=text_only,
            ignore=ignore,
            download=download,
            like=like,
        )
    pictures = [] if plot is None else _pictures(ropes, length, plot)
    facts = ropes.facts(length)
    click.echo(json.dumps(facts, indent=2, allow_nan=False) if as_json else ropes.explain(length))
    for rope, names, layers, path in pictures:
        from ropewalk import plots

        plots.save(plots.inv_freq(rope, axis_names=names), path)
        click.echo(f"drew {path}: {layers}", err=as_json)


def _print_model_types(context: click.Context, *, as_json: bool) -> None:
    from ropewalk.configs.listing import model_types

    _refuse_others(context, "--list", {"as_json"})
    groups = model_types()
    if as_json:
        click.echo(json.dumps(groups, indent=2))
        return
    width = max(len(name) for names in groups.values() for name in names)
    for group, names in groups.items():
        click.echo(f"{group} ({len(names)})")
        for name, words in names.items():
            click.echo(f"  {name:{width}}  {words}")
        click.echo()


def _refuse_others(context: click.Context, option: str, allowed: set[str]) -> None:
    """Raise an error if an argument was passed that has no effect beside an option."""
    for parameter in context.command.params:
        name = str(parameter.name)
        passed = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if passed and option not in parameter.opts and name not in allowed:
            what = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise click.UsageError(f"{what} has no effect with {option}. Drop one of them.")


def _pictures(
    ropes: ropewalk.ModelRopes, length: int | None, plot: Path
) -> list[tuple[ropewalk.Rope, tuple[str, ...], str, Path]]:
    """Return a tuple for each picture to draw: the rope, the names of its axes, a description, and the file.

    The ropes of the vision tower come last. If there are several pictures, their files are numbered.
    """
    from ropewalk import plots

    plots.check_path(plot)
    pictures = [
        (rope, () if rope.axes is None else ropes.axis_names, f"layer {rows[0]} and {len(rows) - 1} more")
        for rope, rows in ropes.groups()
        if rope is not None
    ]
    if ropes.vision is not None:
        count = len(ropes.vision.ropes)
        for number, rope in enumerate(ropes.vision.ropes, start=1):
            description = f"vision tower, rope {number} of {count}" if count > 1 else "vision tower"
            pictures.append((rope, ropes.vision.axis_names, description))
    if not pictures:
        raise click.ClickException("--plot: no layer rotates, so there is nothing to draw.")
    if length is None and not all(rope.is_static for rope, _, _ in pictures):
        raise click.ClickException("--plot: the frequencies depend on the length. Also pass --length N.")
    if length is not None:
        pictures = [(rope.at_length(length), names, description) for rope, names, description in pictures]
    if len(pictures) == 1:
        return [(*pictures[0], plot)]
    return [(*picture, plot.with_stem(f"{plot.stem}-{i}")) for i, picture in enumerate(pictures, start=1)]
