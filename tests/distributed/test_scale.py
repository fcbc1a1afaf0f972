"""tools/scale.py counts what a rank sends and holds: the formulas equal the count, and nothing grows too fast."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import processes

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import scale

PAGE = Path(__file__).parents[2] / "docs" / "context-parallel.md"

SHORT, LONG, THOUSAND = scale.PLANS


@functools.cache
def counted(plan: scale.Plan, rank: int, recompute: bool) -> Any:
    return scale.simulate(plan, rank, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", scale.PLANS, ids=str)
def test_formulas(plan: scale.Plan, recompute: bool) -> None:
    assert counted(plan, plan.ranks // 2, recompute).bytes == {
        name: number
        for name, number in scale.formulas(plan, recompute=recompute, fused_norm=False).items()
        if number  # nothing is sent along an axis of one rank
    }


@pytest.mark.parametrize(("plan", "recompute"), [(LONG, True), (THOUSAND, False)], ids=str)
def test_all_ranks_do_the_same(plan: scale.Plan, recompute: bool) -> None:
    first, middle, last = (counted(plan, rank, recompute) for rank in (0, plan.ranks // 2, plan.ranks - 1))
    assert first.collectives == middle.collectives == last.collectives
    assert first.bytes == middle.bytes == last.bytes
    assert first.largest == middle.largest == last.largest


@pytest.mark.parametrize("plan", scale.PLANS, ids=str)
def test_the_largest_tensor_is_an_activation_of_the_tokens_of_a_rank(plan: scale.Plan) -> None:
    """So no tensor has a number for each pair of tokens, or the keys of all ranks."""
    channels = max(4096, 4 * 4096 // plan.tensor)
    assert counted(plan, plan.ranks // 2, False).largest == plan.tokens // plan.context * channels


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_held_grows_with_the_tokens_of_a_rank(recompute: bool) -> None:
    twice = dataclasses.replace(SHORT, tokens=2 * SHORT.tokens)
    more_ranks = dataclasses.replace(twice, context=2 * SHORT.context)
    held = [counted(plan, plan.ranks // 2, recompute).bytes["held"] for plan in (SHORT, twice, more_ranks)]
    assert held == [held[0], 2 * held[0], held[0]]


def test_placements() -> None:
    strided, replicated = "(_StridedShard(dim=0, sf=8), Shard(dim=0))", "(Shard(dim=0), Replicate())"
    assert counted(THOUSAND, 512, False).parameters == {
        "attention_norm.weight": f"(32,) {replicated}",
        "mlp_norm.weight": f"(32,) {replicated}",
        "attention.q_proj.weight": f"(4, 4096) {strided}",
        "attention.k_proj.weight": f"(1, 4096) {strided}",
        "attention.v_proj.weight": f"(1, 4096) {strided}",
        "attention.o_proj.weight": "(32, 512) (Shard(dim=0), Shard(dim=1))",
        "attention.q_norm.weight": f"(1,) {replicated}",
        "attention.k_norm.weight": f"(1,) {replicated}",
        "up.weight": f"(16, 4096) {strided}",
        "down.weight": "(32, 2048) (Shard(dim=0), Shard(dim=1))",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tokens 0", "argument --tokens: must be at least 1, got 0"),
        ("--data -1", "argument --data: must be at least 1, got -1"),
        ("--context 3", "--tokens 1048576 must be a multiple of 6, which is 2 times --context times --tensor"),
        ("--tensor 16", "--tensor 16 must divide the 8 key heads"),
        ("--rank 64 --data 1", "--rank must be from 0 to 63, got 64"),
        ("--rank 8", "--rank must be from 0 to 7, got 8"),  # of the smallest of the three meshes
    ],
)
def test_refuses_options(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scale.py", *options.split()])
    with pytest.raises(SystemExit) as end:
        scale.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"scale.py: error: {message}\n"


def test_four_processes(tmp_path: Path) -> None:
    """Processes that exist, and send and hold what they are counted to."""
    for status, output in processes.run(Path(__file__).with_name("scale_worker.py"), 4, tmp_path):
        assert status == 0, output
        compared = json.loads(output.splitlines()[-1])
        assert len(compared) == 6
        assert [by_formula for by_formula, _ in compared] == [in_fact for _, in_fact in compared]


def test_the_page_has_the_table() -> None:
    assert scale.table() in PAGE.read_text("utf-8")
