"""Train small language models on short sequences, and measure context-extension methods on long ones.

    python examples/lab --quick

There are two tasks: to copy a sequence, and to model the text that ships with Python. Both run with three seeds, which
takes about an hour on two cores. Models are also fine-tuned for four times the length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import study
import tasks

SEEDS = 3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--task", choices=["copy", "text"], help="run only this task, with one seed")
    only.add_argument("--quick", action="store_true", help="the same as --task copy: less than 6 minutes")
    parser.add_argument(
        "--baselines", action="store_true", help="also train models with learned, sinusoidal and no positions"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, default=Path("ropewalk-lab"), help="the folder for all results")
    options = parser.parse_args(arguments)
    task, seed = "copy" if options.quick else options.task, options.seed
    chosen = [{"copy": tasks.COPY, "text": tasks.TEXT}[task]] if task else [tasks.COPY, tasks.TEXT]
    study.run(chosen, range(seed, seed + (1 if task else SEEDS)), options.out, baselines=options.baselines)


if __name__ == "__main__":
    main()
