"""Format the facts about the ropes of a model (`ModelRopes.facts`) as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any

from ropewalk._checks import printable


def text(info: dict[str, Any]) -> str:
    """Format the result of `ModelRopes.facts` as lines for a terminal."""
    lines = [f"{info['source']} (model_type {info['model_type']})"]
    for group in info["ropes"]:
        lines += ["", f"layers {ranges(group['layers'])} of {info['layers']}"]
        lines += ["  no rotation"] if group["rope"] is None else _rope_lines(group["rope"], info)
    for name, rope in info["others"].items():
        if name != "indexer":
            lines += ["", f"another rope: {name}", *_rope_lines(rope, {**info, "trained_length": None})]
        else:
            lines += ["", f"a second rope in each layer: {name}", *_rope_lines(rope, info)]
    lines += [] if info["vision"] is None else _vision_lines(info["vision"])
    lines += _other_lines(info)
    if info["origins"] or info["vision"] is None:
        lines += _origin_lines("where each value came from", info["origins"])
    if info["vision"] is not None:
        lines += _origin_lines("where each value of the vision tower came from", info["vision"]["origins"])
    if info["warnings"]:
        lines += ["", "warnings", *(f"  ! {warning}" for warning in info["warnings"])]
    return "\n".join(map(printable, lines))  # names in a file may contain terminal escape sequences


def _origin_lines(heading: str, origins: dict[str, str]) -> list[str]:
    width = max(map(len, origins), default=0)
    return ["", heading, *(f"  {name:<{width}}  {where}" for name, where in origins.items())]


def _vision_lines(vision: dict[str, Any]) -> list[str]:
    lines = ["", f"vision tower (model_type {vision['model_type']}; {vision['source']})"]
    lines += [f"  {'positions':<16}  {vision['positions']}"]
    count = len(vision["ropes"])
    for number, rope in enumerate(vision["ropes"], 1):
        if count > 1:
            lines += ["", f"vision tower, rope {number} of {count}, which are applied one after another"]
        lines += _rope_lines(rope, {**vision, "heads": None, "trained_length": None, "length": None})
    return lines


def _other_lines(info: dict[str, Any]) -> list[str]:
    """Describe what an architecture does in addition to the rotation of q and k, such as scaling q."""
    lines = []
    if info["softmax_factor"] != 1.0:
        lines.append(f"  the softmax scale of the attention is multiplied by {info['softmax_factor']:.6g}")
    query = info["query_scale"]
    if query is not None and "bias" in query:
        lines.append("  q is multiplied by scale · ln(position + 1) + bias, learned for each head of each layer")
        query = None
    if query is not None and query["constant"] != 1.0:
        lines.append(f"  q{' and k are' if query['scales_keys'] else ' is'} multiplied by {query['constant']:.6g}")
    if query is not None and (query["beta"] or query["power"] or query["logarithmic"]):
        position = f"(position + {query['offset']})" if query["offset"] else "position"
        place = f"{position} / {query['original_max_position_embeddings']}"
        formula = f"1 + {query['beta']:g} ln(1 + floor({place}))" if query["beta"] else ""
        formula = f"(1 + {place})^{query['power']:g}" if query["power"] else formula
        if query["logarithmic"]:
            formula = f"max(1, ln({position}) / ln({query['original_max_position_embeddings']}))"
        where = " in layers without rotation" if query["only_unrotated"] else ""
        lines.append(f"  q is multiplied by {formula}{where}")
    if info["output_order"] is not None:
        lines.append(f"  pairs are read interleaved and written in {info['output_order']} order; scores are the same")
    if info["rotates_values"]:
        lines.append("  the values are rotated like the keys, and the attention's output is rotated back")
    return ["", "in addition to the rotation", *lines] if lines else []


def _rope_lines(rope: dict[str, Any], info: dict[str, Any]) -> list[str]:
    start, end, pairs = rope["rotary_offset"], rope["rotary_offset"] + rope["rotary_dim"] - 1, rope["pairs"]
    parameters = ", ".join(
        f"{k} {_format_parameter(v)}" for k, v in rope["scheme"].items() if k != "rope_type" and v is not None
    )
    rotating = [w for w in rope["wavelength"] if w is not None]
    some = f"form {pairs} pairs, of which {len(rotating)} rotate" if len(rotating) < pairs else ""
    rows = [
        ("scheme", rope["scheme"]["rope_type"] + (f": {parameters}" if parameters else "")),
        ("base", f"{rope['base']:g}"),
        ("pairing", f"{rope['pairing']}: {_format_pairing(rope, info['heads'])}"),
        ("channels", f"{start} to {end} of {rope['head_dim']} {some or f'rotate, in {pairs} pairs'}"),
        *([] if info["heads"] is None else [("heads", _format_heads(rope, info["heads"]))]),
        *([] if rope["axes"] is None else [("axes", _format_axes(rope["axes"], info["axis_names"]))]),
        ("wavelengths", _format_wavelengths(rope, info["axis_names"])),
        *([] if info["heads"] else [("slowed", _format_slowing(rope["slowed_by"]))]),
        ("attention factor", _format_factor(rope["attention_factor"])),
    ]
    if rope["resolved_at_length"] is not None:
        rows.append(("depends on length", f"these are the frequencies at {rope['resolved_at_length']:,} tokens"))
    if (window := rope["window"]) is not None:
        rows.append(("window", f"q and k are less than {window:,} tokens apart, at any length"))
    if info["trained_length"] is not None:
        full, within = rope["full_turns_when_trained"], _within(window, info["trained_length"])
        turns = f"{full} of {rope['pairs']} pairs complete a turn within {within} before scaling"
        stated = None if parameters else info["max_position_embeddings"]
        states = "" if stated in (None, info["trained_length"]) else f" ({stated:,} are stated)"
        rows.append(("trained length", f"{info['trained_length']:,} tokens{states}; {turns}"))
    if info["length"] is not None:
        rows.append(("at length", _format_length(rope, info)))
    return [f"  {name:<16}  {value}" for name, value in rows]


def _within(window: int | None, length: int) -> str:
    return "it" if window is None or window >= length else "the window"


def _format_axes(axes: dict[str, Any], names: list[str]) -> str:
    """Describe which pairs use the positions of which axis."""
    of_axis = [[i for i, a in enumerate(axes["axis"]) if a == row] for row in range(axes["count"])]
    rows = [f"{names[a] if a < len(names) else a}: {_format_pairs(rows)}" for a, rows in enumerate(of_axis)]
    return f"{axes['count']} positions for each token; {'; '.join(rows)}"


def _format_pairs(rows: list[int]) -> str:
    """Format indices of pairs, e.g. "every third pair from 0 to 57, and 60-63" for equal steps and other indices."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    run = next((i for i, (a, b) in enumerate(pairwise(rows), 1) if b - a != step), len(rows))
    if run < 4 or step == 1:
        return f"pair{'' if len(rows) == 1 else 's'} {ranges(rows)}" if rows else "no pair"
    rest = f", and {ranges(rows[run:])}" if rows[run:] else ""
    return f"every {_ORDINAL.get(step, f'{step}th')} pair from {rows[0]} to {rows[run - 1]}{rest}"


