"""Time norm, rotation and cache writes of one decode step: the fused call against separate calls, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/fused_step.py

The separate calls are two `torch.nn.RMSNorm`, the rotation of q and k, and `index_put_` of k and of v. "copies" only
clones q, k and v, as a lower bound. Results are checked against float64 first, and wrong ones are not timed. Each line
is a row of JSON, with times in seconds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk.tools.bench.case import BASE, HEAD_DIM, tables
from ropewalk.tools.bench.clocks import OnCpu
from ropewalk.tools.bench.measure import sample_alternately

Q_HEADS, KV_HEADS, EPS = 16, 8, 1e-6  # Qwen 3, 0.6 B
CAPACITY, BLOCK = 1024, 16  # tokens in each row, and in a page

Step = tuple[Tensor, Tensor, Tensor]
"""Rotated q, and the new keys and values as stored in the cache."""


def rows(
    batches: Sequence[int] = (1, 8, 64),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    *,
    rounds: int = 30,
    seconds: float = 10.0,
) -> list[dict[str, Any]]:
    """Time a decode step, with one token in each row of the batch, by one fused call and by separate calls.

    Args:
        batches, dtypes: every combination is measured.
        rounds, seconds: as in `measure.rows`.

    Returns:
        A row for JSON for each case and contender. It has batch, dtype, threads, contender, and state, which is "timed"
        or "wrong". A timed row also has median and least, the median and the smallest sample in seconds, and
        of_separate, its median divided by that of the separate calls. A wrong row also has error and allowed.
    """
    results = []
    for dtype in dtypes:
        for batch in batches:
            with torch.inference_mode():
                results += _case(batch, dtype, rounds, seconds)
    return results


def _case(batch: int, dtype: torch.dtype, rounds: int, seconds: float) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, 1, heads, HEAD_DIM, generator=generator).to(dtype) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
    )
    weights = [torch.rand(HEAD_DIM, generator=generator).to(dtype) + 0.5 for _ in range(2)]
    positions = torch.randint(0, CAPACITY, (batch, 1), generator=generator)
    contenders = _contenders(q, k, v, weights, positions)
    truth = _exact(q, k, v, weights, positions)
    allowed = 4 * torch.finfo(dtype).eps * max(float(x.abs().max()) for x in truth)  # rounding of norm and rotation
    samplers: dict[str, Callable[[], float]] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, (call, result) in contenders.items():
        call()
        got = result()
        errors = [] if got is None else [float((x.double() - y).abs().max()) for x, y in zip(got, truth, strict=True)]
        states[name] = {"state": "timed"}
        if not all(error <= allowed for error in errors):
            states[name] = {"state": "wrong", "error": str(max(errors)), "allowed": allowed}
            continue
        samplers[name] = OnCpu().prepare([call]).sample
    samples = sample_alternately(samplers, rounds, seconds)
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    about = {"batch": batch, "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    separate = medians.get("separate calls")
    return [
        {
            **about,
            "contender": name,
            **state,
            **({"median": medians[name], "least": min(samples[name])} if name in medians else {}),
            **({"of_separate": medians[name] / separate} if name in medians and separate else {}),
        }
        for name, state in states.items()
    ]


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
        ("separate calls", separate, False),
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


if __name__ == "__main__":
    for row in rows(rounds=150):
        print(json.dumps(row))
