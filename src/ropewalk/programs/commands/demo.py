"""`ropewalk demo`: the library on the published numbers of one model."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ropewalk-demo"),
    show_default=True,
    help="Where the pictures go.",
)
def demo(folder: Path) -> None:
    """Turn q and k on the published numbers of Llama 3.1 8B, check them, time them, draw them. No download."""
    from ropewalk.programs import demo as the_demo

    the_demo.run(folder, click.echo)