_ORDINAL = {2: "second", 3: "third"}


def _format_wavelengths(rope: dict[str, Any], names: list[str]) -> str:
    """Describe how far apart tokens are for a full turn, on each axis. On an axis with few pairs, each has a number."""
    axes = rope["axes"]["axis"] if rope["axes"] else [0] * rope["pairs"]
    rotating = [(axis, w) for axis, w in zip(axes, rope["wavelength"], strict=True) if w is not None]
    found = []
    for axis, group in groupby(sorted(rotating), lambda pair: pair[0]):
        turns = [w for _, w in group]
        few = rope["axes"] and len(turns) <= 8
        said = ", ".join(f"{w:.4g}" for w in turns) if few else f"{turns[0]:,.2f} to {turns[-1]:,.0f}"
        found.append(f"{names[axis] if axis < len(names) else axis}: {said}" if rope["axes"] else said)
    return (
        f"{'; '.join(found)} {'positions' if rope['axes'] else 'tokens'} for a full turn"
        if found
        else "no pair rotates"
    )


def _format_parameter(value: Any) -> str:
    """Format a parameter of a scheme. For a list, show only its first value, its last value and its length."""
    if isinstance(value, list | tuple) and value:
        first, last = (math.inf if value[i] is None else value[i] for i in (0, -1))
        return f"{first:g} … {last:g} ({len(value)})"
    return str(value)


