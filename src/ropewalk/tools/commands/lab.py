"""`ropewalk lab`: train small models and compare context-extension methods on them."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    short_help="Compare context-extension methods on small models.",
    epilog="""\b
Examples:
  ropewalk lab --quick
  ropewalk lab --task text --out my-lab
  torchrun --nproc-per-node 4 -m ropewalk lab
""",
)
@click.option(
    "--task",
    type=click.Choice(["copy", "text"]),
    help="Run only this task, with one seed. text takes about 13 minutes.",
)
@click.option("--quick", is_flag=True, help="The same as --task copy, which takes a few minutes.")
@click.option("--baselines", is_flag=True, help="Also train models with learned, sinusoidal and no positions.")
@click.option("--seed", type=click.IntRange(0, 2**28), default=0, show_default=True, help="The first seed.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ropewalk-lab"),
    show_default=True,
    help="The folder for all results. A run with the same folder continues the previous run.",
)
def lab(task: str | None, quick: bool, baselines: bool, seed: int, out: Path) -> None:
    """Train small models on short sequences, and measure context-extension methods on long ones.

    There are two tasks: to copy a sequence, and to model the text that ships with Python. Both run with three seeds,
    which takes about an hour on two cores. --quick runs only the first task, with one seed, in less than 6 minutes. At
    the end, the command writes tables, JSON, plots and a report.

    The methods are no scaling, position interpolation (PI), NTK, NTK by parts, Llama 3, YaRN, the dynamic forms of PI,
    NTK and YaRN, and Self-Extend. Models are also fine-tuned with no scaling, PI, NTK, YaRN and a larger base.

    To get a model that writes text, run `ropewalk lab --task text`. This command trains the model before anything else,
    and saves it from the first step on. With the default --out and --seed, the file of the model is

    \b
      ropewalk-lab/parts/text-0-trained.safetensors

    Pass this file to `ropewalk generate` and `ropewalk export`.

    Under torchrun, several processes train each model together.
    """
    from ropewalk.tools.lab import ranks, study

    if quick and task == "text":
        raise click.UsageError("--quick is the copy task, so it cannot be combined with --task text. Drop one of them.")
    try:
        with ranks.process_group():
            study.run(study.choose("copy" if quick else task, seed, baselines=baselines), out, click.echo)
    except ranks.FirstFailedError:
        raise SystemExit(1) from None
