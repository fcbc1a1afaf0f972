"""Each file in `wrong` has the bug that its name states. `check` must report that bug first, and not after its repair.

Two underscores in the name of a file separate the bug from its variant. More than half of the files were written from
lists of known bugs, before the check existed.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from ropewalk import conformance
from ropewalk.tools.check.bugs import BUGS

FILES = sorted((Path(__file__).parent / "wrong").glob("*.py"))


def bug_of(path: Path) -> str:
    return path.stem.split("__")[0].replace("_", "-")


# Another bug that the file also has, or that `check` cannot distinguish from the first.
ALSO = {
    "strided-input": ["memory-overwritten"],  # what is written to other places than those of the view
    "not-repeatable": ["earlier-calls-matter"],  # the result that is unlike the others is also wrong
    "memory-overwritten": ["size-dependent", "heads-differ"],  # a head that is overwritten is wrong
}


# Files whose bug `check` does not name yet, and files whose repair it does not accept. A file that it does must be
# taken off.
WAITING: set[str] = {
    "output_not_written__key_heads_past_those_of_q",  # no model has more heads of k than of q
}
WAITING_REPAIRED: set[str] = {}


def cases(waiting: set[str]) -> list[Any]:
    late = [pytest.mark.xfail(strict=True)]
    return [pytest.param(path, id=path.stem, marks=late if path.stem in waiting else []) for path in FILES]


@pytest.mark.parametrize("path", cases(WAITING))
def test_the_bug_in_the_file_name_is_the_only_finding(path: Path) -> None:
    example = runpy.run_path(str(path))
    report = conformance.check(f"{path}:{example['TARGET']}", **example["GIVEN"])
    bug = bug_of(path)
    assert report.counted, str(report)
    assert report.counted[0].code == bug, str(report)
    assert report.verdict == ("wrong" if BUGS[bug].severity == "wrong" else "right")
    wrong = [finding.code for finding in report.counted if finding.severity == "wrong"]
    assert {*wrong[1:]} <= {*ALSO.get(bug, [])}


@pytest.mark.parametrize("path", cases(WAITING_REPAIRED))
def test_the_repaired_file_is_right(path: Path, tmp_path: Path) -> None:
    """REPAIR replaces the bug. Nothing may be reported then, but kernels for inference."""
    example = runpy.run_path(str(path))
    code, _, given = path.read_text("utf-8").partition("\nTARGET =")
    for broken, repaired in example["REPAIR"]:
        assert code.count(broken) == 1, broken
        code = code.replace(broken, repaired)
    (tmp_path / "repaired.py").write_text(f"{code}\nTARGET ={given}", "utf-8")
    report = conformance.check(f"{tmp_path / 'repaired.py'}:{example['TARGET']}", **example["GIVEN"])
    codes = {finding.code for finding in report.counted}
    assert codes <= {"no-gradient"} - {bug_of(path)}, str(report)


def test_later_calls_are_not_judged_if_earlier_calls_matter() -> None:
    path = Path(__file__).parent / "wrong" / "earlier_calls_matter__tables_cached_by_length.py"
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
    path = Path(__file__).parent / "wrong" / f"wrong_slice__{variant}.py"
    example = runpy.run_path(str(path))
    report = conformance.check(f"{path}:{example['TARGET']}", **example["GIVEN"])
    assert report.findings[0].says.endswith(pair)
    assert report.found["frequencies"] == frequencies


def test_number_of_files_and_bugs() -> None:
    assert len(FILES) >= 100
    assert len({bug_of(path) for path in FILES}) >= 50
