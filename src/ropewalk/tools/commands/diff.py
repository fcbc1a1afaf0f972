"""`ropewalk diff`: compare how engines read one config, or compare two configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import ropewalk
from ropewalk.tools.commands import _options

_STATUS = {"agree": 0, "differ": 1, "not judged": 2}


class _Engines(click.Option):
    """The option for engines, whose help lists their names. Other commands do not import them."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        more = (*ropewalk.diff.MORE_ENGINES, *ropewalk.diff.TRAINERS)
        self.help = f"{self.help} Default: {', '.join(ropewalk.diff.ENGINES)}. If named: {', '.join(more)}."
        return super().get_help_record(ctx)


@click.command(
    short_help="Compare engines, or two configs.",
    epilog="""\b
Examples:
  ropewalk diff path/to/config.json
  ropewalk diff path/to/config.json --length 32768 --engines vllm,sglang
  ropewalk diff path/to/base path/to/fine-tune
""",
)
@click.argument("source", type=_options.Source())
@click.argument("source2", type=_options.Source(), required=False)
@click.option(
    "--length",
    type=_options.Length(min=1),
    help="The length of the longest sequence, in tokens; 128k is 131,072. [default: from the config]",
)
@click.option(
    "--engines",
    "engine",
    multiple=True,
    metavar="NAME",
    callback=_options.names,
    cls=_Engines,
    help="Compare only these, in a list with commas, with the first one, or a single one with transformers.",
)
@click.option("--trainers", is_flag=True, help="Compare the trainers as well.")
@click.option("--verbose", is_flag=True, help="Also show what each engine does, in which file, and how it rounds.")
@click.option(
    "--override",
    metavar="JSON",
    callback=_options.json_object,
    help="Start each engine with these keys, such as rope_scaling, by its own argument for them.",
)
@_options.pairing
@_options.base
@_options.factor
@_options.ignore
@_options.download
@_options.as_json
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    source: Path,
    source2: Path | None,
    engine: tuple[str, ...],
    trainers: bool,
    verbose: bool,
    override: dict[str, Any] | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare how engines read the config SOURCE, or compare the configs SOURCE and SOURCE2.

    With one config, show the attention factor, the frequencies and the scores in each engine, how much the engines
    differ, and which of them do not support the config. With two configs, show what changed, and whether weights and
    KV caches are still valid.

    A source is a config.json, the folder of a model, params.json of Meta or Mistral, a GGUF file, or a hub id
    (owner/name). No model is run, and no weights are read.

    The exit status is 0 if the engines that were judged, or the configs, rotate identically, 1 if they differ or an
    engine rejects the config, and 2 if this cannot be judged: the config cannot be read, fewer than two engines were
    judged, an engine that --engines names was not judged, because it does not have the model or was not recorded for
    it, or --ignore left out a key, so that another config was compared.
    """
    try:
        of_one = {"--engines": engine, "--trainers": trainers, "--verbose": verbose, "--override": override}
        for name in (name for name, passed in of_one.items() if passed and source2 is not None):
            raise click.UsageError(
                f"{name} is for one config, so it cannot be combined with SOURCE2. Drop one of them."
            )
        if source2 is None:
            names = ("transformers", *engine) if len(engine) == 1 and not trainers else engine
            found: Any = ropewalk.diff.engines(source, names=names, trainers=trainers, override=override, **options)
            status = _STATUS[found.verdict]
        else:
            found = ropewalk.diff.configs(source, source2, **options)
            status = int(not found.same)
        status = 2 if options["ignore"] else status
        text = found.text(verbose=True) if verbose else found.text()
        click.echo(json.dumps(found.facts, indent=2, allow_nan=False) if as_json else text)
    except BrokenPipeError:  # the reader closed the pipe, which is no failure of the comparison
        raise
    except (ropewalk.RopeError, OSError) as e:
        click.echo(f"Error: {e}", err=True)
        status = 2
    ctx.exit(status)
