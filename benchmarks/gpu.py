"""Time the rotation on a GPU against a copy, the usual code and other libraries.

    python benchmarks/gpu.py --json benchmarks/results/gpu-NAME.json
    python benchmarks/gpu.py --rehearse --no-compile     small cases on the CPU; their times are meaningless

In a clone without a build, put src on PYTHONPATH. A library is imported only when its rotation is prepared. No extra of
ropewalk installs these libraries. For Liger, the wheel `liger-kernel` is enough, without its requirements. The Triton
rotary of flash-attention needs `flash_attn` and einops, and FlashInfer needs `flashinfer-python` with its requirements.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import harness
import torch
from harness import FAR, LONGEST, Case, Contender, eager, full_width, tables, with_inputs
from peers import USUAL
from torch import Tensor

import ropewalk
from ropewalk.tools import bench
from ropewalk.tools.bench import BASE, FLOOR, HEAD_DIM, KV_HEADS, Q_HEADS, Call, Calls, Inputs, Rotate

_BATCHES = (1, 8, 64, 256)  # rows that decode one token each


def copy_at_once(case: Case, inputs: Inputs) -> Call:
    """Copy q and k, or in a backward pass their gradients, as one tensor: a single launch."""
    unchanged, (a, b) = inputs[:-2], inputs[-2:]
    source = torch.cat((a.flatten(), b.flatten()))
    target = torch.empty_like(source)
    result = (*unchanged, target[: a.numel()].view_as(a), target[a.numel() :].view_as(b))
    return Call(lambda: target.copy_(source), lambda _: result)


def _with_angles(case: Case, pairing: Any) -> Rotate:
    rope, positions = ropewalk.Rope(HEAD_DIM, BASE, pairing), case.positions
    return lambda q, k: rope.at(positions)(q, k, layout="bshd")


def _liger(case: Case) -> Rotate:
    """Prepare Liger, which needs heads before tokens and rotates in place."""
    function = import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = full_width(case)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotated_q, rotated_k = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)[:2]
        return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)

    return rotate


def _flash_attention(pairing: str, in_place: bool, case: Case) -> Rotate:
    """Prepare the Triton rotary of flash-attention.

    It rotates the first token by the first row of the tables, so the tables begin at the first position. For decoding,
    the tables have all positions, and each sequence of the batch has an offset in them.
    """
    function = import_module("flash_attn.layers.rotary").apply_rotary_emb
    cos, sin = _all_tables(case) if case.decode else case.tables
    options = (cos.to(case.dtype), sin.to(case.dtype), pairing == "interleaved", in_place)
    first = case.positions[:, 0].to(torch.int32) if case.decode else 0
    return lambda q, k: (function(q, *options, seqlen_offsets=first), function(k, *options, seqlen_offsets=first))


def _flashinfer(pairing: str, case: Case) -> Rotate:
    function = import_module("flashinfer").apply_rope_with_cos_sin_cache_inplace
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError("it supports only float16 and bfloat16")
    cache = torch.cat(_all_tables(case), dim=-1)
    positions = case.positions.expand(case.batch, case.tokens).reshape(-1).contiguous()

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        flat_q, flat_k = q.view(-1, Q_HEADS * HEAD_DIM), k.view(-1, KV_HEADS * HEAD_DIM)
        function(positions, flat_q, flat_k, HEAD_DIM, cache, pairing == "half")
        return q, k

    return rotate


def _all_tables(case: Case) -> tuple[Tensor, Tensor]:
    """Compute cos and sin for every position below LONGEST."""
    return tables(torch.arange(LONGEST, device=case.device))


def _both(pairing: str, suffix: str) -> tuple[Contender, ...]:
    """Return the contenders of the libraries that support both pairings, set up for this pairing."""
    out_of_place, in_place = (eager(partial(_flash_attention, pairing, x), in_place=x) for x in (False, True))
    flashinfer = eager(partial(_flashinfer, pairing), in_place=True)
    return (
        Contender(f"flash-attention{suffix}", pairing, out_of_place),
        Contender(f"flash-attention, in place{suffix}", pairing, in_place, in_place=True),
        Contender(f"FlashInfer{suffix}", pairing, flashinfer, backward=False, in_place=True),
    )


def _ours(pairing: str, suffix: str) -> tuple[Contender, ...]:
    rotate = partial(bench.ropewalk_of, pairing=pairing)
    in_place, angles_too = partial(bench.ropewalk_in_place, pairing=pairing), partial(_with_angles, pairing=pairing)
    return (
        Contender(f"ropewalk{suffix}", pairing, eager(rotate)),
        Contender(f"ropewalk, in place{suffix}", pairing, with_inputs(in_place), backward=False, in_place=True),
        Contender(f"ropewalk, compiled{suffix}", pairing, eager(rotate, compiled=True)),
        Contender(f"ropewalk, angles too{suffix}", pairing, eager(angles_too), backward=False),
    )


CONTENDERS = (
    Contender(FLOOR, "copy", with_inputs(copy_at_once)),
    *_ours("half", ""),
    *_ours("interleaved", ", interleaved"),
    *USUAL,
    Contender("Liger", "half", eager(_liger, in_place=True), in_place=True),
    *_both("half", ""),
    *_both("interleaved", ", interleaved"),
)


class Replayed(bench.OnGpu):
    """A clock for the GPU that times the replay of a CUDA graph of all calls."""

    def prepare(self, calls: Calls) -> Callable[[], float]:
        bench.device_seconds(calls)
        replay, number = _graph(calls), len(calls)
        bench.device_seconds([replay])
        return lambda: bench.device_seconds([replay]) / number


def _graph(calls: Calls) -> Callable[[], None]:
    """Capture all calls in a CUDA graph and return its replay, which keeps their results alive.

    If the results were freed, later allocations in the graph's memory could overwrite them.
    """
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]

    def replay(_results: object = results) -> None:
        graph.replay()

    return replay


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases to measure.

    They are a batch of sequences (forward and backward), a long and a short prompt, decoding with several batch sizes,
    and cos and sin at large positions. For a rehearsal, there are fewer and smaller cases.
    """
    small, device = options.rehearse, "cpu" if options.rehearse else "cuda"
    batch, tokens, prompts, rows = (2, 64, (32,), (4,)) if small else (4, 4096, (32_768, 1024), _BATCHES)
    for dtype in (torch.bfloat16, torch.float32):
        for what in ("forward",) if options.no_backward else ("forward", "backward"):
            yield Case(tokens, dtype, device, passes=what, batch=batch)
    for n in prompts:
        yield Case(n, torch.bfloat16, device)
    for n in rows:
        yield Case(1, torch.bfloat16, device, batch=n, decode=True)
    yield Case(tokens, torch.float32, device, first=FAR + 1 - tokens)


