"""Format the facts of a comparison of two configs as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk._checks import printable
from ropewalk.tools.diff.engines_text import frequencies, layers, left_out, scores


def configs_text(facts: Mapping[str, Any]) -> str:
    """Format the facts of a comparison of two configs for a terminal."""
    first, second = facts["first"], facts["second"]
    lines = [f"first:  {describe_source(first)}", f"second: {describe_source(second)}", ""]
    lines += [*left_out(facts), _verdict(facts)]
    for row in facts["layers"]:
        lines += ["", layers(row["layers"], min(facts["layer_counts"]))]
        lines += [f"  {describe_change(change)}" for change in row["changed"]]
        lines += [describe_difference(difference) for difference in row["at"]]
    if facts["beside"]:
        lines += ["", "other differences", *(f"  {describe_change(change)}" for change in facts["beside"])]
    lines += ["", f"weights   {_weights(facts['weights'])}", f"KV cache  {_kv_cache(facts['kv_cache'])}"]
    for name in ("first", "second"):
        lines += [f"  ! {name}: {warning}" for warning in facts[name]["warnings"]]
    return "\n".join(map(printable, lines))


def describe_source(about: Mapping[str, Any]) -> str:
    """Return the name of a config, its model_type and its length."""
    length = about["max_position_embeddings"]
    positions = "" if length is None else f", {length:,} positions"
    return f"{about['source']} (model_type {about['model_type']}{positions})"


def _verdict(facts: Mapping[str, Any]) -> str:
    parts = []
    first_count, second_count = facts["layer_counts"]
    if first_count != second_count:
        parts.append(f"{second_count} layers instead of {first_count}")
    if facts["layers"]:
        count = sum(len(row["layers"]) for row in facts["layers"])
        parts.append(f"{count} of {min(first_count, second_count)} layers rotate differently")
    if facts["beside"]:
        parts.append("other properties of the attention differ")
    if not parts:
        return f"The same: all layers rotate identically, up to {facts['length']:,} tokens and beyond."
    return f"Different: {', '.join(parts)}."


def describe_change(change: Mapping[str, Any]) -> str:
    """Describe a property that two configs state differently."""
    name, first, second = change["what"], change["first"], change["second"]
    if name == "rotates":
        return "rotated in the first config only" if first else "rotated in the second config only"
    if name == "scaling":
        return f"scaling: {_scheme(first)} → {_scheme(second)}"
    return f"{name}: {_plain(first)} → {_plain(second)}"


def _scheme(facts: Mapping[str, Any]) -> str:
    parameters = ", ".join(f"{key} {_plain(v)}" for key, v in facts.items() if key != "rope_type" and v is not None)
    return f"{facts['rope_type']} ({parameters})" if parameters else str(facts["rope_type"])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | tuple) and len(value) > 4:
        return f"[{len(value)} numbers]"
    return "none" if value is None else str(value)


def describe_difference(difference: Mapping[str, Any]) -> str:
    """Describe how two ropes differ at one length."""
    ratio = difference["attention_factor_ratio"]
    factor = "same" if abs(ratio - 1) < 1e-9 else f"{ratio:.6g} times"
    return (
        f"  at {difference['sequence']:,} tokens: frequencies {frequencies(difference)}; attention factor {factor}; "
        f"scores {'' if difference['same'] else 'up to '}{scores(difference)}"
    )


def _weights(facts: Mapping[str, Any]) -> str:
    if facts["permute"]:
        return f"must be permuted (q and k): {facts['why']}."
    return f"{'fit unchanged' if facts['fit'] else 'do not fit'}: {facts['why']}."


def _kv_cache(facts: Mapping[str, Any]) -> str:
    if facts["rescale"] is not None:
        return f"fits after the rotated channels of its keys are multiplied by {facts['rescale']:.6g}: {facts['why']}."
    return f"{'fits unchanged' if facts['fit'] else 'does not fit'}: {facts['why']}."
