"""Check an implementation of rotary embeddings: call it, measure what it computes, and name its bugs."""

from ropewalk.tools.check.api import assert_right, check
from ropewalk.tools.check.find.target import says_what_runs
from ropewalk.tools.check.measure.structure import Structure, infer
from ropewalk.tools.check.report import Finding, Grade, Report
from ropewalk.tools.check.verify import Held, Verified, verify

__all__ = [
    "Finding",
    "Grade",
    "Held",
    "Report",
    "Structure",
    "Verified",
    "assert_right",
    "check",
    "infer",
    "says_what_runs",
    "verify",
]
__dir__ = __all__.copy