def verdict(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines that summarize the results.

    There is one line for each timed result of ropewalk. It compares ropewalk with the copy, and with the fastest other
    code that computes the same values for the same case. Code that works in place is compared only with code that also
    works in place. The last lines give the errors of cos and sin at large positions.
    """
    yield ""
    yield "ropewalk: its time / time of copy_, then time of the fastest other contender / its time"
    kind = itemgetter("case", "does", "in_place")
    timed = [row for row in rows if row["state"] == "timed"]
    for ours in timed:
        if ours["contender"].removesuffix(", interleaved") not in ("ropewalk", "ropewalk, in place"):
            continue
        peers = [row for row in timed if kind(row) == kind(ours) and not row["contender"].startswith("ropewalk")]
        best = min(peers, key=lambda row: float(row["median"]), default=None)
        speedup = f"{best['median'] / ours['median']:.2f} ({best['contender']})" if best else "no other contender"
        copy = f"{ours['times_copy']:.2f}" if ours["times_copy"] else "-"
        yield f"  {ours['case']:<38} {ours['contender']:<32} {copy:>7}  {speedup}"
    for row in rows:
        if row["far"] and "error" in row:
            yield f"{row['contender']}: error of cos and sin up to position {FAR:,}: {float(row['error']):.1e}"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = harness.parser(__doc__)
    parser.add_argument("--no-backward", action="store_true", help="do not time the backward pass")
    parser.add_argument("--no-compile", action="store_true", help="do not time torch.compile")
    parser.add_argument("--rehearse", action="store_true", help="run small cases on the CPU, to test the script")
    options = parser.parse_args(arguments)
    names = harness.select([one.name for one in CONTENDERS], options.only)
    chosen = [one for one in CONTENDERS if one.name in names and not (options.no_compile and "compiled" in one.name)]
    kernel = ropewalk.backends()["gpu kernel"]
    if not options.rehearse and kernel.startswith("not usable"):
        raise SystemExit(f"{kernel}. Run it on a machine with a GPU, or pass --rehearse.")
    out = harness.Results(options, rows=[])
    for case in cases(options):
        # At large positions only cos and sin are measured.
        if able := [one for one in chosen if one.does == "tables" or not case.is_far]:
            clock = bench.OnCpu() if options.rehearse else Replayed() if case.decode else bench.OnGpu()
            more = {"case": case.title, "batch": case.batch, "far": case.is_far}
            out.add(case.title, harness.measure(case, able, clock, options, **more))
        if case.device == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(verdict(out.found["rows"])))
    return out.found


if __name__ == "__main__":
    main()
