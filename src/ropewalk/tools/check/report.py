"""The report of a check: the bugs that it can name, findings and grades, as text and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["wrong", "caution"]


@dataclass(frozen=True)
class Bug:
    """A kind of bug.

    Args:
        title: what is wrong, in a few words.
        fix: how to fix it.
        severity: "wrong" if results are wrong, "caution" if they are right now but a common use makes them wrong.
    """

    title: str
    fix: str
    severity: Severity = "wrong"


BUGS: dict[str, Bug] = {
    "not-rotated": Bug("nothing is rotated", "Return the rotated tensors instead of the inputs."),
    "heads-taken-for-tokens": Bug(
        "the angles vary along the heads instead of along the tokens",
        "Read the number of tokens from the other axis of x.",
    ),
    "wrong-shape": Bug(
        "a call returns something else than one tensor of the shape of each input",
        "Return tensors of the same shape in every call.",
    ),
    "heads-differ": Bug("some heads are rotated differently", "Rotate all heads of a token by the same angles."),
    "query-and-key-crossed": Bug("q and k are returned in the wrong order", "Swap the two results."),
    "key-not-rotated": Bug("k is not rotated", "Rotate k by the same angles as q."),
    "not-a-rotation": Bug(
        "pairs are changed but not rotated",
        "Return (a cos − b sin, b cos + a sin), computing both from the input pair. rotate_half is cat(-x2, x1).",
    ),
    "mixed-pairings": Bug(
        "the two channels of a pair are rotated by different angles",
        "Use cat(f, f) for the tables of half pairing, and repeat_interleave for those of interleaved pairing.",
    ),
    "cos-and-sin-swapped": Bug("cos and sin are swapped", "Swap them where they are used or returned."),
    "rotates-backwards": Bug(
        "pairs are rotated by minus their angle",
        "Flip the sign of sin (or drop the conjugate): (a cos − b sin, b cos + a sin).",
    ),
    "rotated-twice": Bug("every pair is rotated by twice its angle", "Rotate in one place only."),
    "frequencies-reversed": Bug(
        "the slowest pair comes first", "Let the exponent grow with the index of the pair: base ** (-2i / dim)."
    ),
    "wrong-pairing": Bug(
        "the pairing is not the pairing of the weights",
        "Change the pairing in the code, or permute the rows of the q and k projections to match it.",
    ),
    "wrong-slice": Bug("the wrong channels are rotated", "Rotate the slice of the head that the config specifies."),
    "rest-not-passed": Bug("channels outside the rotated slice are changed", "Copy them to the output."),
    "key-unlike-query": Bug("k is rotated differently from q", "Use the same formula and the same tables for both."),
    "attention-factor": Bug(
        "cos and sin are multiplied by the wrong factor",
        "Multiply cos and sin by the attention factor once for q and once for k. The score then contains its square.",
    ),
    "base-ignored": Bug(
        "a second object ignores the base that was passed to it",
        "Make the base part of the key under which tables are cached.",
    ),
    "positions-off-by-one": Bug(
        "positions are off by one or more", "Start at 0: the first token has position 0 and is not rotated."
    ),
    "scaling-ignored": Bug("the scaling of the config has no effect", "Read rope_scaling (rope_parameters)."),
    "scaling-inverted": Bug("the scaling is applied in the wrong direction", "Divide the frequencies by the factor."),
    "ntk-exponent": Bug("NTK uses the wrong exponent", "Multiply the base by factor ** (dim / (dim - 2))."),
    "yarn-ramp-swapped": Bug(
        "YaRN's ramp is reversed", "Keep the fast pairs, and divide the frequencies of the slow pairs by the factor."
    ),
    "yarn-truncate": Bug(
        "the ends of YaRN's ramp are rounded although the config forbids it, or not rounded although it asks for it",
        "Round the lower end down and the upper end up, unless truncate is false.",
    ),
    "llama3-smooth-inverted": Bug(
        "Llama 3's ramp is reversed",
        "Multiply the unscaled frequency by smooth, and the frequency divided by the factor by 1 - smooth.",
    ),
    "frequencies-over-head-dim": Bug(
        "the exponents are divided by the size of the head instead of the rotated part",
        "Divide by rotary_dim: base ** (-2i / rotary_dim).",
    ),
    "wrong-exponent": Bug(
        "the exponents are divided by another size than the number of rotated channels",
        "Use base ** (-2i / dim) with i from 0 to dim/2 - 1.",
    ),
    "wrong-base": Bug(
        "the base is wrong",
        "Pass the base. In a config, read rope_theta (inside rope_parameters since transformers 5).",
    ),
    "length-ignored": Bug(
        "the scaling does not depend on the sequence length as it should",
        "Choose the factors by the length of the sequence, not by the position of each token.",
    ),
    "low-precision-frequencies": Bug("inv_freq is rounded to 16 bits", "Keep inv_freq in float32."),
    "low-precision-angles": Bug("the angles are rounded to 16 bits", "Multiply positions and inv_freq in float32."),
    "low-precision-tables": Bug("cos and sin are rounded to 16 bits", "Keep them in float32 if x is float32."),
    "low-precision-positions": Bug(
        "positions are rounded to 16 bits", "Keep positions as integers until they are multiplied."
    ),
    "wrong-frequencies": Bug("the frequencies are wrong", "Compare inv_freq with `ropewalk explain`."),
    "earlier-calls-matter": Bug(
        "the result depends on earlier calls", "Keep no state in forward that the arguments do not determine."
    ),
    "positions-ignored": Bug("the positions that are passed have no effect", "Gather the angles at positions."),
    "offset-ignored": Bug("the offset has no effect on the angles", "Count positions from the offset."),
    "rows-disturb-each-other": Bug(
        "the result for one row of the batch depends on the positions of another",
        "Make nothing depend on the largest position of the batch.",
    ),
    "first-row-positions": Bug(
        "all rows of the batch get the positions of the first", "Index the tables with the whole positions tensor."
    ),
    "rows-mixed-up": Bug(
        "rows of the batch get the positions of other rows",
        "If batch and seq are flattened, flatten positions in the same order.",
    ),
    "one-token-wrong": Bug("a single token is rotated by the wrong angle", "Use its position when decoding as well."),
    "batch-ignored": Bug("only the first row of the batch is right", "Rotate all rows."),
    "positions-restart": Bug("positions restart at some token", "Continue the count from chunk to chunk."),
    "table-wraps": Bug("positions past the end of the table wrap around", "Make the table longer, or raise."),
    "table-clamps": Bug("positions past the end of the table get its last row", "Make the table longer, or raise."),
    "unrotated-past-table": Bug("tokens past the end of the table are not rotated", "Make the table longer, or raise."),
    "zeros-past-table": Bug("tokens past the end of the table become zero", "Make the table longer, or raise."),
    "not-finite": Bug("the result is not finite", "Compute the angles in float32."),
    "wrong-far-positions": Bug(
        "tokens at large positions have wrong angles", "Compare the angles there with position times inv_freq."
    ),
    "grouped-heads": Bug(
        "k is wrong if it has fewer heads than q", "Rotate every head of k, and keep the number of heads."
    ),
    "strided-input": Bug(
        "the result for non-contiguous views is wrong", "Use the strides of the tensor, or copy it first."
    ),
    "input-changed": Bug(
        "the input is overwritten", "Work on a copy. `contiguous` and `reshape` may return the same memory."
    ),
    "positions-changed": Bug("the positions that are passed are overwritten", "Work on a copy of positions."),
    "wrong-output-dtype": Bug("the output has another dtype than the input", "Cast the result back: `.type_as(x)`."),
    "no-gradient": Bug("the gradient, or a part of it, does not reach the input", "Remove `detach` and `no_grad`."),
    "wrong-gradient": Bug("the gradient is wrong", "Rotate the gradient by minus the angle."),
    "raises": Bug("a call that models make raises", "Read the message. No wrong result is returned.", "caution"),
    "wider-output": Bug(
        "the output has a wider dtype than the input",
        "Cast the result back: `.type_as(x)`. If the caller does so, pass --ignore wider-output.",
        "caution",
    ),
    "output-order": Bug(
        "channels are written in another order than they were read",
        "Write each pair where it was read (stack, not cat). Scores are right only if q and k share the order.",
        "caution",
    ),
    "graph-break": Bug("torch.compile breaks the graph", "Do not read tensor values in Python.", "caution"),
    "lost-by-half": Bug(
        ".bfloat16() or .half() on the module rounds its angles",
        "Keep inv_freq out of the buffers, or recompute it in float32 in forward.",
        "caution",
    ),
    "lost-by-autocast": Bug(
        "the angles are rounded under torch.autocast",
        "Multiply positions and inv_freq elementwise, or disable autocast around it. Autocast rounds matrix products.",
        "caution",
    ),
    "lost-on-meta": Bug(
        "a module created on the meta device has no angles after the checkpoint is loaded",
        "Compute the table in forward, or fill the buffer again after loading.",
        "caution",
    ),
}
"""Code → bug. A bug is listed, and reported, before the bugs that it can cause."""

_ORDER = {code: rank for rank, code in enumerate(BUGS)}
# A code that only the scheme of a rope knows (`Scaling.known_bugs`). What was seen says more.
_OF_THE_SCHEME = Bug(
    "the frequencies are those of a mistake that their scheme knows", "Compute those of `rope.inv_freq`."
)

Verdict = Literal["right", "wrong"]


@dataclass(frozen=True)
class Finding:
    """A bug, or a caution, that `check` has found.

    Args:
        code: the code of the bug: a key of `BUGS`, or one of the scheme's own.
        says: what was seen, in one sentence.
    """

    code: str
    says: str

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
    """

    target: str
    found: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    grades: list[Grade] = field(default_factory=list)
    ignored: frozenset[str] = frozenset()

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

    def add(self, code: str, says: str) -> None:
        """Add a finding, unless the report already has one with this code."""
        if code not in self.codes:
            self.findings.append(Finding(code, says))
            self.findings.sort(key=lambda f: (f.severity != "wrong", _ORDER.get(f.code, len(_ORDER))))

    def drop(self, *codes: str) -> None:
        """Remove the findings with these codes, because another finding explains them."""
        self.findings = [finding for finding in self.findings if finding.code not in codes]

    def grade(self, name: str, says: str, right: bool | None = None, number: float | None = None) -> None:
        """Add the result of one test."""
        self.grades.append(Grade(name, says, right, number))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            "target": self.target,
            "verdict": self.verdict,
            "found": self.found,
            "findings": [
                {
                    "code": f.code,
                    "severity": f.severity,
                    "ignored": f.code in self.ignored,
                    "title": f.bug.title,
                    "says": f.says,
                    "fix": f.bug.fix,
                }
                for f in self.findings
            ],
            "grades": [asdict(grade) for grade in self.grades],
        }

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.verdict}"]
        for finding in self.findings:
            bug = finding.bug
            lines += [
                "",
                f"{'IGNORED' if finding.code in self.ignored else bug.severity.upper()}  {finding.code}: {bug.title}",
                f"    {finding.says}",
                f"    How to fix it: {bug.fix}",
            ]
        width = max((len(name) for name in [*self.found, *(g.name for g in self.grades)]), default=0)
        lines += ["", "What it computes", *(f"  {name:<{width}}  {value}" for name, value in self.found.items())]
        marks = {True: "ok", False: "WRONG", None: "-"}
        lines += ["", "What was tried", *(f"  {g.name:<{width}}  {marks[g.right]:<5}  {g.says}" for g in self.grades)]
        return "\n".join(lines)
