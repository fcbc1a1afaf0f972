"""Time ropewalk with other head sizes and memory layouts, per byte of q and k, relative to heads of 128 channels.

    python benchmarks/sweep.py --json benchmarks/results/NAME-sweep.json

Every form is timed into new tensors, in memory that the process has as far as it can be told, and in place. Every form
has about as many channels as the usual one, except for the single head of MLA.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import harness
import torch
from torch import Tensor

import ropewalk
from ropewalk.tools.bench import (
    BASE,
    DTYPES,
    HEAD_DIM,
    KV_HEADS,
    Q_HEADS,
    OnCpu,
    describe_time,
    rotation_error,
    sample_alternately,
    summary,
)

_FIRST = 100  # position of the first token
Draw = Callable[..., Tensor]
"""torch.randn in the dtype of the sweep."""


@dataclass(frozen=True)
class Form:
    """Heads of one size and the way in which q and k lie in memory.

    Args:
        name: the name in the table.
        make: draws q and k, `[1, tokens, heads, head_dim]`, for a number of tokens.
        rotary_dim: the number of rotated channels. None means all.
        pairing: "half" or "interleaved".
    """

    name: str
    make: Callable[[Draw, int], tuple[Tensor, ...]]
    rotary_dim: int | None = None
    pairing: Literal["half", "interleaved"] = "half"


def _heads(head_dim: int) -> Callable[[Draw, int], tuple[Tensor, ...]]:
    """Return a function that draws contiguous q and k with nearly as many channels as the usual heads of 128."""
    return lambda draw, n: tuple(
        draw(1, n, max(1, heads * HEAD_DIM // head_dim), head_dim) for heads in (Q_HEADS, KV_HEADS)
    )


def _heads_first(draw: Draw, n: int) -> tuple[Tensor, ...]:
    return tuple(draw(1, heads, n, HEAD_DIM).transpose(1, 2) for heads in (Q_HEADS, KV_HEADS))


def _fused(draw: Draw, n: int) -> tuple[Tensor, ...]:
    fused = draw(1, n, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    return fused[:, :, :Q_HEADS], fused[:, :, Q_HEADS : Q_HEADS + KV_HEADS]


def _every_second(draw: Draw, n: int) -> tuple[Tensor, ...]:
    return tuple(draw(1, n, heads, 2 * HEAD_DIM)[..., ::2] for heads in (Q_HEADS, KV_HEADS))


def _tokens_last(draw: Draw, n: int) -> tuple[Tensor, ...]:
    return tuple(draw(1, heads, HEAD_DIM, n).permute(0, 3, 1, 2) for heads in (Q_HEADS, KV_HEADS))


FORMS = (
    Form("128", _heads(128)),
    *(Form(str(size), _heads(size)) for size in (16, 32, 64, 72, 80, 96, 112, 160, 192, 256)),
    *(Form(f"{some} of {size}", _heads(size), some) for some, size in ((32, 80), (20, 80), (64, 128), (32, 128))),
    Form("128, interleaved", _heads(128), pairing="interleaved"),
    Form("128, heads before tokens", _heads_first),
    Form("128, slices of fused QKV", _fused),
    Form("64, interleaved, 1 head", lambda draw, n: (draw(1, n, 1, 64),), pairing="interleaved"),
    Form("128, every second channel", _every_second),
    Form("128, tokens adjacent", _tokens_last),
)


def measure(dtype: str, options: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    allowed = 4 * torch.finfo(getattr(torch, dtype)).eps
    rows: list[dict[str, Any]] = []
    samplers: dict[str, Callable[[], float]] = {}
    for form in (form for form in FORMS if form.name in names):
        tensors = form.make(
            lambda *axes: torch.randn(axes, generator=generator).to(getattr(torch, dtype)), options.tokens
        )
        for in_place, call in enumerate(_calls(form, tensors)):
            error = _error(form, tensors, call())
            row: dict[str, Any] = {
                "dtype": dtype,
                "form": form.name,
                "in_place": bool(in_place),
                "error": error if math.isfinite(error) else str(error),
            }
            rows.append({**row, "allowed": allowed, "state": "timed" if error <= allowed else "wrong"})
            rows[-1]["bytes"] = sum(x.numel() * x.element_size() for x in tensors)
            if error <= allowed:
                samplers[f"{form.name} {in_place}"] = OnCpu().prepare([call])
    samples = sample_alternately(samplers, options.rounds, options.seconds)
    usual: dict[bool, float] = {}
    for row in rows:  # heads of 128 come first
        if row["state"] == "timed":
            row.update(summary(samples[f"{row['form']} {int(row['in_place'])}"]))
            per_byte = row["median"] / row["bytes"]
            row["times_128"] = per_byte / usual.setdefault(row["in_place"], per_byte)
    return rows


def _calls(form: Form, tensors: tuple[Tensor, ...]) -> tuple[Callable[[], tuple[Tensor, ...]], ...]:
    """Return two calls that return the rotated tensors: one into new tensors, and one in place in a copy."""
    head_dim = tensors[0].shape[-1]
    rope = ropewalk.Rope(head_dim=head_dim, base=BASE, pairing=form.pairing, rotary_dim=form.rotary_dim or head_dim)
    rotation = rope.at(torch.arange(_FIRST, _FIRST + tensors[0].shape[1]))
    copies = tuple(_like(x) for x in tensors)

    def new() -> tuple[Tensor, ...]:
        result = rotation(*tensors, layout="bshd")
        return (result,) if isinstance(result, Tensor) else result

    def in_place() -> tuple[Tensor, ...]:
        rotation.apply_(*copies, layout="bshd")
        return copies

    return new, in_place


def _error(form: Form, tensors: tuple[Tensor, ...], rotated: tuple[Tensor, ...]) -> float:
    """Return the largest error of a rotated pair, relative to its length. It is infinite if other channels changed."""
    tokens, head_dim = tensors[0].shape[1], tensors[0].shape[-1]
    some = form.rotary_dim or head_dim
    angle = torch.arange(_FIRST, _FIRST + tokens).double()[:, None, None] * BASE ** (
        -torch.arange(0, some, 2, dtype=torch.float64) / some
    )
    factor = torch.polar(torch.ones_like(angle), angle)
    if any(not torch.equal(x[..., some:], y[..., some:]) for x, y in zip(tensors, rotated, strict=True)):
        return math.inf
    gaps = [
        rotation_error(x[..., :some], y[..., :some], factor, form.pairing)
        for x, y in zip(tensors, rotated, strict=True)
    ]
    return torch.stack(gaps).max().item()


def _like(x: Tensor) -> Tensor:
    """Return a copy with the strides of x, in memory of its own."""
    copy = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype)
    return copy.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


def show(dtype: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{dtype}: median, and time per byte relative to heads of 128")
    print(f"  {'channels of a head':<28} {'new tensors':>10}  {'':>8}  {'in place':>10}")
    for new, in_place in zip(rows[::2], rows[1::2], strict=True):
        print(f"  {new['form']:<28} {_cell(new)}  {_cell(in_place)}")


def _cell(row: dict[str, Any]) -> str:
    if row["state"] == "wrong":
        return f"{'wrong':>10}  {float(row['error']):>8.1e}"
    return f"{describe_time(row['median']):>10}  {row['times_128']:>8.2f}"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    names, memory = harness.select([form.name for form in FORMS], options.only), harness.memories()[-1]
    out = harness.Results(options, threads=options.threads, rows=[])
    with harness.using(memory):
        for dtype in options.dtypes:
            rows = [{"memory": memory, **row} for row in measure(dtype, options, names)]
            out.found["rows"] += rows
            show(dtype, rows)
            out.write()
    return out.found


if __name__ == "__main__":
    main()
