"""`ropewalk convert`: convert weights between pairings, and from Meta's format to Hugging Face's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ropewalk._checks import printable
from ropewalk.tools.commands import _options

if TYPE_CHECKING:
    from ropewalk.tools.convert import Plan

_Folder = click.Path(path_type=Path)


@click.command(
    short_help="Convert weights between pairings.",
    epilog="""\b
Examples:
  ropewalk convert Llama-3.1-8B Llama-3.1-8B-interleaved --to interleaved --verify
  ropewalk convert from-meta for-hf --to half --max-positions 131072 --factor 8
""",
)
@click.argument("source", metavar="SRC", type=_Folder)
@click.argument("target", metavar="DST", type=_Folder)
@click.option("--to", type=click.Choice(["half", "interleaved"]), required=True, help="The pairing to write.")
@click.option("--dry-run", is_flag=True, help="List the changes without writing anything.")
@click.option(
    "--verify", is_flag=True, help="Check that the attention scores of every layer are unchanged, before DST appears."
)
@click.option(
    "--base-config",
    type=_Folder,
    help="For a LoRA adapter: the config of its base model. [default: base_model_name_or_path]",
)
@_options.pairing
@_options.factor
@click.option(
    "--max-positions",
    type=_options.Length(min=1),
    help="The context length of a model in Meta's format, whose params.json does not contain it; 128k is 131,072.",
)
@_options.ignore
def convert(
    source: Path,
    target: Path,
    to: Literal["half", "interleaved"],
    dry_run: bool,
    verify: bool,
    **asked: Any,
) -> None:
    """Convert the checkpoint SRC to another pairing of channels, into the new folder DST.

    SRC is the folder of a Hugging Face model (safetensors), of a LoRA adapter, or of Meta's Llama (consolidated.*.pth
    and params.json). The rows of the q and k weights are reordered. No number changes, and everything else is copied.

    DST appears only when it is complete. To continue after an interruption, run the same command again.
    """
    from ropewalk.tools import convert as checkpoints

    read = checkpoints.read(source, **asked)
    plan = checkpoints.plan(read, to)
    checkpoints.check_target(plan, target)
    _describe(plan, listed=dry_run)
    if dry_run:
        _say_what_is_missing(plan)
        _echo(f"nothing was written: without --dry-run, {plan.nbytes:,} bytes go to {target}")
        return

    def compare_scores(folder: Path) -> None:
        from ropewalk.tools.convert import verify

        verify.verify(plan, folder, _echo)

    checkpoints.write(plan, target, _Progress(), compare_scores if verify else None)
    _say_what_is_missing(plan)
    _echo(f"wrote {target}")


def _echo(line: str, *, err: bool = False) -> None:
    """Print a line, with control characters in the names that it quotes from files as escapes."""
    click.echo(printable(line), err=err)


def _describe(plan: Plan, *, listed: bool) -> None:
    """Print what the conversion will do. If `listed`, also list the tensors whose rows move."""
    source = plan.source
    layers = len(source.ropes.layers)
    tensors = len(source.tensors)
    _echo(f"{source.folder}: {source.model_type}, {layers} layers, {tensors} tensors, {plan.nbytes:,} bytes")
    if source.form == "meta":
        _echo("format: Meta -> Hugging Face")
    if source.pairing == plan.to:
        _echo(f"pairing: {plan.to}, unchanged; no rows move")
    else:
        stay = tensors - len(plan.parts)
        _echo(f"pairing: {source.pairing} -> {plan.to}; rows move in {len(plan.parts)} tensors, {stay} stay")
    if listed and source.pairing != plan.to:
        for name, parts in plan.parts.items():
            heads = ", ".join(f"{part.role}: {len(part.starts)} x {part.rotary_dim} rows" for part in parts)
            _echo(f"  {name} {list(plan.tensors[name].shape)}  {heads}")


def _say_what_is_missing(plan: Plan) -> None:
    """Print what the result does not have, and what the user must know about it."""
    source = plan.source
    if source.unread_weights:
        _echo(f"omitted, because they are other weights or folders: {', '.join(source.unread_weights)}")
    if source.form == "meta" and source.companion_files:
        _echo(f"omitted, because they belong to the other format: {', '.join(source.companion_files)}")
    for note in plan.notes:
        _echo(f"note: {note}")


class _Progress:
    """Shows progress on stderr: one line that is updated on a terminal, else a line for each file and a last one."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._percent = -1
        self._file = ""

    def __call__(self, file: str, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if self._terminal and percent != self._percent:
            click.echo(f"\r{percent:3} % of {total:,} bytes, {printable(file)}\x1b[K", err=True, nl=done == total)
        elif not self._terminal and (file != self._file or (done == total and self._percent < 100)):
            _echo(f"{percent:3} % of {total:,} bytes, {file}", err=True)
        self._percent, self._file = percent, file
