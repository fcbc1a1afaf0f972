"""`ropewalk diff`: what engines make of one config, or what changed between two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

import ropewalk


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("source2", type=click.Path(path_type=Path), required=False)
@click.option("--length", type=click.IntRange(min=1), help="The longest sequence, in tokens. [what the config says]")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="NAME",
    help="Only this one of transformers, vllm, sglang, llama.cpp, mlx-lm, exllamav3; may be given again. The first is "
    "what the others are compared with.",
)
@click.option("--pairing", type=click.Choice(["half", "interleaved"]), help="For a model_type ropewalk does not know.")
@click.option("--base", type=float, help="For a config that states no base.")
@click.option("--ignore", multiple=True, metavar="KEY", help="Read past a key of the config; may be given again.")
@click.option("--download", is_flag=True, help="Download the config of a hub id that is not in the local cache.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw frequencies and scores over each other.")
def diff(
    source: Path,
    source2: Path | None,
    length: int | None,
    engines: tuple[str, ...],
    pairing: str | None,
    base: float | None,
    ignore: tuple[str, ...],
    download: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Say what engines make of the config SOURCE, or what changed from SOURCE to SOURCE2.

    With one config: the attention factor, the frequencies and the scores of transformers, vLLM, SGLang, llama.cpp,
    mlx-lm and exllamav3, how far apart they are, and which engine does not run it. With two: what a fine-tune changed,
    and whether weights and KV caches still fit.

    A source is a config.json, the folder of a model, or a hub id such as meta-llama/Llama-3.1-8B; two of them may also
    be Meta's params.json or GGUF files. Nothing is run, and no weights are read.
    """
    if plot is not None:
        ropewalk.plots.check_path(plot)
    if source2 is None:
        one = ropewalk.diff.engines(
            source, length=length, names=engines, pairing=pairing, base=base, ignore=ignore, download=download
        )
        facts, text, rows = one.facts, one.text(), zip(one.ropes, one.facts["ropes"], strict=True)
    elif engines:
        raise click.UsageError("--engine is for one config, so it cannot be combined with SOURCE2. Drop one of them.")
    else:
        two = ropewalk.diff.configs(
            source, source2, length=length, pairing=pairing, base=base, ignore=ignore, download=download
        )
        facts, text, rows = two.facts, two.text(), zip(two.ropes, two.facts["layers"], strict=True)
    click.echo(json.dumps(facts, indent=2, allow_nan=False) if as_json else text)
    if plot is not None:
        _draw([(ropes, row["drawn_at"]) for ropes, row in rows if ropes], plot, err=as_json)


def _draw(rows: list[tuple[Mapping[str, ropewalk.Rope], int]], plot: Path, *, err: bool) -> None:
    """One picture for each row, numbered where there are several."""
    if not rows:
        raise click.ClickException("--plot: there is nothing that can be drawn over each other.")
    paths = [plot] if len(rows) == 1 else [plot.with_stem(f"{plot.stem}-{i}") for i in range(1, len(rows) + 1)]
    for (ropes, longest), path in zip(rows, paths, strict=True):
        ropewalk.plots.save(ropewalk.plots.differences(ropes, longest=longest), path)
        click.echo(f"drew {path}", err=err)
