"""`ropewalk check`: what somebody's rotary embeddings do, and which bug they have."""

from __future__ import annotations

import ast
import json
import sys
from typing import Any

import click

import ropewalk


@click.command()
@click.argument("target")
@click.option("--config", help="What the code should do: config.json, folder, params.json, GGUF file or hub id.")
@click.option("--layer", type=click.IntRange(min=0), help="Whose rope of the config is meant, where layers differ.")
@click.option("--head-dim", type=click.IntRange(min=2), help="Without a config: channels of a head (64).")
@click.option("--base", type=float, help="Without a config: the base that it should have.")
@click.option(
    "--pairing", type=click.Choice(["half", "interleaved"]), help="Without a config: the pairing that it should have."
)
@click.option(
    "--layout", type=click.Choice(["bshd", "bhsd", "sbhd", "thd"]), help="Of its tensors; tried out otherwise."
)
@click.option("--call", metavar="ROLES", help='What its parameters are, in order: "q,k,cos,sin", "x,positions".')
@click.option(
    "--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="For its constructor; may be given again."
)
@click.option("--compile", "compiled", is_flag=True, help="Count graph breaks under torch.compile, too.")
@click.option("--strict", is_flag=True, help="Take cautions for errors.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def check(
    ctx: click.Context, /, target: str, arguments: tuple[str, ...], as_json: bool, strict: bool, **options: Any
) -> None:
    """Say what the rotary embedding TARGET does, and what is wrong with it.

    TARGET is module:name or file.py:name, a function or a class; two names, file.py:make,apply, where one makes cos and
    sin for the other; or transformers:MODEL. It is imported and called.

    Exit status: 0 right, 1 wrong, 2 it could not be judged.
    """
    click.echo(ropewalk.conformance.says_what_runs(target), err=True)
    sys.path.insert(0, "")  # a module in this folder, as `python -m` finds it
    try:
        report = ropewalk.conformance.check(target, arguments=_values(arguments), **options)
    except (ropewalk.RopeError, OSError) as e:
        click.echo(f"Error: {e}", err=True)
        ctx.exit(2)
    finally:
        sys.path.remove("")
    click.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False) if as_json else str(report))
    ctx.exit(int(report.verdict == "wrong" or (strict and bool(report.findings))))


def _values(arguments: tuple[str, ...]) -> dict[str, Any]:
    """NAME=VALUE → name → a Python literal, or else the text."""
    values = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{argument!r} is not NAME=VALUE", param_hint="--arg")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values
