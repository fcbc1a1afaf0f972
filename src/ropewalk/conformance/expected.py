"""What the target should do: a rope, from a config or from what the user says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ropewalk import Rope, _checks, from_config
from ropewalk.conformance.construct import Wishes


@dataclass(frozen=True)
class Expected:
    """What is known beforehand. All None: nothing, so that only what can never be right is wrong.

    Args:
        rope: what it should do, of a fixed length; None where the user says too little for a whole one.
        pairing, base: what the user says by themselves.
        output_order: "half" where the model writes pairs in halves.
        model_type: of the config, for the report.
        length: tokens for which the rope holds, where its scheme depends on the length; None for all.
        longer: what it should do with twice as many; None where the length makes no difference.
    """

    rope: Rope | None = None
    pairing: str | None = None
    base: float | None = None
    output_order: str | None = None
    model_type: str | None = None
    length: int | None = None
    longer: Rope | None = None


def read(
    config: Any,
    rope: Rope | None,
    *,
    head_dim: int | None,
    base: float | None,
    pairing: str | None,
    layer: int | None,
    arguments: Mapping[str, Any],
) -> tuple[Expected, Wishes]:
    """What to expect, and what a class is asked for.

    Raises:
        RopeError: the config cannot be read, its layers differ and no layer is named, or two say the same thing.
    """
    if rope is not None and config is not None:
        raise _checks.error("check", "what is expected must be said once", "config and rope", "Drop one of them.")
    if config is None and rope is None:
        if pairing is not None:
            _checks.check_pairing("check", pairing)
        dim = head_dim or 64
        return Expected(pairing=pairing, base=base), Wishes(dim, dim, base, arguments=arguments)
    if base is not None or pairing is not None or head_dim is not None:
        raise _checks.error(
            "check",
            "what is expected must be said once",
            "base, pairing or head_dim beside config or rope",
            "Drop them.",
        )
    if rope is not None:
        rope, length, longer = _static(rope, 2048)
        wishes = Wishes(rope.head_dim, rope.rotary_dim, rope.base, length, arguments=arguments)
        return Expected(rope, rope.pairing, rope.base, length=length, longer=longer), wishes
    ropes = from_config(config, text_only=True)
    if layer is not None and not 0 <= layer < len(ropes.layers):
        raise _checks.error("check", f"layer must be from 0 to {len(ropes.layers) - 1}", str(layer), "Pass another.")
    rotating = {one for one in ropes.layers if one is not None}
    found = (
        next(iter(rotating))
        if layer is None and len(rotating) == 1
        else ropes.rope
        if layer is None
        else ropes.layers[layer]
    )
    if found is None:
        raise _checks.error("check", "the layer must rotate", f"layer {layer}, which does not", "Pass another layer.")
    found, length, longer = _static(found, ropes.trained_length or 2048)
    told = ropes.max_position_embeddings
    wishes = Wishes(
        found.head_dim,
        found.rotary_dim,
        found.base,
        None if told is None else min(told, 131_072),
        ropes.config,
        arguments,
    )
    return (
        Expected(found, found.pairing, found.base, ropes.output_order, ropes.model_type, length, longer),
        wishes,
    )


def of_slice(expected: Expected, wishes: Wishes) -> tuple[Expected, Wishes] | None:
    """The same for a function that is given the rotated channels alone; None where all are rotated."""
    rope = expected.rope
    if rope is None or rope.rotary_dim == rope.head_dim:
        return None
    alone = replace(rope, head_dim=rope.rotary_dim, rotary_offset=0)
    return replace(expected, rope=alone), replace(wishes, channels=rope.rotary_dim)


def _static(rope: Rope, trained: int) -> tuple[Rope, int | None, Rope | None]:
    """The rope of short sequences; where the length matters, for how many tokens that is, and that of twice as many."""
    return (rope, None, None) if rope.is_static else (rope.at_length(1), trained, rope.at_length(2 * trained))
