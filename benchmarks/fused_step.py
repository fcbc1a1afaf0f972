"""Time norm, rotation and cache writes of one decode step: the fused call against separate calls, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/fused_step.py

The separate calls are two `torch.nn.RMSNorm`, the rotation of q and k, and `index_put_` of k and of v. "copies" only
clones q, k and v, as a lower bound. Results are checked against float64 first, and wrong ones are not timed. Each line
is a row of JSON, with times in seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from harness import tables
from torch import Tensor

import ropewalk
from ropewalk.tools.bench import BASE, DTYPES, HEAD_DIM, OnCpu, sample_alternately, summary

Q_HEADS, KV_HEADS, EPS = 16, 8, 1e-6  # Qwen 3, 0.6 B
CAPACITY, BLOCK = 1024, 16  # tokens in each row, and in a page

SEPARATE = "separate calls"

Step = tuple[Tensor, Tensor, Tensor]
"""Rotated q, and the new keys and values as stored in the cache."""


def measure(batch: int, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a decode step, with one token in each row of the batch, by one fused call and by separate calls.

    Returns:
        A row for JSON for each contender. Its state is "timed" or "wrong". A timed row has of_separate, its median
        divided by that of the separate calls.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, 1, heads, HEAD_DIM, generator=generator).to(DTYPES[dtype])
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
    )
    weights = [torch.rand(HEAD_DIM, generator=generator).to(DTYPES[dtype]) + 0.5 for _ in range(2)]
    positions = torch.randint(0, CAPACITY, (batch, 1), generator=generator)
    contenders = _contenders(q, k, v, weights, positions)
    truth = _exact(q, k, v, weights, positions)
    allowed = (
        4 * torch.finfo(DTYPES[dtype]).eps * max(float(x.abs().max()) for x in truth)
    )  # rounding of norm and rotation
    samplers: dict[str, Callable[[], float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, (call, result) in contenders.items():
        call()
        got = result()
        errors = [] if got is None else [float((x.double() - y).abs().max()) for x, y in zip(got, truth, strict=True)]
        right = all(error <= allowed for error in errors)
        rows[name] = {"batch": batch, "dtype": dtype, "contender": name, "state": "timed" if right else "wrong"}
        if right:
            samplers[name] = OnCpu().prepare([call])
        else:
            rows[name] |= {"error": str(max(errors)), "allowed": allowed}
    samples = sample_alternately(samplers, options.rounds, options.seconds)
    found = {name: summary(taken) for name, taken in samples.items()}
    separate = found[SEPARATE]["median"] if SEPARATE in found else None
    for name, row in rows.items():
        if name in found:
            row |= {**found[name], "of_separate": found[name]["median"] / separate if separate else None}
    return list(rows.values())


def _contenders(
    q: Tensor, k: Tensor, v: Tensor, weights: list[Tensor], positions: Tensor
) -> dict[str, tuple[Callable[[], object], Callable[[], Step | None]]]:
    """Return, for the name of each contender, the call to time and a function that returns the result of the call."""
    batch, row = len(q), torch.arange(len(q))[:, None]
    rotation = ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing="half").at(positions)
    norm = ropewalk.QKNorm(weights[0], weights[1], eps=EPS)
    modules = [torch.nn.RMSNorm(HEAD_DIM, eps=EPS, dtype=q.dtype) for _ in weights]
    for module, weight in zip(modules, weights, strict=True):
        module.weight.data.copy_(weight)
    q_norm, k_norm = modules
    outputs: list[Tensor] = []

    def allocate() -> tuple[Tensor, Tensor]:
        shape = (batch, CAPACITY, KV_HEADS, HEAD_DIM)
        return torch.zeros(shape, dtype=q.dtype), torch.zeros(shape, dtype=q.dtype)

    def separate(k_cache: Tensor, v_cache: Tensor) -> None:
        rotated, keys = rotation(q_norm(q), k_norm(k), layout="bshd")
        k_cache.index_put_((row, positions), keys)
        v_cache.index_put_((row, positions), v)
        outputs[:] = [rotated]

    def fused(k_cache: Tensor, v_cache: Tensor) -> None:
        outputs[:] = [
            ropewalk.rotate_and_store(
                q, k, v, rotation=rotation, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, norm=norm
            )
        ]

    slots = row * CAPACITY + positions
    contenders: dict[str, tuple[Callable[[], object], Callable[[], Step | None]]] = {}
    for name, call, pages in (
        (SEPARATE, separate, False),
        ("one call", fused, False),
        ("one call, pages", fused, True),
    ):
        flat = allocate()
        caches = tuple(x.view(-1, BLOCK, KV_HEADS, HEAD_DIM) for x in flat) if pages else flat

        def result(flat: tuple[Tensor, Tensor] = flat) -> Step:
            return outputs[0], flat[0][row, positions], flat[1][row, positions]

        contenders[name] = partial(call, *caches), result

    def copies() -> None:
        outputs[:] = [q.clone(), k.clone(), v.clone()]

    def no_result() -> None:
        """Return None: copies have no result to compare."""

    contenders["copies"] = copies, no_result
    return contenders


def _exact(q: Tensor, k: Tensor, v: Tensor, weights: list[Tensor], positions: Tensor) -> Step:
    """Compute the decode step in float64, except that q and k are rounded to their dtype after the norm."""
    cos, sin = (table.double()[:, :, None] for table in tables(positions))
    rotated = []
    for x, weight in zip((q, k), weights, strict=True):
        wide = x.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        a, b = normed.to(q.dtype).double().chunk(2, dim=-1)
        rotated.append(torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1))
    return rotated[0], rotated[1], v.double()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=150)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="rows of the batch (1 8 64)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    out = harness.Results(options, rows=[])
    for dtype in options.dtypes:
        for batch in options.rows:
            with torch.inference_mode():
                rows = measure(batch, dtype, options)
            out.found["rows"] += rows
            for row in rows:
                print(json.dumps(row), flush=True)
            out.write()
    return out.found


if __name__ == "__main__":
    main()
