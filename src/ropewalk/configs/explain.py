"""Explain ModelRopes: `facts` returns plain data, and `text` formats that data for a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any

from ropewalk._checks import length as checked_length
from ropewalk._checks import printable
from ropewalk.configs.layer_ropes import LayerRopes, VisionRopes
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope


def facts(ropes: LayerRopes, length: int | None) -> dict[str, Any]:
    """Return the facts about the ropes of a model as a dict of JSON values. See `ModelRopes.facts`."""
    if length is not None:
        length = checked_length("explain", "length", length)
    return {
        "source": ropes.source,
        "model_type": ropes.model_type,
        "layers": len(ropes.layers),
        "trained_length": ropes.trained_length,
        "max_position_embeddings": ropes.max_position_embeddings,
        "axis_names": list(ropes.axis_names),
        "length": length,
        "ropes": [
            {"layers": layers, "rope": None if rope is None else _rope_facts(rope, ropes.trained_length, length)}
            for rope, layers in ropes.groups()
        ],
        "vision": None if ropes.vision is None else _vision_facts(ropes.vision),
        "others": {name: _rope_facts(rope, ropes.trained_length, length) for name, rope in ropes.extra_ropes.items()},
        "softmax_factor": ropes.softmax_factor,
        "query_scale": None if ropes.query_scale is None else dataclasses.asdict(ropes.query_scale),
        "output_order": ropes.output_order,
        "rotates_values": ropes.rotates_values,
        "origins": dict(ropes.origins),
        "warnings": list(ropes.warnings),
    }


def _vision_facts(vision: VisionRopes) -> dict[str, Any]:
    facts = {name: getattr(vision, name) for name in ("model_type", "source", "positions")}
    ropes = [_rope_facts(rope, None, None) for rope in vision.ropes]
    return {**facts, "axis_names": list(vision.axis_names), "ropes": ropes, "origins": dict(vision.origins)}


def _rope_facts(rope: Rope, trained: int | None, length: int | None) -> dict[str, Any]:
    scheme, resolved_at = rope.scaling, None
    if not rope.is_static:
        resolved_at = length or trained or 1
        rope = rope.at_length(resolved_at)
    inv_freq, wavelength = rope.inv_freq.tolist(), rope.wavelength.tolist()
    unscaled = dataclasses.replace(rope, scaling=None).inv_freq.tolist()
    return {
        "scheme": {"rope_type": "default"} if scheme is None else scheme.facts(),
        "resolved_at_length": resolved_at,
        "base": rope.base,
        "pairing": rope.pairing,
        "head_dim": rope.head_dim,
        "rotary_dim": rope.rotary_dim,
        "rotary_offset": rope.rotary_offset,
        "axes": None if rope.axes is None else _axes_facts(rope.axes),
        "pairs": len(inv_freq),
        "attention_factor": rope.attention_factor,
        "inv_freq": inv_freq,
        # JSON has no infinity, so the wavelength of a pair that does not rotate is null.
        "wavelength": [w if math.isfinite(w) else None for w in wavelength],
        "slowed_by": [_ratio(before, after) for before, after in zip(unscaled, inv_freq, strict=True)],
        "full_turns_when_trained": None if trained is None else sum(2 * math.pi / w <= trained for w in unscaled),
        "full_turns_at_length": None if length is None else sum(w <= length for w in wavelength),
    }


def _axes_facts(axes: Axes) -> dict[str, Any]:
    """Return the number of axes, their order as text, and the axis and frequency index of each pair."""
    return {
        "count": axes.count,
        "pattern": repr(axes),
        "axis": list(axes.axis),
        "freq_index": list(axes.freq_index),
    }


def _ratio(before: float, after: float) -> float | None:
    """Return the factor by which a scheme slows a pair, from its frequencies before and after scaling.

    Return None if the factor is infinite, because the scheme stops the pair.
    """
    ratio = before / after if after else math.inf
    return ratio if math.isfinite(ratio) else None


def text(info: dict[str, Any]) -> str:
    """Format the result of `facts` as lines for a terminal."""
    lines = [f"{info['source']} (model_type {info['model_type']})"]
    for group in info["ropes"]:
        lines += ["", f"layers {ranges(group['layers'])} of {info['layers']}"]
        lines += ["  no rotation"] if group["rope"] is None else _rope_lines(group["rope"], info)
    for name, rope in info["others"].items():
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
        lines += _rope_lines(rope, {**vision, "trained_length": None, "length": None})
    return lines


def _other_lines(info: dict[str, Any]) -> list[str]:
    """Describe what an architecture does in addition to the rotation of q and k, such as scaling q."""
    lines = []
    if info["softmax_factor"] != 1.0:
        lines.append(f"  the softmax scale of the attention is multiplied by {info['softmax_factor']:.6g}")
    query = info["query_scale"]
    if query is not None and query["constant"] != 1.0:
        lines.append(f"  q{' and k are' if query['scales_keys'] else ' is'} multiplied by {query['constant']:.6g}")
    if query is not None and query["beta"]:
        length = query["original_max_position_embeddings"]
        lines.append(f"  q is multiplied by 1 + {query['beta']:g} ln(1 + floor(position / {length}))")
    if info["output_order"] is not None:
        lines.append(f"  pairs are read interleaved and written in {info['output_order']} order; scores are the same")
    if info["rotates_values"]:
        lines.append("  the values are rotated like the keys, and the attention's output is rotated back")
    return ["", "in addition to the rotation", *lines] if lines else []


def _rope_lines(rope: dict[str, Any], info: dict[str, Any]) -> list[str]:
    start, end = rope["rotary_offset"], rope["rotary_offset"] + rope["rotary_dim"]
    parameters = ", ".join(
        f"{k} {_format_parameter(v)}" for k, v in rope["scheme"].items() if k != "rope_type" and v is not None
    )
    rotating = [w for w in rope["wavelength"] if w is not None]
    rows = [
        ("scheme", rope["scheme"]["rope_type"] + (f": {parameters}" if parameters else "")),
        ("base", f"{rope['base']:g}"),
        ("pairing", f"{rope['pairing']}: {_format_pairing(rope)}"),
        ("channels", f"{start} to {end - 1} of {rope['head_dim']} rotate, in {rope['pairs']} pairs"),
        *([] if rope["axes"] is None else [("axes", _format_axes(rope["axes"], info["axis_names"]))]),
        ("wavelengths", _format_wavelengths(rotating, rope["axes"] is None)),
        ("slowed", _format_slowing(rope["slowed_by"])),
        ("attention factor", _format_factor(rope["attention_factor"])),
    ]
    if rope["resolved_at_length"] is not None:
        rows.append(("depends on length", f"these are the frequencies at {rope['resolved_at_length']:,} tokens"))
    if info["trained_length"] is not None:
        full = rope["full_turns_when_trained"]
        rows.append(
            (
                "trained length",
                f"{info['trained_length']:,} tokens; {full} of {rope['pairs']} pairs complete a turn within it "
                "before scaling",
            )
        )
    if info["length"] is not None:
        rows.append(("at length", _format_length(rope, info)))
    return [f"  {name:<16}  {value}" for name, value in rows]


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


def _format_wavelengths(rotating: list[float], of_text: bool) -> str:
    if not rotating:
        return "no pair rotates"
    unit = "tokens" if of_text else "positions"
    return f"{min(rotating):,.2f} to {max(rotating):,.0f} {unit} for a full turn"


def _format_parameter(value: Any) -> str:
    """Format a parameter of a scheme. For a list, show only its first value, its last value and its length."""
    if isinstance(value, list | tuple) and value:
        first, last = (math.inf if value[i] is None else value[i] for i in (0, -1))
        return f"{first:g} … {last:g} ({len(value)})"
    return str(value)


def _format_pairing(rope: dict[str, Any]) -> str:
    if rope["pairing"] == "half":
        return f"channel i rotates with i + {rope['rotary_dim'] // 2} (GPT-NeoX, Hugging Face's Llama)"
    return "channel 2i rotates with 2i + 1 (GPT-J, Meta's Llama)"


def _format_factor(factor: float) -> str:
    if factor == 1.0:
        return "1 (cos and sin are not scaled)"
    return f"{factor:.6g} multiplies cos and sin, so attention scores are multiplied by {factor * factor:.6g}"


def _format_length(rope: dict[str, Any], info: dict[str, Any]) -> str:
    full = rope["full_turns_at_length"]
    words = f"{info['length']:,} tokens; {full} of {rope['pairs']} pairs complete a turn within it"
    trained = info["trained_length"]
    if trained is None:
        return words
    if info["length"] <= trained:
        return f"{words}; within the trained length"
    # A pair that did not complete a turn in training reaches unseen angles if it now rotates further than in training.
    reach = [trained / (2 * math.pi) * w * slow for w, slow in zip(rope["inv_freq"], _divisors(rope), strict=True)]
    now = [info["length"] / (2 * math.pi) * w for w in rope["inv_freq"]]
    unseen = [i for i, (a, b) in enumerate(zip(reach, now, strict=True)) if a < 1 and b > a * (1 + 1e-9)]
    # A model such as Llama 3.1 was trained on with its scaling, on texts longer than the trained length.
    training = "training before scaling" if any(slow != 1.0 for slow in _divisors(rope)) else "training"
    if not unseen:
        return f"{words}; every angle was seen in {training}"
    return f"{words}; pairs {ranges(unseen)} reach angles that were not seen in {training}"


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
