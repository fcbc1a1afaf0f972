"""`ropewalk diff`: compare how engines read one config, or compare two configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

import ropewalk
from ropewalk.programs.commands._types import Length


@click.command(
    short_help="Compare engines, or two configs.",
    epilog="""\b
Examples:
  ropewalk diff path/to/config.json
  ropewalk diff path/to/config.json --length 32768 --engine vllm --engine sglang
  ropewalk diff path/to/base path/to/fine-tune
""",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("source2", type=click.Path(path_type=Path), required=False)
@click.option(
    "--length",
    type=Length(min=1),
    help="The length of the longest sequence, in tokens; 128k is 131,072. [default: from the config]",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="NAME",
    help="Compare only this engine: transformers, vllm, sglang, llama.cpp, mlx-lm or exllamav3. May be repeated; the "
    "first one is the reference.",
)
@click.option("--pairing", type=click.Choice(["half", "interleaved"]), help="The pairing, for an unknown model_type.")
@click.option("--base", type=float, help="The base, for a config without one.")
@click.option("--ignore", multiple=True, metavar="KEY", help="Ignore this key of the config. May be repeated.")
@click.option("--download", is_flag=True, help="Download the config of a hub id that is not in the local cache.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Plot the frequencies and scores into this file.")
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
    """Compare how engines read the config SOURCE, or compare the configs SOURCE and SOURCE2.

    With one config, show the attention factor, the frequencies and the scores of transformers, vLLM, SGLang, llama.cpp,
    mlx-lm and exllamav3, how much these engines differ, and which of them do not support the config. With two
    configs, show what changed, and whether weights and KV caches are still valid.

    A source is a config.json, the folder of a model, or a hub id (owner/name). If you compare two sources, they can
    also be Meta's params.json or GGUF files. No model is run, and no weights are read.
    """
    if plot is not None:
        ropewalk.plots.check_path(plot)
    if source2 is None:
        engine_diff = ropewalk.diff.engines(
            source, length=length, names=engines, pairing=pairing, base=base, ignore=ignore, download=download
        )
        facts, text = engine_diff.facts, engine_diff.text()
        rows = zip(engine_diff.ropes, facts["ropes"], strict=True)
    elif engines:
        raise click.UsageError("--engine is for one config, so it cannot be combined with SOURCE2. Drop one of them.")
    else:
        config_diff = ropewalk.diff.configs(
            source, source2, length=length, pairing=pairing, base=base, ignore=ignore, download=download
        )
        facts, text = config_diff.facts, config_diff.text()
        rows = zip(config_diff.ropes, facts["layers"], strict=True)
    click.echo(json.dumps(facts, indent=2, allow_nan=False) if as_json else text)
    if plot is not None:
        _draw([(ropes, row["drawn_at"]) for ropes, row in rows if ropes], plot, err=as_json)


def _draw(rows: list[tuple[Mapping[str, ropewalk.Rope], int]], plot: Path, *, err: bool) -> None:
    """Draw one picture for each group of ropes, up to its length. If there are several pictures, number the files."""
    if not rows:
        raise click.ClickException("--plot: no ropes can be drawn in the same axes.")
    paths = [plot] if len(rows) == 1 else [plot.with_stem(f"{plot.stem}-{i}") for i in range(1, len(rows) + 1)]
    for (ropes, longest), path in zip(rows, paths, strict=True):
        ropewalk.plots.save(ropewalk.plots.differences(ropes, longest=longest), path)
        click.echo(f"drew {path}", err=err)
