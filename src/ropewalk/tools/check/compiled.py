"""Count the graph breaks of the target under torch.compile."""

from __future__ import annotations

import torch

from ropewalk import _checks
from ropewalk.tools.check.baseline import Baseline


def judge(baseline: Baseline) -> None:
    """Count the graph breaks of one call. If the target is two functions, only the one that rotates is compiled."""
    subject, report = baseline.new_subject(), baseline.report
    q = subject.to_native(baseline.tensor(1, 5, 6, 1)).contiguous()
    function, arguments = subject.prepare(q, q.clone() if subject.has_k else None, torch.arange(5)[None])
    torch.compiler.reset()
    try:
        explanation = torch._dynamo.explain(function)(**arguments)
    except Exception as e:  # Dynamo may raise anything on code that it cannot trace
        says = f"The function cannot be traced: {type(e).__name__}: {_checks.message_of(e)[:150]}"
        report.add("graph-break", says)
        return
    finally:
        torch.compiler.reset()
    breaks, reasons = explanation.graph_break_count, explanation.break_reasons
    if breaks:
        reason = str(reasons[0].reason).splitlines()[0] if reasons else "Dynamo gives no reason"
        report.add("graph-break", f"{breaks} graph break(s): {reason}.")
    report.grade("torch.compile", f"{explanation.graph_count} graph(s)", not breaks or None)
