"""Format the facts of `extend` for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ropewalk._checks import printable
from ropewalk.tools.diff.text import bullets, layers, left_out, section, wrap
from ropewalk.tools.extend.plan import MARGIN


def extended_text(facts: Mapping[str, Any]) -> str:
    """Format the facts for a terminal. Sentences are wrapped, and commands are not."""
    head = f"{facts['source']} (model_type {facts['model_type']}), to {facts['target']:,} tokens"
    lines = [head, "", *left_out(facts), *wrap(" ".join(_has(facts)), "")]
    if facts["plans"]:
        lines += ["", *wrap(" ".join(_proposal(facts)), "")]
        config = json.dumps(facts["plans"][0]["config"], indent=2).splitlines()[1:-1]
        instead = f", in place of {' and '.join(facts['replaces'])}" if facts["replaces"] else ""
        lines += ["", f"the config{instead}", *config]
    for row in facts["engines"]:
        how = "" if row["plan"] is None else " ({method}, factor {factor:g})".format_map(facts["plans"][row["plan"]])
        lines += ["", f"{row['name']} {row['version']}{how}"]
        lines += [f"  {command}" for command in row["commands"]]
        lines += bullets(row["notes"])
        if row["reads"]:
            unknown = "" if row["length"] else " Its limits of length were not looked up."
            lines += bullets([f"It reads these ropes from {row['reads']}.{unknown}"])
        elif not row["commands"]:
            first, *others = [f"{reason.removesuffix('.')}." for reason in row["why_not"]]
            lines += bullets([f"No command: {first}", *others])
        lines += [f"  For the length: {row['length']}"] * bool(row["length"])
    if any(row["commands"] or row["reads"] for row in facts["engines"]):
        lines += ["", *wrap(_CLAIM, "")]
    lines += section("warnings", (f"! {warning}" for warning in facts["warnings"]))
    return "\n".join(map(printable, lines))


def _has(facts: Mapping[str, Any]) -> list[str]:
    """Return what the config states about lengths, as sentences."""
    length, trained = f"{facts['stated_length']:,}", facts["trained_length"]
    scheme = f"scaled by {facts['scaling']}" if facts["scaling"] else "without scaling"
    before = "," if trained in (None, facts["stated_length"]) else f": it was trained for {trained:,} and is"
    said = [f"The config states {length} tokens{before} {scheme}."]
    if facts["reaches"]:
        said.append("It reaches the length as it is, so no scaling is added.")
    return said


def _proposal(facts: Mapping[str, Any]) -> list[str]:
    """Return what is proposed, and how sure that is, as sentences."""
    first, *others = facts["plans"]
    asked = facts["asked"]
    if not first["layers"]:
        return ["No layer rotates tokens beyond a window, so only the length changes."]
    words, who = _WORDS[first["method"]], facts["recommended_for"] if first["method"] == "yarn" else ""
    parts = [f"{words[0].upper()}{words[1:]} with factor {first['factor']:g}"]
    if len(first["layers"]) < facts["layers"]:
        parts.append(f" in {layers(first['layers'], facts['layers'])}, the others stay as they are")
    if asked["factor"] is None:
        parts.append(" (the ratio of the lengths)" if who else f" ({MARGIN:g} × the ratio of the lengths)")
    parts += [f", or {_WORDS[p['method']]} with factor {p['factor']:g} for engines without it" for p in others]
    said = ["".join([*parts, "."])]
    before = asked["original"] or (not facts["scaling"] and facts["trained_length"]) or facts["stated_length"]
    if asked["factor"] is None and who:
        said.append(f"The authors of {who} recommend this. --measure finds how far the model then reads.")
    elif asked["factor"] is None:
        said.append(
            "This factor is a rule from two small models at up to 4 times their length, which did not read to the end "
            "with the plain ratio. If the model card recommends numbers, take those. --measure finds the model's own."
        )
        more = facts["target"] / before
        said += [f"{more:.3g} times as long is more than that: prefer a checkpoint trained for it."] * (more > 4)
    elif not (facts["scaling"] or asked["original"]) and first["method"] in ("yarn", "llama3"):
        said.append(f"It counts from {before:,} tokens. If the model card does not, pass --original.")
    if facts["scaling"]:
        said.append("It replaces the scaling of the config.")
    return said


_WORDS = {
    "llama3": "Llama 3's scheme",
    "yarn": "YaRN",
    "linear": "linear scaling",
    "ntk": "a larger base (NTK)",
    "dynamic": "dynamic NTK",
}

_CLAIM = (
    "Each was checked with ropewalk's rules for the engine: with it, the engine has the ropes of the config, up to "
    "this length. No engine was run."
)
