"""What `check` names in calls of other sizes, and in the memory of a call. Each target is right at the usual sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropewalk import conformance
from ropewalk.tools.check.measure.case import unwritten


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate x correctly with half pairing, `[batch, seq, heads, head_dim]`."""
    inv_freq = 10_000.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = positions[..., None, None] * inv_freq
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).type_as(x)


def wrong_if(condition: Callable[[Tensor], bool], part: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a function that does not rotate a part of tensors for which the condition holds."""

    def f(x: Tensor, positions: Tensor) -> Tensor:
        out = rotated(x, positions)
        if condition(x):
            part(out).copy_(part(x))
        return out

    return f


@pytest.mark.parametrize(
    ("f", "says", "case"),
    [
        (
            wrong_if(lambda x: x.shape[2] == 12, lambda x: x[:, :, 8:]),
            "q is not rotated in heads 8 to 11 (counted from 0).",
            "12 heads of 64 channels, 1 token",
        ),
        (
            wrong_if(lambda x: x.shape[2] & (x.shape[2] - 1) != 0, lambda x: x[:, :, -1:]),
            "q is not rotated in head 2 (counted from 0).",
            "3 heads of 64 channels, 1 token",
        ),
        (
            wrong_if(lambda x: x.shape[1] > 128, lambda x: x[:, 128:]),
            "q is not rotated in token 128 (counted from 0).",
            "1 head of 64 channels, 129 tokens",
        ),
        (
            wrong_if(lambda x: x.shape[1] % 32 == 1 and x.shape[1] > 1, lambda x: x[:, -1:]),
            "q is not rotated in token 32 (counted from 0).",
            "1 head of 64 channels, 33 tokens",
        ),
        (
            wrong_if(lambda x: x.shape[0] > 1 and x.shape[1] == 63, lambda x: x[1:, :, :, :7]),
            "q is not rotated in channels 0 to 6, row 1 (counted from 0).",
            "1 head of 64 channels, 2 rows of 63 tokens",
        ),
    ],
)
def test_the_smallest_case_is_named(f: Callable[..., Tensor], says: str, case: str) -> None:
    report = conformance.check(f)
    assert [(finding.code, finding.says, finding.case) for finding in report.findings] == [
        ("size-dependent", says, case)
    ]


def test_the_heads_of_k_are_part_of_the_case() -> None:
    def f(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k_out = rotated(k, positions)
        if k.shape[2] == 3 and q.shape[2] == 12:
            k_out[:, :, 2] = k[:, :, 2] * 0
        return rotated(q, positions), k_out

    (finding,) = conformance.check(f).findings
    assert (finding.code, finding.says) == ("grouped-heads", "k is zero in head 2 (counted from 0).")
    assert finding.case == "12 heads of q and 3 of k, of 64 channels, 1 token"


def test_a_size_that_is_refused_is_no_finding() -> None:
    def f(x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[2] % 2:
            raise ValueError("heads must be even")
        return rotated(x, positions)

    report = conformance.check(f)
    assert report.codes == []
    (sizes,) = [grade for grade in report.grades if grade.name == "sizes"]
    assert sizes.right is None
    assert "ValueError: heads must be even (test_sizes.py, line 89) (1 head of 64 channels, 1 token)" in sizes.says


class TestNotWritten:
    def test_in_every_call(self) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            out = torch.empty_like(x)
            out[..., :60] = rotated(x, positions)[..., :60]
            return out

        report = conformance.check(f)
        assert report.codes == ["output-not-written"], report
        (finding,) = report.findings
        assert "q is NaN in channels 60 to 63 (counted from 0)" in finding.says
        assert finding.case == "1 head of 64 channels, 1 token"

    def test_in_some_sizes(self) -> None:
        """Without NaN in new memory, the result of the last call is found there."""

        def f(x: Tensor, positions: Tensor) -> Tensor:
            out = torch.empty_like(x)
            heads = x.shape[2] // 2 * 2 if x.shape[2] > 4 else x.shape[2]
            out[:, :, :heads] = rotated(x, positions)[:, :, :heads]
            return out

        (finding,) = conformance.check(f).findings
        assert (finding.code, finding.case) == ("output-not-written", "5 heads of 64 channels, 1 token")
        assert finding.says == "q is never written in head 4 (counted from 0)."

    @pytest.mark.parametrize(("again", "is_missing"), [(0.0, True), (math.nan, False)])
    def test_new_memory_may_hold_nan_of_earlier_calls(self, again: float, is_missing: bool) -> None:
        results = iter([math.nan, again, math.nan])
        (missing,) = unwritten(lambda: [torch.full((3,), next(results))])
        assert missing.tolist() == [is_missing] * 3

    def test_a_result_that_is_computed_from_nan_is_written(self) -> None:
        report = conformance.check(lambda x, positions: x * torch.nan)
        assert report.codes == ["not-finite"]

    def test_the_settings_of_torch_are_restored(self) -> None:
        conformance.check(rotated)
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.isnan(torch.zeros(3)).any()


class TestNotRepeatable:
    def test_other_bits(self) -> None:
        calls = itertools.count()

        def f(x: Tensor, positions: Tensor) -> Tensor:
            out = rotated(x, positions)
            if x.shape[2] > 2 and next(calls) % 3 == 0:
                out[:, 1, 2] = x[:, 1, 2]
            return out

        (finding,) = conformance.check(f, layout="bshd").findings
        assert (finding.code, finding.case) == ("not-repeatable", "3 heads of 64 channels, 2 tokens")

    def test_state_of_an_object_is_no_race(self) -> None:
        class Rotary:
            def __init__(self, dim: int) -> None:
                self.calls = 0

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                self.calls += 1
                return rotated(x, positions + self.calls)

        assert conformance.check(Rotary).codes == ["earlier-calls-matter"]
