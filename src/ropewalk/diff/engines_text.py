"""Format the facts of a comparison of engines as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ropewalk._checks import printable
from ropewalk.configs.explain import ranges


def engines_text(facts: Mapping[str, Any]) -> str:
    """Format the facts of a comparison of engines for a terminal."""
    lines = [f"{facts['source']} (model_type {facts['model_type']})", "", _verdict(facts)]
    for row in facts["ropes"]:
        lines += ["", f"{layers(row['layers'], facts['layers'])}: {row['scheme']}"]
        lines += [line for at in row["at"] for line in _table(at, row, facts)]
        lines += _refusals(row)
        lines += _notes(row, facts)
    if facts["query_scale"]:
        lines += ["", "the query scale (llama_4_scaling_beta)"]
        lines += [f"  {name} does not apply it: {why}" for name, why in facts["query_scale"].items()]
    lines += ["", "how cos and sin are computed"]
    width = max(len(_name_and_version(entry)) for entry in facts["engines"])
    lines += [f"  {_name_and_version(entry):<{width}}  {entry['table']}" for entry in facts["engines"]]
    if facts["warnings"]:
        lines += ["", "warnings", *(f"  ! {warning}" for warning in facts["warnings"])]
    return "\n".join(map(printable, lines))


def layers(numbers: list[int], count: int) -> str:
    """Format the indices of some of the layers, such as "layers 0-31 of 32"."""
    return f"layer{'' if len(numbers) == 1 else 's'} {ranges(numbers)} of {count}"


def _name_and_version(entry: Mapping[str, Any]) -> str:
    return f"{entry['name']} {entry['version']}"


def _verdict(facts: Mapping[str, Any]) -> str:
    if not facts["ropes"]:
        return "No layer rotates, so there is nothing to compare."
    if facts["agree"] and len(facts["engines"]) == 1:
        return f"{facts['engines'][0]['name']} runs this config. No other engine was selected."
    if facts["agree"]:
        return f"All {len(facts['engines'])} engines rotate identically, up to {facts['length']:,} tokens."
    by_state: dict[str, list[str]] = {}
    for engine in facts["engines"]:
        by_state.setdefault(_state(engine["name"], facts), []).append(engine["name"])
    first = next((row["compared_with"] for row in facts["ropes"] if row["compared_with"]), None)
    sentences = []
    if same := [name for name in by_state.get("same", []) if name != first]:
        sentences.append(f"{_join_names(same)} agree{'s' if len(same) == 1 else ''} with {first}.")
    if differ := by_state.get("differs"):
        sentences.append(f"{_join_names(differ)} differ{'s' if len(differ) == 1 else ''} from {first}.")
    if refuse := by_state.get("refuses"):
        sentences.append(f"{_join_names(refuse)} do{'es' if len(refuse) == 1 else ''} not run this config.")
    return f"{' '.join(sentences)} The engines are configured for {facts['length']:,} tokens."


def _state(name: str, facts: Mapping[str, Any]) -> str:
    if any(entry["name"] == name and entry["refused"] for row in facts["ropes"] for entry in row["engines"]):
        return "refuses"
    compared = [at["engines"][name] for row in facts["ropes"] for at in row["at"]]
    return (
        "same" if all(entry["apart"]["same"] for entry in compared) and name not in facts["query_scale"] else "differs"
    )


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(at: Mapping[str, Any], row: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    if not at["engines"]:
        return []
    head = ("engine", "attention factor", "frequencies", "scores, up to")
    version = {entry["name"]: _name_and_version(entry) for entry in facts["engines"]}
    cells = [
        (
            version[name],
            f"{entry['attention_factor']:.6g}",
            *(("", "") if name == row["compared_with"] else (frequencies(entry["apart"]), scores(entry["apart"]))),
        )
        for name, entry in at["engines"].items()
    ]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(4)]
    lines = [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        for line in (head, *cells)
    ]
    title = f"  a sequence of {at['sequence']:,} tokens, compared with {row['compared_with']}:"
    return ["", title, *(line.rstrip() for line in lines)]


def frequencies(apart: Mapping[str, Any]) -> str:
    """Describe how the frequencies of two ropes differ."""
    found = apart["inv_freq"]
    if not found["pairs_that_differ"]:
        return "same"
    side = "slower" if found["slower"] else "faster"
    by = "with frequency 0 in one of them" if found["times"] is None else f"at most {_times(found['times'])} {side}"
    count = found["pairs_that_differ"]
    return f"{count} pair{'' if count == 1 else 's'} differ{'s' if count == 1 else ''}, {by} (pair {found['pair']})"


def _times(ratio: float) -> str:
    return f"{(ratio - 1) * 100:.3g} %" if ratio < 1.5 else f"{ratio:.4g} times"


def scores(apart: Mapping[str, Any]) -> str:
    """Describe how the attention scores of two ropes differ."""
    if apart["same"]:
        return "same"
    found, ratio = apart["scores"], apart["attention_factor_ratio"] ** 2
    if not apart["inv_freq"]["pairs_that_differ"]:
        return f"{ratio:.4g} times"
    return f"{found['largest_change']:.3g} at distance {found['at_distance']:,}"


def _refusals(row: Mapping[str, Any]) -> list[str]:
    return [f"  {entry['name']} does not run it: {entry['refused']}." for entry in row["engines"] if entry["refused"]]


_DECIDED = {
    "nothing": "",
    "the call": " The length of each call decides.",
    "the setting": " The length that the engine is configured for decides.",
}


def _notes(row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    version = {entry["name"]: _name_and_version(entry) for entry in facts["engines"]}
    lines = []
    for entry in row["engines"]:
        if entry["refused"]:
            continue
        seen = "run" if entry["seen"] == "run" else "read, not run"
        notes = " ".join(entry["notes"]) + _DECIDED[entry["decided_by"]]
        lines.append(
            f"  {version[entry['name']]} ({entry['source']}; {seen}): {notes.strip() or 'It follows the config.'}"
        )
    return ["", "  what each engine does", *lines] if lines else []
