"""Check an implementation of rotary embeddings: call it, measure what it computes, and name its bugs."""

from ropewalk.conformance.api import assert_right as assert_right
from ropewalk.conformance.api import check as check
from ropewalk.conformance.report import Finding as Finding
from ropewalk.conformance.report import Grade as Grade
from ropewalk.conformance.report import Report as Report
from ropewalk.conformance.target import says_what_runs as says_what_runs
