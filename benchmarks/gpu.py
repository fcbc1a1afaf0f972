"""How long rotating q and k takes on a GPU, against copying them and against other code. Check first, then time.

Sizes, the usual code and the exact rotation are those of `ropewalk bench`; cases and clock are those of a GPU.

    python benchmarks/gpu.py --json benchmarks/results/gpu-NAME.json

It wants PyTorch with a GPU, Triton and NumPy, and finds ropewalk in src/ beside it: nothing is built. Under ten
minutes. Others are measured where they can be imported: Liger (wheel `liger-kernel`, which needs nothing more for the
one file that is used), flash-attention's Triton rotary (`flash_attn`, with einops), FlashInfer (`flashinfer-python` and
its own requirements). `--rehearse` runs all of it on the CPU with small tensors: it shows that the script is whole, and
its times mean nothing.

What is timed: batches of calls between two events of the device, while the host is far ahead (a kernel that only waits
goes first), the inputs taken in turn from buffers that are together larger than the second-level cache (64 at most, so
that the smallest cases stay in it, whoever runs), contenders in turn; the median of many. Decoding is timed as replays
of a CUDA graph that holds a call for each buffer, angles of the new positions not included. "host" is how long the host
takes for one call outside of a graph: where it is longer, it is what eager code waits for. GB/s counts q and k read
once and written once, whatever was moved in truth.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import ropewalk
from ropewalk.programs.bench import machine, usual
from ropewalk.programs.bench.case import BASE, HEAD_DIM, KV_HEADS, Q_HEADS, exact_angle, rotation_error

PAIRINGS = ("half", "interleaved")
LONGEST = 100_000  # positions of tokens that are decoded

Turned = tuple[Tensor, Tensor]


@dataclass
class Case:
    """q and k `[batch, seq, heads, head_dim]` at positions `[seq]`; decoding, one token of each row at `[batch, 1]`."""

    name: str
    batch: int
    seq: int
    dtype: torch.dtype
    pairing: str
    device: str
    decode: bool = False
    backward: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        if self.decode:
            self.positions = torch.randint(0, LONGEST, (self.batch, 1), device=self.device, generator=generator)
        else:
            self.positions = torch.arange(self.seq, device=self.device)
        self.rope = ropewalk.Rope(HEAD_DIM, BASE, self.pairing)
        self.rotation = self.rope.at(self.positions)

    @property
    def bytes(self) -> int:
        """Of q and k, read and written."""
        return 2 * self.batch * self.seq * (Q_HEADS + KV_HEADS) * HEAD_DIM * self.dtype.itemsize

    def queries(self, seed: int) -> Turned:
        generator = torch.Generator(self.device).manual_seed(seed)
        q, k = (
            torch.randn(
                self.batch, self.seq, heads, HEAD_DIM, device=self.device, dtype=self.dtype, generator=generator
            )
            for heads in (Q_HEADS, KV_HEADS)
        )
        return q.requires_grad_(self.backward), k.requires_grad_(self.backward)

    def full_width(self, dtype: torch.dtype) -> Turned:
        """Tables as transformers has them: `[batch or 1, seq, head_dim]`, each half the same."""
        cos, sin = (torch.cat((t, t), dim=-1).to(dtype) for t in (self.rotation.cos, self.rotation.sin))
        return (cos, sin) if self.decode else (cos[None], sin[None])

    def error(self, before: Tensor, after: Tensor, rows: Tensor, back: bool) -> float:
        """Of some tokens: the largest error of a pair, relative to its length, against float64."""
        angle = exact_angle(self.positions if self.decode else self.positions[rows]).unsqueeze(-2)
        before, after = before[:, rows], after[:, rows]
        return rotation_error(before, after, -angle if back else angle, self.pairing).item()


@dataclass
class Contender:
    """A name, and what makes of a case the function that turns. It raises where it cannot do the case."""

    name: str
    make: Callable[[Case], Callable[[Tensor, Tensor], Turned]]
    in_place: bool = False  # its inputs are overwritten
    turns: bool = True  # else it only moves the same bytes
    pairings: tuple[str, ...] = ("half", "interleaved")


def copy(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    """One copy from device to device of as many bytes: q and k as the two halves of one tensor."""

    def run(both: Tensor, target: Tensor) -> Turned:
        target.copy_(both)
        return both, target

    return run


def ours(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    return lambda q, k: case.rotation(q, k, layout="bshd")


def ours_in_place(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    def run(q: Tensor, k: Tensor) -> Turned:
        case.rotation.apply_(q, k, layout="bshd")
        return q, k

    return run


def ours_with_angles(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    return lambda q, k: case.rope.at(case.positions)(q, k, layout="bshd")


def hugging_face(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    return usual.hugging_face(*(t.unsqueeze(2) for t in case.full_width(case.dtype)))


def meta(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    return usual.meta(torch.complex(case.rotation.cos, case.rotation.sin).unsqueeze(-2))


def compiled(make: Callable[[Case], Callable[[Tensor, Tensor], Turned]]) -> Callable[[Case], Any]:
    def make_compiled(case: Case) -> Any:
        return torch.compile(make(case), fullgraph=True, dynamic=False)

    return make_compiled


def liger(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = case.full_width(case.dtype)

    def run(q: Tensor, k: Tensor) -> Turned:
        turned_q, turned_k = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)[:2]
        return turned_q.transpose(1, 2), turned_k.transpose(1, 2)

    return run


def flash_attention(case: Case, in_place: bool = False) -> Callable[[Tensor, Tensor], Turned]:
    function = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb
    table = case.rope.at(torch.arange(LONGEST, device=case.device)) if case.decode else case.rotation
    how = (table.cos.to(case.dtype), table.sin.to(case.dtype), case.pairing != "half", in_place)
    first = case.positions[:, 0].to(torch.int32) if case.decode else 0
    return lambda q, k: (function(q, *how, seqlen_offsets=first), function(k, *how, seqlen_offsets=first))


def flashinfer(case: Case) -> Callable[[Tensor, Tensor], Turned]:
    function = importlib.import_module("flashinfer").apply_rope_with_cos_sin_cache_inplace
    if case.backward:
        raise NotImplementedError("has no backward")
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError("has 16 bits only")
    table = case.rope.at(torch.arange(LONGEST, device=case.device))
    cache = torch.cat((table.cos, table.sin), dim=-1)
    positions = case.positions.expand(case.batch, case.seq).reshape(-1).contiguous()

    def run(q: Tensor, k: Tensor) -> Turned:
        flat_q, flat_k = q.view(-1, Q_HEADS * HEAD_DIM), k.view(-1, KV_HEADS * HEAD_DIM)
        function(positions, flat_q, flat_k, HEAD_DIM, cache, case.pairing == "half")
        return q, k

    return run


OURS = "ropewalk"
CONTENDERS = [
    Contender("copy, device to device", copy, turns=False),
    Contender(OURS, ours),
    Contender("ropewalk, in place", ours_in_place, in_place=True),
    Contender("ropewalk, angles too", ours_with_angles),
    Contender("ropewalk, compiled", compiled(ours)),
    Contender("Hugging Face", hugging_face, pairings=("half",)),
    Contender("Hugging Face, compiled", compiled(hugging_face), pairings=("half",)),
    Contender("Meta", meta, pairings=("interleaved",)),
    Contender("Meta, compiled", compiled(meta), pairings=("interleaved",)),
    Contender("Liger", liger, in_place=True, pairings=("half",)),
    Contender("flash-attention (Triton)", flash_attention),
    Contender("flash-attention, in place", lambda case: flash_attention(case, in_place=True), in_place=True),
    Contender("FlashInfer", flashinfer, in_place=True),
]


def calls_of(
    case: Case, run: Callable[[Tensor, Tensor], Turned], sets: int, turns: bool = True
) -> list[Callable[[], Any]]:
    """A call for each set of buffers; with backward, of the backward pass alone, whose forward has run."""
    made: list[Callable[[], Any]] = []
    for i in range(sets):
        if not turns:
            both = torch.zeros(case.bytes // 2 // case.dtype.itemsize, device=case.device, dtype=case.dtype)
            target = torch.zeros_like(both)
            made.append(lambda both=both, target=target: run(both, target))
            continue
        q, k = case.queries(i)
        if not case.backward:
            made.append(lambda q=q, k=k: run(q, k))
            continue
        turned = run(q * 1, k * 1)  # not leaves: some write over what they are given
        grads = [torch.randn_like(x) for x in turned]
        made.append(lambda q=q, k=k, t=turned, g=grads: torch.autograd.grad(t, (q, k), g, retain_graph=True))
    return made


def check(case: Case, contender: Contender, run: Callable[[Tensor, Tensor], Turned]) -> None:
    """Raise unless it turns q and k, and their gradients back, as float64 says; relative to the length of a pair."""
    if not contender.turns:
        return
    # The products of those that compute in 16 bits are rounded too.
    allowed = 4 * torch.finfo(case.dtype).eps
    rows = torch.arange(case.seq - 1, -1, -max(1, case.seq // 256), device=case.device)
    q, k = case.queries(0)
    given = [q.detach().clone(), k.detach().clone()]
    if case.backward:
        grads = [torch.randn_like(x) for x in (q, k)]
        kept = [g.clone() for g in grads]
        found, given = torch.autograd.grad(run(q * 1, k * 1), (q, k), grads), kept
    else:
        found = run(q, k)
    for x, y in zip(given, found, strict=True):
        error = case.error(x, y, rows, back=case.backward)
        if not error <= allowed:
            raise ArithmeticError(f"wrong: off by {error:.1e} of the length of a pair")


class Clock:
    """Times batches of calls, in milliseconds for one call."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def host(self, calls: list[Callable[[], Any]]) -> float:
        """Milliseconds until a call comes back, while the device is busy with something else."""
        if self.on_gpu:
            torch.cuda._sleep(4_000_000 + 400_000 * len(calls))
        start = time.perf_counter()
        for call in calls:
            call()
        took = (time.perf_counter() - start) * 1e3 / len(calls)
        if self.on_gpu:
            torch.cuda.synchronize()
        return took

    def run(self, calls: list[Callable[[], Any]]) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) * 1e3 / len(calls)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000 + 400_000 * len(calls))  # cycles: some milliseconds, in which the host runs ahead
        begin.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / len(calls)

    def graphed(self, calls: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """One replay in the place of all calls."""
        if not self.on_gpu:
            return calls
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]  # results stay, or the next would be written over them
        return [lambda graph=graph, kept=kept: graph.replay()]


