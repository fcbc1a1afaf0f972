"""The types of options that several commands have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

_UNITS = {"k": 2**10, "m": 2**20}


class Source(click.Path):
    """The path of a config, or a hub id. "-" stands for standard input."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        return super().convert("/dev/stdin" if str(value) == "-" else value, param, ctx)


class Length(click.IntRange):
    """A number of tokens. "k" after a number stands for 1,024, and "M" for 1,048,576."""

    name = "length"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. The command ends with exit status 2 if it is not one, or out of range."""
        match = re.fullmatch(r"(\d+)([km])", value.lower()) if isinstance(value, str) else None
        return super().convert(value if match is None else int(match[1]) * _UNITS[match[2]], param, ctx)
