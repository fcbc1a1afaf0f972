"""Sweep head sizes and memory layouts: the time of ropewalk per byte of q and k, relative to heads of 128 channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import ropewalk
from ropewalk.tools.bench.case import BASE, HEAD_DIM, KV_HEADS, Q_HEADS, rotation_error
from ropewalk.tools.bench.clocks import OnCpu
from ropewalk.tools.bench.measure import sample_alternately, summary, to_json_number
from ropewalk.tools.bench.memory import DESCRIBED, memories, using
from ropewalk.tools.bench.report import Report, Say, describe_time

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


@dataclass(frozen=True)
class SweepSettings:
    """Settings of the sweep.

    Args:
        tokens: the number of tokens.
        dtypes: "float32", "bfloat16" or both.
        threads: the number of PyTorch's threads. None means PyTorch's current number.
        rounds, seconds: as in `measure.rows`, for each dtype.
    """

    tokens: int = 1024
    dtypes: Sequence[str] = ("float32", "bfloat16")
    threads: int | None = None
    rounds: int = 30
    seconds: float = 30.0


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


def run_sweep(settings: SweepSettings, say: Say, *, json_file: Path | None = None) -> dict[str, Any]:
    """Run the sweep and report the results. New tensors are in memory that the process has, as far as it can be told.

    Args:
        settings: what to measure.
        say: called with each line of the report.
        json_file: file for the results as JSON.

    Returns:
        The content of the JSON file: the entries of `machine.describe`, and date, settings, threads and rows. Every row
        has dtype, form (a name in `FORMS`), in_place, memory, bytes (of q and k), state ("timed" or "wrong"), error and
        allowed. A timed row also has the entries of `measure.summary`, in seconds of one call, and times_128 (the
        median per byte divided by that of the form "128").

    Raises:
        OSError: the file cannot be written.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    threads, memory = torch.get_num_threads(), memories()[-1]
    out = Report(asdict(settings), {"threads": threads, "rows": []}, say, json_file)
    about = (
        f"{settings.tokens:,} tokens; q and k have about {Q_HEADS * HEAD_DIM:,} and {KV_HEADS * HEAD_DIM:,} channels"
    )
    out.introduce(f"torch {torch.__version__}, {threads} threads", f"{about}; {DESCRIBED[memory]}")
    with using(memory):
        for name in settings.dtypes:
            rows = [{"memory": memory, **row} for row in _measure(name, settings)]
            out.found["rows"] += rows
            _show(name, rows, say)
            out.write()
    return out.found


def _measure(dtype: str, settings: SweepSettings) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    allowed = 4 * torch.finfo(getattr(torch, dtype)).eps
    rows: list[dict[str, Any]] = []
    samplers: dict[str, Callable[[], float]] = {}
    for form in FORMS:
        tensors = form.make(
            lambda *axes: torch.randn(axes, generator=generator).to(getattr(torch, dtype)), settings.tokens
        )
        for in_place, call in enumerate(_calls(form, tensors)):
            error = _error(form, tensors, call())
            row: dict[str, Any] = {
                "dtype": dtype,
                "form": form.name,
                "in_place": bool(in_place),
                "error": to_json_number(error),
            }
            rows.append({**row, "allowed": allowed, "state": "timed" if error <= allowed else "wrong"})
            rows[-1]["bytes"] = sum(x.numel() * x.element_size() for x in tensors)
            if error <= allowed:
                samplers[f"{form.name} {in_place}"] = OnCpu().prepare([call]).sample
    samples = sample_alternately(samplers, settings.rounds, settings.seconds)
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


def _show(dtype: str, rows: Sequence[dict[str, Any]], say: Say) -> None:
    say("")
    say(f"{dtype}: median, and time per byte relative to heads of 128")
    say(f"  {'channels of a head':<28} {'new tensors':>10}  {'':>8}  {'in place':>10}")
    for new, in_place in zip(rows[::2], rows[1::2], strict=True):
        say(f"  {new['form']:<28} {_cell(new)}  {_cell(in_place)}")


def _cell(row: dict[str, Any]) -> str:
    if row["state"] == "wrong":
        return f"{'wrong':>10}  {float(row['error']):>8.1e}"
    return f"{describe_time(row['median']):>10}  {row['times_128']:>8.2f}"
