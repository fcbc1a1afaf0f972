"""Format the facts of comparisons of engines and of configs as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk._checks import printable
from ropewalk.configs.explain import ranges
from ropewalk.engines import TRAINERS

_WIDTH = 100


@dataclass(frozen=True)
class Result:
    """The result of a comparison. `facts` is all of it as a dict of JSON values."""

    facts: Mapping[str, Any]


def engines_text(facts: Mapping[str, Any], *, verbose: bool) -> str:
    """Format the facts of a comparison of engines for a terminal. Sentences are wrapped, and tables are not."""
    head = f"{facts['source']} (model_type {facts['model_type']})"
    lines = [head, "", *left_out(facts), *_override(facts), *wrap(_verdict(facts), "")]
    versions = {entry["name"]: f"{entry['name']} {entry['version']}" for entry in facts["engines"]}
    if facts["not_compared"]:
        lines += wrap(f"Not compared: {'; '.join(facts['not_compared'])}.", "")
    for row in facts["ropes"]:
        window = "" if row["window"] is None else f", window of {row['window']:,} tokens"
        scheme = row["scheme"] + " in the file" * bool(facts["override"])
        lines += ["", f"{layers(row['layers'], facts['layers'])}: {scheme}{window}"]
        lines += [line for at in row["at"] for line in _table(at, row, versions)]
        lines += _refusals(row, versions)
        lines += _notes(row, versions) if verbose else _reasons(row)
    lines += section("beside the ropes", (f"{name}: {says}" for name, says in facts["beside"].items()))
    if verbose and (roundings := _roundings(facts, versions)):
        lines += ["", "how the engines round", *roundings]
    lines += section("warnings", (f"! {warning}" for warning in facts["warnings"]))
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
    if facts["unchanged"]:
        where = facts["source"].partition(": ")[2]
        outside = f", because those are in {where}" * (where.partition(".")[0] not in {"", *facts["override"]})
        said += f" It does not change the ropes of {_join_names(facts['unchanged'])}{outside}."
    return [*wrap(said, ""), ""] if facts["override"] else []


def wrap(text: str, indent: str) -> list[str]:
    """Wrap a text for a terminal. Lines after the first one are indented further if `indent` is not empty."""
    inner = f"{indent}  " if indent else ""
    found = textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=inner, break_long_words=False)
    return found or [""]


def bullets(items: Iterable[str], indent: str = "  ") -> list[str]:
    """Return sentences as indented, wrapped lines."""
    return [line for item in items for line in wrap(item, indent)]


def section(title: str, sentences: Iterable[str], indent: str = "  ") -> list[str]:
    """Return an empty line, a title, and sentences as indented, wrapped lines; [] if there are no sentences."""
    lines = bullets(sentences, indent)
    return ["", title, *lines] if lines else []


def layers(numbers: list[int], count: int) -> str:
    """Format the indices of some of the layers, such as "layers 0-31 of 32"."""
    return f"layer{'' if len(numbers) == 1 else 's'} {ranges(numbers)} of {count}"


def _verdict(facts: Mapping[str, Any]) -> str:
    if not facts["ropes"]:
        return "No layer rotates" + (" by the config." if facts["beside"] else ", so there is nothing to compare.")
    by_state: dict[str, list[str]] = {}
    for name, state in facts["states"].items():
        by_state.setdefault(state, []).append(name)
    same, count = by_state.get("same", []), len(facts["states"])
    first = next((row["compared_with"] for row in facts["ropes"] if row["compared_with"]), None)
    up_to = f"up to {facts['length']:,} tokens"
    sentences = []
    if len(same) == count > 1:
        all_of_them = "both" if count == 2 else f"all {count}"
        proviso = "if the same layers rotate, " if "which layers rotate" in facts["not_compared"] else ""
        trainers = {trainer.name for trainer in TRAINERS.values()}.intersection(same)
        what = " engines" if not trainers else " trainers" if len(trainers) == count else ""
        sentence = f"{proviso}{all_of_them}{what} rotate identically, {up_to}."
        return sentence[0].upper() + sentence[1:]
    if same and not by_state.keys() & {"differs", "refused"}:
        says = "runs this config" if len(same) == 1 else f"rotate identically, {up_to}"
        sentences.append(f"{_join_names(same)} {says}.")
    elif others := [name for name in same if name != first]:
        sentences.append(f"{_join_names(others)} agree{'s' if len(others) == 1 else ''} with {first}.")
    words = {
        "differs": (f"differs from {first}", f"differ from {first}"),
        "refused": ("does not run this config", "do not run this config"),
        "absent": (f"has no model {facts['model']}", f"have no model {facts['model']}"),
        "unknown": ("was not judged", "were not judged"),
    }
    found = [(by_state[state], forms) for state, forms in words.items() if state in by_state]
    sentences += [f"{_join_names(names)} {forms[len(names) > 1]}." for names, forms in found]
    return f"{' '.join(sentences)} The engines are configured for {facts['length']:,} tokens."


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(at: Mapping[str, Any], row: Mapping[str, Any], versions: Mapping[str, str]) -> Iterable[str]:
    if not at["engines"]:
        return []
    cells = [("engine", "attention factor", "frequencies")]
    judged = {entry["name"]: "" if entry["judged"] else " (not judged)" for entry in row["engines"]}
    by_verdict: dict[str, list[str]] = {}
    for name, entry in at["engines"].items():
        compared = entry["verdict"] is not None
        factor, pairs = f"{entry['attention_factor']:.6g}", frequencies(entry["apart"]) if compared else ""
        cells.append((versions[name] + judged[name], factor, pairs))
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


def _roundings(facts: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Return a table with the dtype of each step in each engine, for the first ropes that the engine runs.

    The list is empty if no engine runs a rope.
    """
    steps = ("angle", "table", "rotation")
    cells, notes = [("engine", "inv_freq", "angles", "cos and sin", "rotation", "known")], []
    for name, version in versions.items():
        of_rows = (found for row in facts["ropes"] for found in row["engines"] if found["name"] == name)
        found = next((one["rounding"] for one in of_rows if one["rounding"] is not None), None)
        if found is not None:
            inv_freq = f"{found['computed']} ({found['where']})"
            cells.append((version, inv_freq, *(found[step] for step in steps), _SEEN[found["evidence"]]))
            notes += [f"{name}: {found['notes']}"] if found["notes"] else []
    return [*_columns(cells), *bullets(notes)] if len(cells) > 1 else []