def measure(case: Case, clock: Clock, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    """Every contender that can do the case: checked, then timed in turn."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size if clock.on_gpu else 1 << 16
    sets = min(64, max(4, 1 + 3 * cache // case.bytes))
    running: list[tuple[dict[str, Any], list[Callable[[], Any]], int]] = []
    rows: list[dict[str, Any]] = []
    torch._dynamo.reset()
    for contender in CONTENDERS:
        if case.pairing not in contender.pairings or (only and contender.name not in only):
            continue
        if case.backward and contender.name in ("ropewalk, in place", "ropewalk, angles too"):
            continue  # the same backward pass
        row: dict[str, Any] = {"name": contender.name, "in place": contender.in_place, "turns": contender.turns}
        rows.append(row)
        try:
            # Without gradients nobody has to keep anything.
            with torch.set_grad_enabled(case.backward and contender.turns):
                run = contender.make(case)
                check(case, contender, run)
                calls = calls_of(case, run, sets, contender.turns)
                clock.run(calls)
                row["host ms"] = statistics.median(clock.host(calls[:8]) for _ in range(5))
                per_call = 1 if not case.decode else len(calls)
                calls = clock.graphed(calls) if case.decode else calls
                clock.run(calls)
            running.append((row | {"at": len(rows) - 1}, calls, per_call if clock.on_gpu else 1))
        except Exception as e:
            row["not timed"] = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    samples: dict[int, list[float]] = {row["at"]: [] for row, _, _ in running}
    for _ in range(rounds):
        for row, calls, per_call in running:
            try:
                with torch.set_grad_enabled(case.backward and row["turns"]):
                    samples[row["at"]].append(clock.run(calls) / per_call)
            except Exception as e:
                rows[row["at"]]["not timed"] = f"{type(e).__name__}: {e}"
    for at, taken in samples.items():
        if "not timed" in rows[at] or not taken:
            continue
        taken.sort()
        rows[at] |= {
            "ms": statistics.median(taken),
            "low": taken[len(taken) // 10],
            "high": taken[-1 - len(taken) // 10],
            "GB/s": case.bytes / statistics.median(taken) / 1e6,
        }
    return rows


def table_error(device: str) -> dict[str, float]:
    """The largest error of cos and sin at 1,048,576 and before, against float64 of exact angles."""
    rope = ropewalk.Rope(HEAD_DIM, BASE, "half")
    positions = torch.arange(1_048_576 - 4095, 1_048_577, device=device)
    rotation = rope.at(positions)
    angle = exact_angle(positions)  # 2^20 times a float64 frequency: off by 2^-30 radians at most
    inv_freq = torch.from_numpy(rope.inv_freq).float().to(device)
    product = usual.hugging_face_tables(inv_freq, positions[None])[0][0, :, : HEAD_DIM // 2]
    return {
        "ropewalk": float((rotation.cos - angle.cos()).abs().max().maximum((rotation.sin - angle.sin()).abs().max())),
        "the usual float32 product": float((product - angle.cos()).abs().max()),
    }


def table_time(case: Case, clock: Clock, rounds: int) -> float:
    """Milliseconds for cos and sin of the positions of the case."""
    calls = [lambda: case.rope.at(case.positions)] * 8
    clock.run(calls)
    return statistics.median(clock.run(calls) for _ in range(rounds))


def cases(device: str, small: bool) -> list[Case]:
    """The shapes that are measured."""
    if small:
        made = [Case("forward", 2, 64, dtype, p, device) for dtype in (torch.bfloat16, torch.float32) for p in PAIRINGS]
        made.append(Case("backward", 2, 64, torch.float32, "half", device, backward=True))
        return [*made, Case("decode", 4, 1, torch.bfloat16, "half", device, decode=True)]
    made = []
    for dtype in (torch.bfloat16, torch.float32):
        for pairing in PAIRINGS:
            made.append(Case("forward", 4, 4096, dtype, pairing, device))
            made.append(Case("backward", 4, 4096, dtype, pairing, device, backward=True))
    made.append(Case("prefill", 1, 32_768, torch.bfloat16, "half", device))
    made.append(Case("prefill", 1, 1024, torch.bfloat16, "half", device))
    for batch in (1, 8, 64, 256):
        made.append(Case("decode", batch, 1, torch.bfloat16, "half", device, decode=True))
    return made


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    title = f"{case.name}, {case.batch} x {case.seq} tokens, {str(case.dtype)[6:]}, {case.pairing}"
    print(f"\n{title}\n{'':30}{'µs':>10}{'host µs':>9}{'GB/s':>8}{'x ours':>8}{'of copy':>9}")
    times = {row["name"]: row["ms"] for row in rows if "ms" in row}
    mine, floor = times.get(OURS), times.get("copy, device to device")
    for row in rows:
        if "ms" not in row:
            print(f"{row['name']:30}  {row['not timed'][:90]}")
            continue
        against = f"{row['ms'] / mine:8.2f}" if mine else f"{'':8}"
        part = f"{floor / row['ms']:9.2f}" if floor else f"{'':9}"
        moved = f"{row['ms'] * 1e3:10.1f}{row['host ms'] * 1e3:9.1f}{row['GB/s']:8.0f}"
        print(f"{row['name']:30}{moved}{against}{part}")
    sys.stdout.flush()


def verdict(results: list[dict[str, Any]]) -> None:
    """Ours against the copy, and against the fastest other that does the same: new tensors, or in place."""
    print("\nropewalk: its part of the bandwidth of the copy; the time of the fastest other against its own")
    for result in results:
        timed = [row for row in result["rows"] if "ms" in row]
        floor = next((row["ms"] for row in timed if not row["turns"]), None)
        for in_place, name in ((False, OURS), (True, "ropewalk, in place")):
            alike = [row for row in timed if row["turns"] and row["in place"] is in_place]
            mine = next((row["ms"] for row in alike if row["name"] == name), None)
            others = [row for row in alike if not row["name"].startswith("ropewalk")]
            if mine is None:
                continue
            fastest = min(others, key=lambda row: row["ms"], default=None)
            against = f"{fastest['ms'] / mine:.2f} x ({fastest['name']})" if fastest else "no other"
            part = f"{floor / mine:.2f} of copy" if floor else ""
            print(f"  {result['title']:42} {'in place' if in_place else 'new':9} {part:13} {against}")


def described(device: str) -> dict[str, Any]:
    about = machine.describe()
    gpu = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "name": properties.name,
            "memory": properties.total_memory,
            "second-level cache": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
        }
    about["versions"] |= {"ropewalk": ropewalk.__version__}  # it need not be installed
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **about,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything there, after each case")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each contender (30)")
    parser.add_argument(
        "--only", action="append", default=[], help="a contender by its name; several times for several"
    )
    parser.add_argument("--seconds", type=float, default=420, help="start no further case after so many (420)")
    parser.add_argument(
        "--bytes-per-thread",
        type=int,
        choices=(32, 64, 128),
        help="another size of our tiles than the one in kernels/gpu.py",
    )
    parser.add_argument(
        "--warps", type=int, choices=(4, 8, 16), help="another number of warps than the one in kernels/gpu.py"
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small: not a measurement")
    options = parser.parse_args()
    began = time.monotonic()
    device = "cpu" if options.rehearse else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; --rehearse runs without one")
    unknown = set(options.only) - {contender.name for contender in CONTENDERS}
    if unknown:
        parser.error(f"--only: no contender is called {sorted(unknown)}; there are {[c.name for c in CONTENDERS]}")
    from ropewalk.kernels import gpu

    if options.bytes_per_thread:
        gpu._BYTES_PER_THREAD = options.bytes_per_thread
    if options.warps:
        gpu._WARPS = options.warps
    if device == "cuda" and (why := gpu.unavailable()) is not None:
        parser.error(f"the GPU kernel cannot be used: {why}")

    clock, rounds = Clock(device), 2 if options.rehearse else options.rounds
    tiles = {"bytes per thread": gpu._BYTES_PER_THREAD, "warps": gpu._WARPS}
    report: dict[str, Any] = {"about": described(device), "tiles": tiles, "angles": table_error(device), "cases": []}
    print(json.dumps(report, indent=2))
    for case in cases(device, options.rehearse):
        if time.monotonic() - began > options.seconds:
            print(f"\nno time left for {case.name}, {case.batch} x {case.seq}")
            report.setdefault("left out", []).append(f"{case.name}, {case.batch} x {case.seq}")
            continue
        rows = measure(case, clock, rounds, options.only)
        title = f"{case.name}, {case.batch} x {case.seq}, {str(case.dtype)[6:]}, {case.pairing}"
        table = table_time(case, clock, rounds)
        report["cases"].append({"title": title, "bytes": case.bytes, "table ms": table, "rows": rows})
        show(case, rows)
        print(f"{'(cos and sin of the positions)':30}{table * 1e3:10.1f}")
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        if device == "cuda":
            torch.cuda.empty_cache()
    verdict(report["cases"])
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
