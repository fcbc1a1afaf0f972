"""What a check found: lines for people, plain data for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ropewalk.conformance.bugs import BUGS, ORDER

Verdict = Literal["right", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        code: its name in `bugs.BUGS`.
        says: what was seen, in one sentence.
    """

    code: str
    says: str

    @property
    def severity(self) -> str:
        """ "wrong" or "caution"."""
        return BUGS[self.code].severity


@dataclass(frozen=True)
class Grade:
    """One thing that was tried.

    Args:
        name: what it was.
        says: what came out.
        right: whether that is as it should be; None where nothing is wrong and something is to be known.
        number: the largest error of cos and sin, where that was measured.
    """

    name: str
    says: str
    right: bool | None = None
    number: float | None = None


@dataclass
class Report:
    """What `check` found.

    Args:
        target: what was checked.
        found: what it does: pairing, base, layout and so on.
        findings: what is wrong, the most telling first.
        grades: what was tried, with numbers.
    """

    target: str
    found: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    grades: list[Grade] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """ "wrong" if anything is wrong now; cautions do not count."""
        return "wrong" if any(one.severity == "wrong" for one in self.findings) else "right"

    @property
    def codes(self) -> list[str]:
        """The codes of all findings."""
        return [one.code for one in self.findings]

    def add(self, code: str, says: str) -> None:
        """Note a finding, once for each code."""
        if code not in self.codes:
            self.findings.append(Finding(code, says))
            self.findings.sort(key=lambda one: (one.severity != "wrong", ORDER[one.code]))

    def drop(self, *codes: str) -> None:
        """Forget findings that another one explains."""
        self.findings = [one for one in self.findings if one.code not in codes]

    def grade(self, name: str, says: str, right: bool | None = None, number: float | None = None) -> None:
        """Note what was tried."""
        self.grades.append(Grade(name, says, right, number))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "target": self.target,
            "verdict": self.verdict,
            "found": self.found,
            "findings": [
                {
                    "code": f.code,
                    "severity": f.severity,
                    "title": BUGS[f.code].title,
                    "says": f.says,
                    "fix": BUGS[f.code].fix,
                }
                for f in self.findings
            ],
            "grades": [asdict(grade) for grade in self.grades],
        }

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.verdict}"]
        for one in self.findings:
            bug = BUGS[one.code]
            lines += [
                "",
                f"{one.severity.upper()}  {one.code}: {bug.title}",
                f"    {one.says}",
                f"    What to do: {bug.fix}",
            ]
        width = max((len(name) for name in [*self.found, *(g.name for g in self.grades)]), default=0)
        lines += ["", "What it does", *(f"  {name:<{width}}  {value}" for name, value in self.found.items())]
        marks = {True: "ok", False: "WRONG", None: "-"}
        lines += ["", "What was tried", *(f"  {g.name:<{width}}  {marks[g.right]:<5}  {g.says}" for g in self.grades)]
        return "\n".join(lines)
