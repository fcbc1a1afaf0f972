"""Format the facts of a comparison of engines as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ropewalk._checks import printable
from ropewalk.configs.explain import ranges
from ropewalk.engines import TRAINERS

_WIDTH = 100


def engines_text(facts: Mapping[str, Any]) -> str:
    """Format the facts of a comparison of engines for a terminal. Sentences are wrapped, and tables are not."""
    head = f"{facts['source']} (model_type {facts['model_type']})"
    lines = [head, "", *left_out(facts), *_override(facts), *wrap(_verdict(facts), "")]
    if facts["not_compared"]:
        lines += wrap(f"Not compared: {'; '.join(facts['not_compared'])}.", "")
    for row in facts["ropes"]:
        window = "" if row["window"] is None else f", window of {row['window']:,} tokens"
        lines += ["", f"{layers(row['layers'], facts['layers'])}: {row['scheme']}{window}"]
        lines += [line for at in row["at"] for line in _table(at, row, facts)]
        lines += _refusals(row, facts)
        lines += _notes(row, facts)
    if facts["query_scale"]:
        lines += ["", "the query scale (llama_4_scaling_beta)"]
        lines += bullets(f"{name} does not apply it: {why}." for name, why in facts["query_scale"].items())
    if roundings := _roundings(facts):
        lines += ["", "how the engines round", *roundings]
    if facts["warnings"]:
        lines += ["", "warnings", *bullets(f"! {warning}" for warning in facts["warnings"])]
    return "\n".join(map(printable, lines))


def left_out(facts: Mapping[str, Any]) -> list[str]:
    """Return a paragraph that names the keys that were ignored; [] if there are none."""
    keys = facts["ignored"]
    of = f"the config without {'it' if len(keys) == 1 else 'them'}"
    said = f"Left out, as asked: {', '.join(keys)}. All below is about {of}, and is no verdict about the file as it is."
    return [*wrap(said, ""), ""] if keys else []


def _override(facts: Mapping[str, Any]) -> list[str]:
    """Return a paragraph about the override with which the engines are started; [] if there is none."""
    said = f"Each engine is started with the override {json.dumps(facts['override'])}, which it applies in its own way."
    return [*wrap(said, ""), ""] if facts["override"] else []


def wrap(text: str, indent: str) -> list[str]:
    """Wrap a text for a terminal. Lines after the first one are indented further if `indent` is not empty."""
    inner = f"{indent}  " if indent else ""
    found = textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=inner, break_long_words=False)
    return found or [""]


def bullets(items: Iterable[str], indent: str = "  ") -> list[str]:
    """Return sentences as indented, wrapped lines."""
    return [line for item in items for line in wrap(item, indent)]


def layers(numbers: list[int], count: int) -> str:
    """Format the indices of some of the layers, such as "layers 0-31 of 32"."""
    return f"layer{'' if len(numbers) == 1 else 's'} {ranges(numbers)} of {count}"


def _name_and_version(entry: Mapping[str, Any]) -> str:
    return f"{entry['name']} {entry['version']}"


def _verdict(facts: Mapping[str, Any]) -> str:
    if not facts["ropes"]:
        return "No layer rotates, so there is nothing to compare."
    by_state: dict[str, list[str]] = {}
    for name, state in facts["states"].items():
        by_state.setdefault(state, []).append(name)
    same, count = by_state.get("same", []), len(facts["states"])
    first = next((row["compared_with"] for row in facts["ropes"] if row["compared_with"]), None)
    up_to = f"up to {facts['length']:,} tokens"
    sentences = []
    if len(same) == count == 1:
        return f"{same[0]} runs this config. No other engine was selected."
    if len(same) == count:
        all_of_them = "both" if count == 2 else f"all {count}"
        proviso = "if the same layers rotate, " if "which layers rotate" in facts["not_compared"] else ""
        trainers = {trainer.name for trainer in TRAINERS.values()}.intersection(same)
        what = " engines" if not trainers else " trainers" if len(trainers) == count else ""
        sentence = f"{proviso}{all_of_them}{what} rotate identically, {up_to}."
        return sentence[0].upper() + sentence[1:]
    if len(same) > 1 and not by_state.keys() & {"differs", "refused"}:
        sentences.append(f"{_join_names(same)} rotate identically, {up_to}.")
    elif others := [name for name in same if name != first]:
        sentences.append(f"{_join_names(others)} agree{_s(others)} with {first}.")
    if differ := by_state.get("differs"):
        sentences.append(f"{_join_names(differ)} differ{_s(differ)} from {first}.")
    if refuse := by_state.get("refused"):
        sentences.append(f"{_join_names(refuse)} do{'es' if len(refuse) == 1 else ''} not run this config.")
    if absent := by_state.get("absent"):
        sentences.append(f"{_join_names(absent)} {'has' if len(absent) == 1 else 'have'} no model {facts['model']}.")
    if unknown := by_state.get("unknown"):
        sentences.append(f"{_join_names(unknown)} {'was' if len(unknown) == 1 else 'were'} not judged.")
    return f"{' '.join(sentences)} The engines are configured for {facts['length']:,} tokens."


def _s(names: list[str]) -> str:
    return "s" if len(names) == 1 else ""


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(at: Mapping[str, Any], row: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    if not at["engines"]:
        return []
    cells = [("engine", "attention factor", "frequencies")]
    judged = {entry["name"]: "" if entry["judged"] else " (not judged)" for entry in row["engines"]}
    version = {entry["name"]: f"{_name_and_version(entry)}{judged[entry['name']]}" for entry in facts["engines"]}
    by_verdict: dict[str, list[str]] = {}
    for name, entry in at["engines"].items():
        compared = entry["verdict"] is not None
        cells.append(
            (version[name], f"{entry['attention_factor']:.6g}", frequencies(entry["apart"]) if compared else "")
        )
        if compared:
            by_verdict.setdefault(_describe(entry, at["sequence"]), []).append(f"{name}{judged[name]}")
    verdicts = [f"{_join_names(names)}: {verdict}." for verdict, names in by_verdict.items()]
    against = ["", f"  compared with {row['compared_with']}:", *bullets(verdicts, "    ")] if verdicts else []
    return ["", f"  a sequence of {at['sequence']:,} tokens:", *_columns(cells), *against]


def _describe(entry: Mapping[str, Any], sequence: int) -> str:
    """Describe the verdict about an engine."""
    verdict, apart = entry["verdict"], entry["apart"]
    if verdict["word"] == "different":
        if verdict["from_position"] is None:
            return f"different by less than bfloat16 rounds, up to {sequence:,} tokens"
        from_position = f"different from position {verdict['from_position']:,} on"
        return from_position if apart["channels"] else f"{from_position} by {scores(apart)}"
    if verdict["word"] == "equal up to rounding":
        return f"equal up to the rounding of {_join_names(verdict['steps'])}"
    same = "the same operations, but their bits were not recorded"
    return same if verdict["word"] == "same operations" else "bitwise equal"


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of a table as indented lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [f"  {row}".rstrip() for row in rows]


def frequencies(apart: Mapping[str, Any]) -> str:
    """Describe how the frequencies of two ropes differ."""
    if apart.get("channels"):
        return str(apart["channels"])
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
    if apart["same"] or apart.get("channels"):
        return "same" if apart["same"] else ""
    found, ratio = apart["scores"], apart["attention_factor_ratio"] ** 2
    if not apart["inv_freq"]["pairs_that_differ"]:
        return f"{ratio:.4g} times"
    return f"{found['largest_change']:.3g} at distance {found['at_distance']:,}"


def _roundings(facts: Mapping[str, Any]) -> list[str]:
    """Return a table with the dtype of each step in each engine, for the first ropes that the engine runs.

    The list is empty if no engine runs a rope.
    """
    steps = ("angle", "table", "rotation")
    cells, notes = [("engine", "inv_freq", "angles", "cos and sin", "rotation", "known")], []
    for entry in facts["engines"]:
        of_rows = (found for row in facts["ropes"] for found in row["engines"] if found["name"] == entry["name"])
        found = next((one["rounding"] for one in of_rows if one["rounding"] is not None), None)
        if found is not None:
            inv_freq = f"{found['computed']} ({found['where']})"
            cells.append(
                (_name_and_version(entry), inv_freq, *(found[step] for step in steps), _SEEN[found["evidence"]])
            )
            notes += [f"{entry['name']}: {found['notes']}"] if found["notes"] else []
    return [*_columns(cells), *bullets(notes)] if len(cells) > 1 else []


def _refusals(row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    version = {entry["name"]: _name_and_version(entry) for entry in facts["engines"]}
    words = {"refused": "does not run it:", "absent": "", "unknown": "was not judged:"}
    stopped = [entry for entry in row["engines"] if entry["refused"]]
    lines = (f"{version[entry['name']]} {words[entry['why']]} {entry['refused']}." for entry in stopped)
    return bullets(" ".join(line.split()) for line in lines)


_SEEN = {"run": "run", "read": "read, not run", "not recorded": "not recorded for this model"}
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
        notes = " ".join(entry["notes"]) + _DECIDED[entry["decided_by"]]
        where = f"{version[entry['name']]} ({entry['source']}; {_SEEN[entry['seen']]})"
        lines.append(f"{where}: {notes.strip() or 'It follows the config.'}")
    return ["", "  what each engine does", *bullets(lines)] if lines else []
