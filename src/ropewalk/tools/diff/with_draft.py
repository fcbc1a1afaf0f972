"""Compare the rotation of a model with that of its draft in speculative decoding."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ropewalk._checks import printable
from ropewalk.configs.model_ropes import indices_of
from ropewalk.tools.diff.between_configs import compare_layers, read_both, summary
from ropewalk.tools.diff.lengths import longest_of, stated_length
from ropewalk.tools.diff.rope_difference import LAST_BITS
from ropewalk.tools.diff.text import Result, describe_layers, describe_source, left_out, section, wrap

_OWN_CACHE = (
    "A draft with a KV cache of its own (a smaller model, an EAGLE or MTP head) may rotate differently, if it was "
    "trained so. If it was trained with the rotation of the target, its tokens are accepted less often."
)
_SHARED_CACHE = "A draft that reads the KV cache of the target must rotate like it, and does not."
_SHORT = (
    "Beyond its length, a draft may be accepted less often, or fail: vLLM reads outside the draft's table of cos and "
    "sin (vllm#48894, seen in 0.24). Increase max_position_embeddings of the draft if it was trained for more."
)


class DraftDiff(Result):
    """A comparison of the rotation of a model with that of its draft. `facts` is all of it as a dict of JSON values."""

    @property
    def alike(self) -> bool:
        """Whether all layers of the draft rotate like layers of the target, up to its length, with no key ignored."""
        return not self.facts["layers"] and not self.facts["too_short"] and not self.facts["ignored"]

    def text(self) -> str:
        """Return the comparison as text for a terminal."""
        return _text(self.facts)


def draft(
    target: Any,
    draft: Any,
    *,
    length: int | None = None,
    pairing: str | None = None,
    base: float | None = None,
    factor: float | None = None,
    ignore: Collection[str] = (),
    download: bool = False,
) -> DraftDiff:
    """Compare the rotation of a model with that of its draft in speculative decoding, such as an EAGLE head.

    A layer of the draft rotates alike if some layer of the target has the same rope. Else it is compared with the
    layers of its kind, such as "sliding_attention", or if there are none, with those whose scores differ least. The
    numbers of layers may differ.

    Args:
        target, draft: as in `diff.configs`.
        length: the length of the longest sequence, in tokens. None means that of the target, as in `diff.engines`.
        pairing, base, factor, ignore, download: as in `diff.configs`.

    Returns:
        A `DraftDiff`, with the result as text (`.text()`) and as data (`.facts`).

    Raises:
        RopeError: as in `diff.configs`.
    """
    a, b = read_both((target, draft), pairing, base, factor, ignore, download)
    longest = longest_of("diff.draft", length, a)
    short = min(n for n in (a.trained_length, b.trained_length, longest) if n is not None)
    kinds = dict(zip(a.layer_kinds, a.layers, strict=False))
    rows = []
    for (rope, window), indices in indices_of(zip(b.layers, map(b.window, range(len(b.layers))), strict=True)).items():
        lengths = sorted({short, longest})
        found = {own: compare_layers(own, rope, lengths, LAST_BITS, (window,)) for own in dict.fromkeys(a.layers)}
        if None not in found.values():
            kind = b.layer_kinds[indices[0]] if b.layer_kinds else ""
            nearest = found[kinds[kind]] if kind in kinds else min(found.values(), key=_largest_change)
            rows.append({"layers": indices, **(nearest or {})})
    reached = stated_length(b)
    return DraftDiff(
        {
            "target": summary(a),
            "draft": summary(b),
            "length": longest,
            "ignored": list(ignore),
            "layer_counts": [len(a.layers), len(b.layers)],
            "layers": rows,
            "reached": reached,
            "too_short": reached is not None and reached < longest,
        }
    )


def _largest_change(row: Mapping[str, Any] | None) -> float:
    """Return the largest change of a score in a row, or infinity if the scores were not compared."""
    return max((found["scores"]["largest_change"] for found in row["at"]), default=math.inf) if row else math.inf


def _text(facts: Mapping[str, Any]) -> str:
    alike = "does not rotate like the target" if facts["layers"] else "rotates like the target"
    ends = f", and states {facts['reached']:,} positions of {facts['length']:,}" if facts["too_short"] else ""
    up_to = "" if ends else f", up to {facts['length']:,} tokens"
    lines = [f"target: {describe_source(facts['target'])}", f"draft:  {describe_source(facts['draft'])}", ""]
    lines += left_out(facts)
    lines += wrap(f"The draft {alike}{ends or up_to}.", "")
    lines += describe_layers(facts["layers"], facts["layer_counts"][1], " of the draft")
    meaning = [_OWN_CACHE, _SHARED_CACHE] if facts["layers"] else []
    meaning += [_SHORT] if facts["too_short"] else []
    lines += section("what this means", meaning)
    lines += [f"  ! {name}: {warning}" for name in ("target", "draft") for warning in facts[name]["warnings"]]
    return "\n".join(map(printable, lines))
