"""Whether torch.compile takes the function as one graph."""

from __future__ import annotations

import warnings

import torch

from ropewalk.conformance.conditions import Known
from ropewalk.conformance.report import Report


def judge(known: Known, report: Report) -> None:
    """Count the graph breaks of one call; of tables and function, those of the function."""
    subject = known.subject if known.subject.fresh is None else known.subject.fresh()
    positions = torch.arange(5)[None]
    q = subject.native(known.tensor(1, 5, 6, 1)).contiguous()
    function, given = subject.prepared(q, q.clone() if subject.has_k else None, positions)
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = torch._dynamo.explain(function)(**given)
    except Exception as e:  # whatever Dynamo raises for their function
        report.add("graph-break", f"It cannot be traced: {type(e).__name__}: {str(e)[:150]}")
        return
    finally:
        torch.compiler.reset()
    breaks = said.graph_break_count
    if breaks:
        reason = str(said.break_reasons[0].reason).splitlines()[0] if said.break_reasons else "Dynamo gives no reason"
        report.add("graph-break", f"{breaks} graph break(s): {reason}.")
    report.grade("torch.compile", f"{said.graph_count} graph(s)", not breaks or None)
