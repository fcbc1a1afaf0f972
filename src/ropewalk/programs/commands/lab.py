"""`ropewalk lab`: train small models and see what each scaling makes of long sequences."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Compare context-extension methods on small models.")
@click.option(
    "--task", type=click.Choice(["copy", "text"]), help="Only this task, on one seed; text: about 13 minutes."
)
@click.option("--quick", is_flag=True, help="The same as --task copy: a few minutes.")
@click.option("--baselines", is_flag=True, help="Also train models with learned, sinusoidal and no positions.")
@click.option("--seed", type=click.IntRange(0, 2**28), default=0, show_default=True, help="The first of them.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ropewalk-lab"),
    show_default=True,
    help="Where everything is kept. The same folder again goes on where the last run stopped.",
)
def lab(task: str | None, quick: bool, baselines: bool, seed: int, out: Path) -> None:
    """Train small models on short sequences; see what each scaling makes of long ones, and short fine-tunes.

    Two tasks, copying and the text that Python ships, on three seeds: about an hour on two cores, and it says
    beforehand how long here; --quick takes less than 6 minutes. No scaling, PI, NTK, by parts, Llama 3, YaRN, PI, NTK
    and YaRN as dynamic, Self-Extend; fine-tunes with none, PI, NTK, YaRN and a larger base. Tables, JSON, pictures and
    words are written at the end, of what this command was asked for: name another --out to keep both of two.

    For a model that writes text, run `ropewalk lab --task text`. It is in ropewalk-lab/parts/text-0-trained.safetensors
    (under --out; 0 is the seed) from its first step on, and is trained to the end before anything else is done. Pass
    that file to `ropewalk generate` and `ropewalk export`.

    Several processes train each model together under torchrun: `torchrun --nproc-per-node 4 -m ropewalk lab`.
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
