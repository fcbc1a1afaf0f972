"""`ropewalk explore`: draw ropes on an interactive page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import click

import ropewalk
from ropewalk import schemes
from ropewalk.tools.commands import _options

_NOTE = (
    "No model was named, so this page compares five ways to run the rope of Llama 3 8B, which was trained on 8,192 "
    "tokens, at 65,536 tokens. Llama 3.1 itself uses the last one. For the ropes of your own model, run "
    "“ropewalk explore path/to/config.json”."
)
_TRAINED, _LONGEST = 8192, 65_536


@click.command(
    short_help="Draw ropes on an interactive page.",
    epilog="""\b
Examples:
  ropewalk explore path/to/config.json
  ropewalk explore path/to/base path/to/tuned -o both.html
  ropewalk explore --no-open
""",
)
@click.argument("sources", metavar="[SOURCE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("ropewalk-explorer.html"),
    show_default=True,
    help="The file to write. An existing file is overwritten.",
)
@click.option("--open/--no-open", "opens", default=True, help="Open the page in a browser.  [default: open]")
@click.option(
    "--length",
    type=_options.Length(1, 2**31 - 1),
    help="The length of the longest sequence, in tokens; 128k is 131,072. [default: from the config]",
)
@click.option(
    "--trained-length",
    type=_options.Length(1, 2**31 - 1),
    help="The length that the model was trained on, in tokens, for a config that does not state it.",
)
@click.option("--pair", "pairs", type=int, multiple=True, help="Draw the vector of this pair. May be repeated.")
@_options.pairing
@_options.base
@_options.ignore
@_options.download
def explore(
    sources: tuple[Path, ...],
    output: Path,
    opens: bool,
    length: int | None,
    trained_length: int | None,
    pairs: tuple[int, ...],
    **asked: Any,
) -> None:
    """Draw the ropes of every SOURCE on one interactive page, and open it in a browser.

    The page shows inverse frequencies before and after scaling, vectors that rotate with the position, all pairs over
    positions, scores over distance, and the angles that occur at the length of the longest sequence but did not
    occur in training. The page is a single file and needs no network.

    A SOURCE is a config.json, the folder of a model, Meta's params.json, a GGUF file, or a hub id such as
    meta-llama/Llama-3.1-8B. Without a SOURCE, the page compares the rope of Llama 3 without scaling and with four
    scaling schemes.
    """
    from ropewalk import plots

    models: dict[str, ropewalk.Rope | ropewalk.ModelRopes] = {}
    for source in sources:
        name = _name(source) if _name(source) not in models else str(source)
        if name in models:
            raise click.UsageError(f"{source} is listed twice. List each source once.")
        models[name] = ropewalk.from_config(source, **asked)
    note = "" if sources else _NOTE
    if not sources:
        models.update(_llama3_under_five_schemes())
        length, trained_length = length or _LONGEST, trained_length or _TRAINED
    page = plots.explorer(models, length=length, trained_length=trained_length, pairs=pairs or None, note=note)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as e:
        raise click.ClickException(
            f"--output: the file must be writable, got {str(output)!r} ({e.strerror}). Pass a path in an existing "
            "folder that you may write to."
        ) from e
    click.echo(f"wrote {output}")
    if opens and not webbrowser.open(output.resolve().as_uri()):
        click.echo(f"No browser could be started. Open this address in one: {output.resolve().as_uri()}", err=True)


def _name(source: Path) -> str:
    """Return the name of a source on the page: the folder of a config.json or params.json, else the last path part."""
    path = source.resolve()
    folder = path.parent.name if path.name in ("config.json", "params.json") else ""
    return folder or path.name


def _llama3_under_five_schemes() -> dict[str, ropewalk.Rope]:
    scalings: dict[str, schemes.Scaling | None] = {
        "no scaling": None,
        "linear": schemes.Linear(factor=8.0),
        "NTK": schemes.NTK(alpha=8.0),
        "YaRN": schemes.YaRN(factor=8.0, original_max_position_embeddings=_TRAINED),
        "Llama 3.1": schemes.Llama3(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=_TRAINED
        ),
    }
    return {
        name: ropewalk.Rope(head_dim=128, base=500_000.0, pairing="half", scaling=scaling)
        for name, scaling in scalings.items()
    }
