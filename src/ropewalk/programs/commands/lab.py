"""`ropewalk lab`: train small models and compare context-extension methods on them."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Compare context-extension methods on small models.")
@click.option(
    "--task", type=click.Choice(["copy", "text"]), help="Run only this task, on one seed. text takes about 13 minutes."
)
@click.option("--quick", is_flag=True, help="The same as --task copy. It takes a few minutes.")
@click.option("--baselines", is_flag=True, help="Also train models with learned, sinusoidal and no positions.")
@click.option("--seed", type=click.IntRange(0, 2**28), default=0, show_default=True, help="The first seed.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ropewalk-lab"),
    show_default=True,
    help="The folder for all results. A run in the same folder continues the previous one.",
)
def lab(task: str | None, quick: bool, baselines: bool, seed: int, out: Path) -> None:
    """Train small models on short sequences, and measure context-extension methods on long ones.

    There are two tasks, copying and the text that ships with Python, each on three seeds. They take about an hour on
    two cores. The command estimates the time before it starts. --quick takes less than 6 minutes.

    The methods are no scaling, PI, NTK, by parts, Llama 3, YaRN, dynamic PI, NTK and YaRN, and Self-Extend. Fine-tunes
    use no scaling, PI, NTK, YaRN and a larger base. At the end the command writes tables, JSON, plots and a report on
    the requested tasks. To keep the results of an earlier command, use another --out.

    For a model that writes text, run `ropewalk lab --task text`. Its file is
    ropewalk-lab/parts/text-0-trained.safetensors (under --out; 0 is the seed). It exists from the first step on, and it
    is fully trained before anything else runs. Pass it to `ropewalk generate` and `ropewalk export`.

    Under torchrun, several processes train each model together: `torchrun --nproc-per-node 4 -m ropewalk lab`.
    """
    from ropewalk.lab import ranks, study

    if quick and task == "text":
        raise click.UsageError("--quick is the copy task, so it cannot be combined with --task text. Drop one of them.")
    chosen = {None: study.full, "copy": study.quick, "text": study.text}["copy" if quick else task]
    try:
        with ranks.joined():
            study.run(chosen(seed, baselines=baselines), out, click.echo)
    except ranks.FirstFailedError:
        raise SystemExit(1) from None
