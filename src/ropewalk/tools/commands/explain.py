"""`ropewalk explain`: show what a config means for the rotation."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

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
@_options.download
@click.option("--list", "as_list", is_flag=True, help="List the model types that can be read, without a SOURCE.")
@_options.as_json
@click.pass_context
def explain(
    context: click.Context,
    /,
    source: Path | None,
    length: int | None,
    as_list: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Show what the config SOURCE means for the rotation, and where each value comes from.

    SOURCE is a config.json, the folder of a model, a params.json, a GGUF file, or a hub id such as
    meta-llama/Llama-3.1-8B. With -, a config.json or params.json is read from standard input.
    """
    if as_list:
        _print_model_types(context, as_json=as_json)
        return
    if source is None:
        raise click.UsageError("Missing argument 'SOURCE'.")
    with warnings.catch_warnings(action="ignore"):  # the text contains them
        ropes = ropewalk.from_config(source, **asked)
    facts = ropes.facts(length)
    click.echo(json.dumps(facts, indent=2, allow_nan=False) if as_json else ropes.explain(length))


def _print_model_types(context: click.Context, *, as_json: bool) -> None:
    from ropewalk.configs.listing import model_types

    _refuse_others(context)
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


def _refuse_others(context: click.Context) -> None:
    """Raise an error if an argument was passed that has no effect beside --list."""
    for parameter in context.command.params:
        passed = context.get_parameter_source(str(parameter.name)) is not click.core.ParameterSource.DEFAULT
        if passed and parameter.name not in ("as_list", "as_json"):
            what = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise click.UsageError(f"{what} has no effect with --list. Drop one of them.")
