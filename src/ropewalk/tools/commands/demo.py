"""`ropewalk demo`: a tour of the library on the published config of one model."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Take a short tour of the library.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ropewalk-demo"),
    show_default=True,
    help="The folder for the pictures.",
)
def demo(folder: Path) -> None:
    """Rotate q and k as Llama 3.1 8B does, check the result, and draw pictures.

    Nothing is downloaded.
    """
    from ropewalk.tools import demo as the_demo

    the_demo.run(folder, click.echo)
