"""The options that several commands have, and the types of options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

_POWERS = {"": 0, "k": 1, "m": 2}


class Source(click.Path):
    """The path of a config, or a hub id. "-" stands for standard input."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        return super().convert("/dev/stdin" if str(value) == "-" else value, param, ctx)


class Tokens(int):
    """A number of tokens. `decimal` is what it is if "k" stands for 1,000, and "M" for 1,000,000."""

    decimal: int


class Length(click.IntRange):
    """A number of tokens. "k" after a number stands for 1,024, and "M" for 1,048,576."""

    name = "length"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. The command ends with exit status 2 if it is not one, or out of range."""
        match = re.fullmatch(r"(-?\d+)([km]?)", str(value).lower())
        if match is None:
            self.fail(f"{value!r} is not a number of tokens. Pass one such as 32768, 32k or 1M.", param, ctx)
        number, power = int(match[1]), _POWERS[match[2]]
        tokens = Tokens(super().convert(number * 1024**power, param, ctx))
        tokens.decimal = number * 1000**power
        return tokens


def names(_ctx: click.Context, _option: click.Parameter, lists: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in lists with commas."""
    found = tuple(name.strip() for names in lists for name in names.split(","))
    if "" in found:
        raise click.BadParameter("a name is missing before or after a comma. Drop the comma, or add the name.")
    return found


pairing = click.option(
    "--pairing", type=click.Choice(["half", "interleaved"]), help="The pairing, for an unknown model_type."
)
base = click.option("--base", type=float, help="The base, for a config without one.")
factor = click.option(
    "--factor",
    type=float,
    help="The scaling factor of a model in Meta's format, whose params.json does not contain it: 8 or 32.",
)


def json_object(_ctx: click.Context, _option: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """Return the JSON object in the value of an option."""
    try:
        return None if value is None else dict(**json.loads(value))
    except (TypeError, ValueError) as e:
        raise click.BadParameter(f"must be a JSON object: {e}") from None


ignore = click.option("--ignore", multiple=True, metavar="KEY", help="Ignore this key of the config. May be repeated.")
download = click.option(
    "--download", is_flag=True, help="Download the config of a hub id that is not in the local cache."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
