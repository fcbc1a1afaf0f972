"""`ropewalk generate`: generate text with a model that `ropewalk lab` trained."""

from __future__ import annotations

from pathlib import Path

import click

from ropewalk.tools.commands._options import Length


@click.command(
    short_help="Generate text with a model that `lab` trained.",
    epilog="""\b
Examples:
  ropewalk generate ropewalk-lab/parts/text-0-trained.safetensors
  ropewalk generate ropewalk-lab/parts/text-0-trained.safetensors --prompt "import " --temperature 0
""",
)
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--prompt", default="def ", show_default=True, help="The beginning of the text, which the model continues."
)
@click.option(
    "--tokens",
    type=Length(min=1, max=2**19),  # their keys and values take 2 GiB with the text model of the lab
    default=200,
    show_default=True,
    help="The number of bytes to generate; 4k is 4,096.",
)
@click.option(
    "--temperature",
    type=float,
    default=0.7,
    show_default=True,
    help="The temperature of sampling; 0 always selects the most likely byte.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="The seed for sampling.")
def generate(checkpoint: Path, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Generate text with CHECKPOINT, a text model that `ropewalk lab` trained, and report tokens per second."""
    from ropewalk.tools.lab import generate as the_generator

    def write(text: str) -> None:
        click.echo(text, nl=False)

    speed = the_generator.run(checkpoint, prompt, tokens=tokens, temperature=temperature, seed=seed, write=write)
    click.echo(speed, err=True)
