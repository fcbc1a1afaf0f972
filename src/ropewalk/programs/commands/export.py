"""`ropewalk export`: a model of the lab in the format of another program."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["hf", "llama2.c"]), required=True, help="A folder, or one file.")
@click.option("--max-positions", type=click.IntRange(min=1), required=True, help="The length to write, in tokens.")
@click.option("--force", is_flag=True, help="Replace an export that is there already.")
def export(checkpoint: Path, target: Path, form: str, max_positions: int, force: bool) -> None:
    """Write the model of a CHECKPOINT of the lab to TARGET: a Llama of Hugging Face, or llama2.c's file.

    hf: TARGET is a folder, new or empty. It gets config.json, model.safetensors and, for a model of bytes,
    tokenizer.json and tokenizer_config.json, all at once. llama2.c: TARGET is a new file; a model of bytes also gets a
    tokenizer.bin beside it.

    Nothing that exists is replaced without --force. With it, the files named above are, but never CHECKPOINT itself,
    nor a folder that holds anything else.
    """
    from ropewalk.lab import export as the_export

    the_export.run(checkpoint, target, form, max_positions=max_positions, force=force)
    click.echo(f"wrote {target}")
