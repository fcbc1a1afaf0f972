"""The command line. Each command is a file in `commands`.

Modules that need torch are imported inside their command, so `explain` and `--help` start without it.
"""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import click

import ropewalk
from ropewalk import _checks
from ropewalk.tools.commands.bench import bench
from ropewalk.tools.commands.check import check
from ropewalk.tools.commands.convert import convert
from ropewalk.tools.commands.demo import demo
from ropewalk.tools.commands.diff import diff
from ropewalk.tools.commands.doctor import doctor
from ropewalk.tools.commands.explain import explain
from ropewalk.tools.commands.explore import explore
from ropewalk.tools.commands.extend import extend
from ropewalk.tools.commands.verify import verify

# The sections of `ropewalk --help`, and the commands of each.
_SECTIONS = {
    "Read, compare and convert models": (explain, diff, extend, explore, convert),
    "Check and measure": (check, verify, bench, doctor, demo),
}


class _Group(click.Group):
    """The group of all commands. It lists them in sections, and reports their errors without a traceback."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands and their summaries for `ropewalk --help`, in sections."""
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                width = formatter.width - 6 - max(len(name) for name in self.commands)
                formatter.write_dl([(str(c.name), c.get_short_help_str(width)) for c in commands])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. Characters that the terminal's encoding lacks are written as escapes."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **kwargs)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command to run. From then on, messages name its options instead of arguments of Python."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            options = [p for p in command.params if isinstance(p, click.Option)]
            _checks.OPTIONS.set({str(option.name): option.opts[0] for option in options})
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        """Run a command. Report errors of ropewalk and of the operating system in one line, with exit status 1.

        Warnings of ropewalk about the user's files take one line as well.
        """
        outside = _checks.OPTIONS.set(None)
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=UserWarning, module=r"ropewalk\.")
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except BrokenPipeError:  # the reader closed the pipe: click exits silently with status 1
                raise
            except (ropewalk.RopeError, OSError) as e:
                raise click.ClickException(str(e)) from e
            finally:
                _checks.OPTIONS.reset(outside)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"Warning: {message}", err=True)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Run `ropewalk COMMAND --help` for the options of a command, and for examples.",
)
@click.version_option(ropewalk.__version__, prog_name="ropewalk")
def main() -> None:
    """Read, check, compare, convert and measure rotary position embeddings (RoPE)."""


for section in _SECTIONS.values():
    for command in section:
        main.add_command(command)
