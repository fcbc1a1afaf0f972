"""`ropewalk export`: export a model that `ropewalk lab` trained, for Hugging Face or llama2.c."""

from __future__ import annotations

from pathlib import Path

import click

from ropewalk.tools.commands._options import Length


@click.command(
    short_help="Export a model that `lab` trained.",
    epilog="""\b
Examples:
  ropewalk export ropewalk-lab/parts/text-0-trained.safetensors my-model --format hf --max-positions 256
  ropewalk export ropewalk-lab/parts/text-0-trained.safetensors model.bin --format llama2.c --max-positions 256
""",
)
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["hf", "llama2.c"]),
    required=True,
    help="The format to write: hf is a folder, llama2.c is a file.",
)
@click.option(
    "--max-positions",
    type=Length(min=1, max=2**24),
    required=True,
    help="The context length to write, in tokens; 4k is 4,096.",
)
@click.option("--force", is_flag=True, help="Replace an existing export.")
def export(checkpoint: Path, target: Path, form: str, max_positions: int, force: bool) -> None:
    """Export CHECKPOINT, a model that `ropewalk lab` trained, to TARGET for Hugging Face or llama2.c.

    With hf, TARGET is a folder. It gets config.json, model.safetensors and, for a byte-level model, tokenizer.json and
    tokenizer_config.json. With llama2.c, TARGET is a file; for a byte-level model, tokenizer.bin is written next to it.

    Existing files are replaced only with --force, and then only the files named above. CHECKPOINT itself is never
    replaced.
    """
    from ropewalk.tools.lab import export as the_export

    the_export.run(checkpoint, target, form, max_positions=max_positions, force=force)
    click.echo(f"wrote {target}")
