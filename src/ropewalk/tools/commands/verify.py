"""`ropewalk verify`: load a model through transformers, and compare its rotary tables with its config."""

from __future__ import annotations

import json
from pathlib import Path

import click

import ropewalk
from ropewalk import _checks
from ropewalk.tools.commands import _options

_STATUS = {"right": 0, "wrong": 1, "not judged": 2}


@click.command(
    short_help="Verify the angles of a model that transformers loads.",
    epilog="""\b
Examples:
  ropewalk verify path/to/model
  ropewalk verify path/to/model --config path/to/config.json
""",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--config", type=_options.Source(), help="The config to compare with. [default: that of MODEL]")
@_options.as_json
@click.pass_context
def verify(ctx: click.Context, /, model: Path, config: Path | None, as_json: bool) -> None:
    """Load the model in the folder MODEL through transformers, and compare its rotary tables with its config.json.

    It shows what the transformers that is installed makes of the file: another base, a scaling that is dropped,
    frequencies that were rounded or never filled. The whole model is loaded into memory. For other engines, pass the
    loaded model to ropewalk.conformance.verify, or set ROPEWALK_VERIFY=1 for vLLM.

    The exit status is 0 if all tables are right, 1 if one is wrong, and 2 if this cannot be judged.
    """
    try:
        if not model.is_dir():
            fix = "Pass the folder that contains config.json and the weights."
            raise _checks.error("ropewalk verify", "MODEL must be a folder", str(model), fix)
        try:
            from transformers import AutoModel
        except ImportError as e:
            raise _checks.missing_package("ropewalk verify", "transformers", "extend") from e
        loaded = AutoModel.from_pretrained(model, dtype="auto", local_files_only=True)
        found = ropewalk.conformance.verify(loaded, model if config is None else config)
    except (ropewalk.RopeError, OSError, ValueError) as e:
        click.echo(f"Error: {e}", err=True)
        ctx.exit(2)
    click.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False) if as_json else str(found))
    ctx.exit(_STATUS[found.verdict])
