"""The report of a check: findings and grades, as text and as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ropewalk.tools.check.bugs import BUGS, Bug
from ropewalk.tools.check.find.memory import CallError

_ORDER = {code: rank for rank, code in enumerate(BUGS)}
# A code that only the scheme of a rope knows (`Scaling.known_bugs`). What was seen says more.
_OF_THE_SCHEME = Bug("the frequencies are those of a mistake that their scheme knows", "Take those of `rope.inv_freq`.")

Verdict = Literal["right", "wrong"]


@dataclass(frozen=True)
class Finding:
    """A bug, or a caution, that `check` has found.

    Args:
        code: the code of the bug: a key of `BUGS`, or one of the scheme's own.
        says: what was seen, in one sentence.
        case: the smallest case at which it shows, such as "3 heads of 80 channels, 1 token". None if it shows in every
            call, or if only `says` can describe the case.
    """

    code: str
    says: str
    case: str | None = None

    @property
    def bug(self) -> Bug:
        """What is known of bugs with this code."""
        return BUGS.get(self.code, _OF_THE_SCHEME)

    @property
    def severity(self) -> str:
        """The severity of the bug: "wrong" or "caution"."""
        return self.bug.severity


@dataclass(frozen=True)
class Grade:
    """The result of one test.

    Args:
        name: what was tested.
        says: the result, in words.
        right: whether the result is right. None if it is neither right nor wrong, but worth knowing.
        number: the largest error of cos and sin, if it was measured.
    """

    name: str
    says: str
    right: bool | None = None
    number: float | None = None


@dataclass
class Report:
    """The result of `check`. `str(report)` is the report as text.

    Args:
        target: the name of the target.
        found: what the target computes: pairing, frequencies, layout and so on.
        findings: bugs before cautions, and causes before their effects.
        grades: the tests that were run, and their results.
        ignored: the codes that the user accepts. Their findings are reported, and do not count.
        untried: the parameters of decoding, such as a cache, that were not passed, so that decoding was not tried.
    """

    target: str
    found: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    grades: list[Grade] = field(default_factory=list)
    ignored: frozenset[str] = frozenset()
    untried: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """ "wrong" if the severity of any finding that counts is "wrong", else "right". Cautions do not count."""
        return "wrong" if any(finding.severity == "wrong" for finding in self.counted) else "right"

    @property
    def counted(self) -> list[Finding]:
        """The findings whose codes are not ignored."""
        return [finding for finding in self.findings if finding.code not in self.ignored]

    @property
    def codes(self) -> list[str]:
        """The codes of all findings."""
        return [finding.code for finding in self.findings]

    def add(self, code: str, says: str, case: str | None = None) -> None:
        """Add a finding, unless the report already has one with this code."""
        if code not in self.codes:
            self.findings.append(Finding(code, says, case))
            self.findings.sort(key=lambda f: (f.severity != "wrong", _ORDER.get(f.code, len(_ORDER))))

    def drop(self, *codes: str) -> None:
        """Remove the findings with these codes, because another finding explains them."""
        self.findings = [finding for finding in self.findings if finding.code not in codes]

    def grade(self, name: str, says: str, right: bool | None = None, number: float | None = None) -> None:
        """Add the result of one test."""
        self.grades.append(Grade(name, says, right, number))

    def test(self, name: str, run: Callable[[], bool | str], *, may_raise: bool = False) -> None:
        """Run one test, and grade it by the findings that it adds, or by the sentence that it returns.

        It returns False if the target does not support it. It is a caution that the target raises, unless it may.
        """
        before = [*self.findings]
        try:
            supported = run()
        except CallError as e:
            supported = f"{e}"
            if e.code != "raises" or not may_raise:
                self.add(e.code, f"In the test of {name}: {e}.")
        new = [finding for finding in self.findings if finding not in before]
        if new:
            is_wrong = any(f.severity == "wrong" and f.code not in self.ignored for f in new)
            self.grade(name, new[-1].says, False if is_wrong else None)
        elif isinstance(supported, str):
            self.grade(name, supported)
        elif supported:
            self.grade(name, "as expected", True)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            "target": self.target,
            "verdict": self.verdict,
            "untried": self.untried,
            "found": self.found,
            "findings": [asdict(f) | asdict(f.bug) | {"ignored": f.code in self.ignored} for f in self.findings],
            "grades": [asdict(grade) for grade in self.grades],
        }

    def __str__(self) -> str:
        untried = f", but decoding was not tried (not passed: {', '.join(self.untried)})" if self.untried else ""
        untried = ", but its tables were not judged" if "tables" in self.found else untried
        lines = [f"{self.target}: {self.verdict}{untried}"]
        for finding in self.findings:
            bug = finding.bug
            lines += [
                "",
                f"{'IGNORED' if finding.code in self.ignored else bug.severity.upper()}  {finding.code}: {bug.title}",
                f"    {finding.says}",
                *([] if finding.case is None else [f"    Smallest case: {finding.case}."]),
                *([f"    How to fix it: {bug.fix}"] if bug.fix else []),
            ]
        width = max((len(name) for name in [*self.found, *(g.name for g in self.grades)]), default=0)
        lines += ["", "What it computes", *(f"  {name:<{width}}  {value}" for name, value in self.found.items())]
        marks = {True: "ok", False: "WRONG", None: "-"}
        lines += ["", "What was tried", *(f"  {g.name:<{width}}  {marks[g.right]:<5}  {g.says}" for g in self.grades)]
        return "\n".join(lines)
