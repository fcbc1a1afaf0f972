"""Each program has the bug that its name states. `check` must report that bug first, and not after its repair.

A program is a file in `wrong`, or one in `right` in which the replacements in its `BUGS` were made. Two underscores in
the name separate the bug from its variant. Most files in `wrong` were written from lists of known bugs, before the
check existed.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk import conformance
from ropewalk.tools.check.bugs import BUGS
from ropewalk.tools.check.find.form import Form
from wrong_programs import FILES, HERE, PROGRAMS, replaced, written


def bug_of(name: str) -> str:
    return name.split("__")[0].replace("_", "-")


# Another bug that the file also has, or that `check` cannot distinguish from the first.
ALSO = {
    "strided-input": ["memory-overwritten"],  # what is written to other places than those of the view
    "not-repeatable": ["earlier-calls-matter"],  # the result that is unlike the others is also wrong
    "memory-overwritten": ["size-dependent", "heads-differ"],  # a head that is overwritten is wrong
}


# Programs whose bug `check` does not name yet, and files whose repair it does not accept. One that it does must be
# taken off.
WAITING: set[str] = {
    "output_not_written__key_heads_past_those_of_q",  # no model has more heads of k than of q
}
WAITING_REPAIRED: set[str] = set()


def cases(programs: Iterable[str], waiting: set[str]) -> list[Any]:
    late = [pytest.mark.xfail(strict=True)]
    return [pytest.param(name, marks=late if name in waiting else []) for name in sorted(programs)]


def checked(path: Path) -> conformance.Report:
    example = runpy.run_path(str(path))
    return conformance.check(f"{path}:{example['TARGET']}", **example["GIVEN"])


@pytest.mark.parametrize("name", cases(PROGRAMS, WAITING))
def test_the_bug_in_the_name_is_the_only_finding(name: str, tmp_path: Path) -> None:
    report, bug = checked(written(PROGRAMS[name], tmp_path)), bug_of(name)
    assert report.counted, str(report)
    assert report.counted[0].code == bug, str(report)
    assert report.verdict == ("wrong" if BUGS[bug].severity == "wrong" else "right")
    wrong = [finding.code for finding in report.counted if finding.severity == "wrong"]
    assert {*wrong[1:]} <= {*ALSO.get(bug, [])}


@pytest.mark.parametrize("name", cases(FILES, WAITING_REPAIRED))
def test_the_repaired_file_is_right(name: str, tmp_path: Path) -> None:
    """REPAIR replaces the bug. Nothing may be reported then, but kernels for inference."""
    code, _, given = FILES[name].partition("\nTARGET =")
    repair = runpy.run_path(str(HERE / "wrong" / f"{name}.py"))["REPAIR"]
    report = checked(written(f"{replaced(code, repair)}\nTARGET ={given}", tmp_path))
    codes = {finding.code for finding in report.counted}
    assert codes <= {"no-gradient"} - {bug_of(name)}, str(report)


IN_16_BITS = (
    "axes_exchanged__grid heads_differ key_not_rotated low_precision_angles mixed_pairings "
    "positions_off_by_one__documents_of_a_row positions_restart query_and_key_crossed "
    "rotates_backwards__conjugate scaling_inverted segments_ignored__boundary_of_the_previous "
    "size_dependent__blocks_of_eight_heads table_wraps wrong_base wrong_gradient__only_of_the_keys "
    "wrong_pairing__vllm_49290 wrong_slot__values_in_the_order_of_tokens R:norm_over_all_heads R:dynamic_ntk "
    "R:axes_in_the_names R:norm_in_place_with_a_right_backward"
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", IN_16_BITS.split())
def test_code_that_takes_one_dtype_of_16_bits(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(form: Form, q: torch.Tensor, *args: Any, **options: Any) -> Any:
        if q.dtype != dtype:
            raise TypeError(f"unsupported dtype {q.dtype}")
        return of_any_dtype(form, q, *args, **options)

    of_any_dtype = Form.run
    monkeypatch.setattr(Form, "run", run)
    is_right = name.startswith("R:")
    report = checked(HERE / "right" / f"{name[2:]}.py" if is_right else written(PROGRAMS[name], tmp_path))
    assert report.codes == [] if is_right else bug_of(name) in report.codes[:1], str(report)
    assert report.found["dtype"].startswith(f"{dtype}".removeprefix("torch."))


def test_a_float_that_does_not_copy_is_right_in_16_bits(tmp_path: Path) -> None:
    for name, says in (
        ("channel_overwritten__float_does_not_copy", "With float16 tensors it rotates"),
        ("not_a_rotation__only_first_half", "for any one angle."),
    ):
        (found,) = checked(written(PROGRAMS[name], tmp_path)).findings
        assert says in found.says
        assert ("float16" in found.says) == name.startswith("channel")


def test_a_norm_with_another_eps(tmp_path: Path) -> None:
    (found,) = checked(written(PROGRAMS["wrong_norm__eps_of_the_keys"], tmp_path)).findings
    assert found.says == "The norm of k is taken with another eps than the one that is passed."


def test_later_calls_are_not_judged_if_earlier_calls_matter(tmp_path: Path) -> None:
    path = written(PROGRAMS["earlier_calls_matter__tables_cached_by_length"], tmp_path)
    report = conformance.check(f"{path}:Rotary")
    assert report.codes == ["earlier-calls-matter"]
    assert [grade.name for grade in report.grades if grade.right is False] == ["earlier calls"]
    (views,) = [grade for grade in report.grades if grade.name == "views"]
    assert views.right is None
    assert views.says.startswith("not judged: ")


@pytest.mark.parametrize(
    ("variant", "pair", "frequencies"),
    [
        ("pairs_of_the_whole_head", "Channel 0 rotates with 32 instead of 16.", "base 100000000 and exponents 2i/64"),
        ("of_a_proportional_rope", "Channel 0 rotates with 8 instead of 32.", "base 31.623"),
    ],
)
def test_a_wrong_slice_is_described_by_its_first_pair(variant: str, pair: str, frequencies: str) -> None:
    path = HERE / "wrong" / f"wrong_slice__{variant}.py"
    example = runpy.run_path(str(path))
    report = conformance.check(f"{path}:{example['TARGET']}", **example["GIVEN"])
    assert report.findings[0].says.endswith(pair)
    assert report.found["frequencies"] == frequencies


def test_the_first_pair_of_k_that_differs_is_named(tmp_path: Path) -> None:
    report = checked(written(PROGRAMS["key_unlike_query__last_channels_of_a_wider_head"], tmp_path))
    says = "Pair 0 of k is read from channels 42 and 53, and that of q read from 0 and 11."
    assert report.findings[0].says == says


def test_a_base_that_is_never_read_is_named(tmp_path: Path) -> None:
    report = checked(written(PROGRAMS["wrong_base__never_read"], tmp_path))
    assert report.findings[0].says == "The base is 10000 instead of 500000. The code never reads rope_theta."
    assert report.found["never read"] == "rope_theta"


def test_number_of_programs_and_bugs() -> None:
    assert len(PROGRAMS) >= 240
    assert len({bug_of(name) for name in PROGRAMS}) >= 50
