"""Check an implementation of rotary embeddings: call it, measure what it computes, and name its bugs."""

from ropewalk.tools.check.api import assert_right as assert_right
from ropewalk.tools.check.api import check as check
from ropewalk.tools.check.find.target import says_what_runs as says_what_runs
from ropewalk.tools.check.measure.structure import Structure as Structure
from ropewalk.tools.check.measure.structure import infer as infer
from ropewalk.tools.check.report import Finding as Finding
from ropewalk.tools.check.report import Grade as Grade
from ropewalk.tools.check.report import Report as Report