def _format_pairing(rope: dict[str, Any], heads: int | None) -> str:
    if rope["pairing"] == "half":
        distance = rope["rotary_dim"] // 2 // (heads or 1)
        return f"channel i{' of a head' if heads else ''} rotates with i + {distance} (GPT-NeoX, Hugging Face's Llama)"
    return "channel 2i rotates with 2i + 1 (GPT-J, Meta's Llama)"


def _format_heads(rope: dict[str, Any], heads: int) -> str:
    return f"the channels are those of all {heads} heads, of which each in turn has {rope['pairs'] // heads} pairs"


def _format_factor(factor: float) -> str:
    if factor == 1.0:
        return "1 (cos and sin are not scaled)"
    return f"{factor:.6g} multiplies cos and sin, so attention scores are multiplied by {factor * factor:.6g}"


def _format_length(rope: dict[str, Any], info: dict[str, Any]) -> str:
    full = rope["full_turns_at_length"]
    length, trained, window = info["length"], info["trained_length"], rope["window"]
    words = f"{length:,} tokens; {full} of {rope['pairs']} pairs complete a turn within {_within(window, length)}"
    if trained is None or length <= trained:
        return words if trained is None else f"{words}; within the trained length"
    length, trained = (min(n, window or n) for n in (length, trained))
    # A pair that did not complete a turn in training reaches unseen angles if it now rotates further than in training.
    reach = [trained / (2 * math.pi) * w * slow for w, slow in zip(rope["inv_freq"], _divisors(rope), strict=True)]
    now = [length / (2 * math.pi) * w for w in rope["inv_freq"]]
    unseen = [i for i, (a, b) in enumerate(zip(reach, now, strict=True)) if a < 1 and b > a * (1 + 1e-9)]
    after = "after scaling, " if any(slow != 1.0 for slow in _divisors(rope)) else ""
    if not unseen:
        return f"{words}; {after}no pair reaches an angle beyond those of training"
    new = "are new unless training went on with this scaling" if after else "were not seen in training"
    return f"{words}; {after}pairs {ranges(unseen)} reach angles that {new}"


def _divisors(rope: dict[str, Any]) -> list[float]:
    return [1.0 if slow is None else slow for slow in rope["slowed_by"]]


def _format_slowing(slowed_by: list[float | None]) -> str:
    top = max((s for s in slowed_by if s is not None), default=1.0)

    def kind(index: int) -> str:
        slow = slowed_by[index]
        if slow is None:
            return "do not rotate"
        if abs(slow - 1) < 1e-9:
            return "are not slowed"
        if slow < 1 - 1e-9:
            return "between"
        return f"by a factor of {top:.4g}" if abs(slow - top) < 1e-9 * top else "between"

    parts = []
    for words, group in groupby(range(len(slowed_by)), kind):
        rows = list(group)
        if words == "between":
            amounts = [s for s in (slowed_by[i] for i in rows) if s is not None]
            least, most = f"{min(amounts):.4g}", f"{max(amounts):.4g}"
            words = f"by a factor of {least if least == most else f'{least} to {most}'}"
        if len(rows) == 1:
            words = words.replace("do not", "does not").replace("are ", "is ")
        parts.append(f"pair{'' if len(rows) == 1 else 's'} {ranges(rows)} {words}")
    return "; ".join(parts)


def ranges(numbers: Iterable[int]) -> str:
    """Format increasing integers as ranges: `0-2, 5` for 0, 1, 2, 5."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)
