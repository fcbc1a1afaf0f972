"""Time other tile sizes of the rotation on a GPU: PYTHONPATH=src python benchmarks/gpu_tiles.py --json FILE

--rehearse runs small sizes on the CPU, in Triton's interpreter (TRITON_INTERPRET=1), and times nothing.

Each time is the median of 15 replays (--rounds) of a CUDA graph. A graph rotates several sets of tensors, three times
the L2 cache or 64 sets, so that tensors of a long sequence come from memory. `share` is the time of `copy_` divided by
that of the rotation. `right` says whether the result is that of the tile in use, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import harness
import torch

from gpu import Replayed
from ropewalk._layout import Options
from ropewalk.kernels import gpu, gpu_plans
from ropewalk.tools import bench

DEFAULT_TILES = ("64x4", "32x4", "16x4", "128x4", "64x8", "32x8", "64x2", "32x2")
SIZES = ((4, 4096), (1, 1024), (1, 1), (8, 1), (64, 1), (256, 1))  # batch, tokens
HEADS, HEAD_DIM, L2_BYTES = (32, 8), 128, 52_000_000


def microseconds(calls: list[Callable[[], object]], rounds: int) -> float:
    """Return the time of one of the calls, in a CUDA graph of all of them."""
    sample = Replayed().prepare(calls)
    return 1e6 * bench.summary([sample() for _ in range(rounds)])["median"]


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=15)
    parser.add_argument("--tile", action="append", help="BYTESxWARPS, e.g. 32x4; may be repeated")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    out = harness.Results(options, rows=[])
    tiles = [gpu_plans.Tile(*map(int, tile.split("x"))) for tile in options.tile or DEFAULT_TILES]
    device, sizes = ("cpu", ((2, 3),)) if options.rehearse else ("cuda", SIZES)
    for dtype, (batch, tokens) in itertools.product((torch.bfloat16, torch.float32), sizes):
        moved = 2 * batch * tokens * sum(HEADS) * HEAD_DIM * dtype.itemsize
        count = 1 if options.rehearse else min(64, 1 + 3 * L2_BYTES // moved)

        sets = [[torch.randn(batch, tokens, n, HEAD_DIM, device=device).to(dtype) for n in HEADS] for _ in range(count)]
        outputs, sample = [[torch.empty_like(x) for x in q_and_k] for q_and_k in sets], [x.clone() for x in sets[0]]
        table = (
            (batch, 1, HEAD_DIM // 2) if tokens == 1 else (tokens, HEAD_DIM // 2)
        )  # a step has a position in each row
        cos, sin = torch.randn(table, device=device), torch.randn(table, device=device)
        flat = [torch.cat([x.flatten() for x in q_and_k]) for q_and_k in (*sets, *outputs)]
        pairs = list(zip(flat[:count], flat[count:], strict=True))
        copy = 1.0 if options.rehearse else microseconds([partial(y.copy_, x) for x, y in pairs], options.rounds)
        for interleaved, in_place in itertools.product((False, True), (False, True)):
            how, in_use = Options("bshd", interleaved, 0), gpu_plans.tile
            wanted = [torch.empty_like(x) for x in sample]
            gpu.rotate(sample, wanted, cos, sin, how)
            calls = [
                partial(gpu.rotate, x, x if in_place else y, cos, sin, how) for x, y in zip(sets, outputs, strict=True)
            ]
            for tile in tiles:
                gpu_plans.tile = tile
                gpu_plans._rotation_plan.cache_clear()
                result = [x.clone() for x in sample]
                gpu.rotate(result, result, cos, sin, how)
                time = 1.0 if options.rehearse else microseconds(calls, options.rounds)
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "batch": batch,
                    "tokens": tokens,
                    "pairing": "interleaved" if interleaved else "half",
                    "in_place": in_place,
                    "tile": f"{tile.bytes}x{tile.warps}",
                    "microseconds": round(time, 3),
                    "share": round(copy / time, 3),
                    "right": all(map(torch.equal, result, wanted)),
                }
                out.found["rows"].append(row)
                print(*row.values(), flush=True)
            gpu_plans.tile = in_use
            gpu_plans._rotation_plan.cache_clear()
    out.write()


if __name__ == "__main__":
    main()
