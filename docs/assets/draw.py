"""Draw the pictures of docs/schemes/, derivation.md, several-axes.md and extend.md.

Each picture is an SVG beside this file.

Run by hand after a change of a scheme or of `ropewalk.plots`; the pictures are
committed, and building the site draws nothing. Needs `pip install ".[plots]"`:

    python docs/assets/draw.py

The same ropes stand in the examples of the pages. Text stays text and ids are fixed,
so that a picture is small and drawing it again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ropewalk import Axes, Rope, plots
from ropewalk.schemes import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)

HERE = Path(__file__).parent
LENGTHS = HERE.parents[1] / "tests" / "golden" / "lengths.json"
MEASURED = HERE.parents[1] / "benchmarks" / "results" / "extend-smollm2-16k.json"
MOST_BYTES = 80_000


def phi3() -> LongRoPE:
    """The searched factors of Phi-3.5-mini, as recorded for the tests."""
    rows = json.loads(LENGTHS.read_text(encoding="utf-8"))["rows"]
    given = next(
        row["rope_parameters"]
        for row in rows
        if row["model"] == "phi-3.5-mini-instruct"
    )
    return LongRoPE(
        short_factor=given["short_factor"],
        long_factor=given["long_factor"],
        original_max_position_embeddings=given["original_max_position_embeddings"],
        factor=given["factor"],
    )


def ropes() -> dict[str, Rope]:
    """Name of the picture → the rope that it shows."""
    llama3 = Llama3(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    yarn = YaRN(factor=16.0, original_max_position_embeddings=4096)
    return {
        "default": Rope(128, 10_000.0, "half"),
        "linear": Rope(128, 10_000.0, "half", scaling=Linear(factor=4.0)),
        "ntk": Rope(128, 10_000.0, "half", scaling=NTK(alpha=8.0)),
        "dynamic": Rope(
            128, 10_000.0, "half", scaling=DynamicNTK(2.0, 4096)
        ).at_length(16_384),
        "yarn": Rope(128, 10_000.0, "half", scaling=yarn),
        "longrope": Rope(96, 10_000.0, "half", scaling=phi3()).at_length(131_072),
        "llama3": Rope(128, 500_000.0, "half", scaling=llama3),
        "proportional": Rope(
            512,
            1_000_000.0,
            "half",
            scaling=Proportional(partial_rotary_factor=0.25),
        ),
    }


def pictures() -> Iterator[tuple[str, Figure]]:
    """Name and figure of each picture."""
    for name, rope in ropes().items():
        figure = plots.inv_freq(rope)
        for line in figure.axes[0].lines:
            line.set_markevery(
                max(1, rope.rotary_dim // 128)
            )  # a dot for each of up to 64 pairs
        yield name, figure
    qwen = Rope(80, 10_000.0, "half", axes=Axes.axial((40, 40)))
    plain = Rope(128, 10_000.0, "interleaved")
    yield "rotated-vector", plots.rotated_vector(plain)
    yield "pairs", plots.pairs(plain)
    yield "decay", plots.decay(plain, longest=4096)
    yield "matrix", matrix(Rope(8, 10_000.0, "interleaved"), position=3)
    yield (
        "angle-field",
        plots.angle_field(qwen, 14, 14, pairs=[0, 1, 2, 4, 20, 21, 22, 24]),
    )
    yield "extend-smollm2", measured()


def matrix(rope: Rope, position: int) -> Figure:
    """The matrix of a position: a 2 × 2 block for each pair of neighbours."""
    import torch

    unit_vectors = torch.eye(rope.head_dim, dtype=torch.float64)[
        :, None
    ]  # tokens, heads, channels
    positions = torch.full((rope.head_dim,), position)
    columns = rope.at(positions, dtype=torch.float64)(unit_vectors, layout="thd")[
        :, 0
    ]
    figure = plots.blank(height=7.0)
    axes = figure.subplots()
    axes.imshow(columns.T, cmap="RdBu", vmin=-1, vmax=1)
    for (channel, row), value in np.ndenumerate(columns.numpy()):
        colour = "white" if abs(value) > 0.5 else "black"
        axes.text(
            channel, row, f"{value:.3g}", ha="center", va="center", color=colour
        )
    axes.set(
        xlabel="channel before",
        ylabel="channel after",
        title=f"R at position {position}, {rope.head_dim} channels",
    )
    return figure


def measured() -> Figure:
    """The copied share by distance, and that at the target by factor."""
    facts = json.loads(MEASURED.read_text(encoding="utf-8"))
    figure = plots.blank(height=4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    distances = [row["distance"] for row in facts["unscaled"]]
    left.plot(distances, [row["copied"] for row in facts["unscaled"]], "o-")
    stated, reach = facts["stated_length"], facts["reach"]
    left.axvline(stated, color="0.45", linestyle=":", label="stated length")
    left.axvline(reach, color="tab:orange", label=f"reach: {reach:,}")
    left.set(
        xlabel="distance in tokens",
        ylabel="share of the tokens copied",
        title="Without scaling",
        ylim=(0, 1),
    )
    for method in dict.fromkeys(row["method"] for row in facts["rows"]):
        rows = [row for row in facts["rows"] if row["method"] == method]
        factors = [row["factor"] for row in rows]
        right.plot(factors, [row["at_target"] for row in rows], "o-", label=method)
    right.axhline(facts["bar"], color="0.45", linestyle=":", label="what reaches")
    right.set(xlabel="factor", title=f"At {facts['target']:,} tokens")
    for axes in (left, right):
        axes.legend()
    return figure


def main() -> None:
    """Draw all of them; fail if one is too large to commit."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ropewalk"})
    for name, figure in pictures():
        path = HERE / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        # Indentation is a fifth of the file.
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text(
            "\n".join(line.strip() for line in lines) + "\n", encoding="utf-8"
        )
        if (size := path.stat().st_size) > MOST_BYTES:
            raise SystemExit(f"{path}: at most {MOST_BYTES} bytes, got {size}")


if __name__ == "__main__":
    main()