def _refusals(row: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    words = {"refused": "does not run it:", "absent": "", "unknown": "was not judged:"}
    stopped = [entry for entry in row["engines"] if entry["refused"]]
    lines = (f"{versions[entry['name']]} {words[entry['why']]} {entry['refused']}." for entry in stopped)
    return bullets(" ".join(line.split()) for line in lines)


_SEEN = {"run": "run", "read": "read, not run", "not recorded": "not recorded for this model"}
_DECIDED = {
    "nothing": "",
    "the call": " The length of each call decides.",
    "the setting": " The length that the engine is configured for decides.",
}


def _does(entry: Mapping[str, Any]) -> str:
    return (" ".join(entry["notes"]) + _DECIDED[entry["decided_by"]]).strip()


def _reasons(row: Mapping[str, Any]) -> list[str]:
    """Return what engines do that the config does not say: those that differ or were not judged, and the first one."""
    named = {name for at in row["at"] for name, found in at["engines"].items() if not found["apart"]["same"]}
    named |= {entry["name"] for entry in row["engines"] if not (entry["judged"] or entry["refused"])}
    named |= {row["compared_with"]} if named else set()
    found = (entry for entry in row["engines"] if entry["name"] in named and _does(entry))
    return section("  why:", (f"{entry['name']}: {_does(entry)}" for entry in found), "    ")


def _notes(row: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    running = [entry for entry in row["engines"] if not entry["refused"]]
    where = (f"{versions[entry['name']]} ({entry['source']}; {_SEEN[entry['seen']]})" for entry in running)
    does = (_does(entry) or "It follows the config." for entry in running)
    return section("  what each engine does", map(": ".join, zip(where, does, strict=True)))


def configs_text(facts: Mapping[str, Any]) -> str:
    """Format the facts of a comparison of two configs for a terminal."""
    first, second = facts["first"], facts["second"]
    lines = [f"first:  {_describe_source(first)}", f"second: {_describe_source(second)}", ""]
    lines += [*left_out(facts), _verdict_of_configs(facts)]
    for row in facts["layers"]:
        head = layers(row["layers"], min(facts["layer_counts"]))
        lines += ["", head, *map(_change, row["changed"]), *map(_difference, row["at"])]
    if facts["beside"]:
        lines += ["", "other differences", *map(_change, facts["beside"])]
    lines += ["", f"weights   {_weights(facts['weights'])}", f"KV cache  {_kv_cache(facts['kv_cache'])}"]
    for name in ("first", "second"):
        lines += [f"  ! {name}: {warning}" for warning in facts[name]["warnings"]]
    return "\n".join(map(printable, lines))


def _describe_source(about: Mapping[str, Any]) -> str:
    """Return the name of a config, its model_type and its length."""
    length = about["max_position_embeddings"]
    positions = "" if length is None else f", {length:,} positions"
    return f"{about['source']} (model_type {about['model_type']}{positions})"


def _verdict_of_configs(facts: Mapping[str, Any]) -> str:
    parts = []
    first_count, second_count = facts["layer_counts"]
    if first_count != second_count:
        parts.append(f"{second_count} layers instead of {first_count}")
    count, both = sum(len(row["layers"]) for row in facts["layers"]), min(first_count, second_count)
    if facts["layers"]:
        parts.append(f"{count} of {both} layers rotate differently")
    elif first_count != second_count:
        parts.append(f"the first {both} rotate identically" if both > 1 else "the first rotates identically")
    if facts["beside"]:
        parts.append("other properties of the attention differ")
    if not parts:
        return f"The same: all layers rotate identically, up to {facts['length']:,} tokens and beyond."
    return f"Different: {', '.join(parts)}."


def _change(change: Mapping[str, Any]) -> str:
    """Describe a property that two configs state differently."""
    name, first, second = change["what"], change["first"], change["second"]
    if name == "rotates":
        return "  rotated in the first config only" if first else "  rotated in the second config only"
    if name == "scaling":
        return f"  scaling: {_scheme(first)} → {_scheme(second)}"
    return f"  {name}: {_plain(first)} → {_plain(second)}"


def _scheme(facts: Mapping[str, Any]) -> str:
    parameters = ", ".join(f"{key} {_plain(v)}" for key, v in facts.items() if key != "rope_type" and v is not None)
    return f"{facts['rope_type']} ({parameters})" if parameters else str(facts["rope_type"])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | tuple) and len(value) > 4:
        return f"[{len(value)} numbers]"
    return "none" if value is None else str(value)


def _difference(difference: Mapping[str, Any]) -> str:
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
