"""Count the graph breaks of the target under torch.compile."""

from __future__ import annotations

import warnings

import torch

from ropewalk.conformance.conditions import Baseline
from ropewalk.conformance.report import Report


def judge(baseline: Baseline, report: Report) -> None:
    """Count the graph breaks of one call. If the target is two functions, only the one that rotates is compiled."""
    subject = baseline.subject if baseline.subject.rebuild is None else baseline.subject.rebuild()
    positions = torch.arange(5)[None]
    q = subject.to_native(baseline.tensor(1, 5, 6, 1)).contiguous()
    function, arguments = subject.prepare(q, q.clone() if subject.has_k else None, positions)
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            explanation = torch._dynamo.explain(function)(**arguments)
    except Exception as e:  # Dynamo may raise anything on code that it cannot trace
        report.add("graph-break", f"The function cannot be traced: {type(e).__name__}: {str(e)[:150]}")
        return
    finally:
        torch.compiler.reset()
    breaks, reasons = explanation.graph_break_count, explanation.break_reasons
    if breaks:
        reason = str(reasons[0].reason).splitlines()[0] if reasons else "Dynamo gives no reason"
        report.add("graph-break", f"{breaks} graph break(s): {reason}.")
    report.grade("torch.compile", f"{explanation.graph_count} graph(s)", not breaks or None)
