"""Determine what the target should compute, from a config, a rope, or the user's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ropewalk import Rope, _checks, from_config
from ropewalk.conformance.construct import Settings


@dataclass(frozen=True)
class Expected:
    """What the target should compute. If all fields are None, only results that no rope explains count as wrong.

    Args:
        rope: the expected rope, for one fixed length. None if the user's options do not determine a whole rope.
        pairing, base: the expected pairing and base.
        output_order: "half" if the model reads interleaved pairs and writes them in halves.
        model_type: the model_type of the config, for the report.
        length: the number of tokens up to which `rope` holds, if its scheme depends on the length. Otherwise None.
        longer: the expected rope for twice as many tokens. None if the scheme does not depend on the length.
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
) -> tuple[Expected, Settings]:
    """Return what to expect from the target, and the settings with which a class is constructed.

    The arguments are those of `check`.

    Raises:
        RopeError: the config cannot be read, its layers differ and no layer is chosen, the chosen layer does not
            rotate, or the arguments are invalid or state what is expected in two ways.
    """
    if rope is not None and config is not None:
        raise _checks.error(
            "check", "the expected rope must be passed only once", "config and rope", "Drop one of them."
        )
    if layer is not None and config is None:
        raise _checks.error(
            "check", "layer requires a config", f"layer {layer} and no config", "Drop it, or pass config."
        )
    if config is None and rope is None:
        if pairing is not None:
            _checks.check_pairing("check", pairing)
        dim = 64 if head_dim is None else _checks.integer("check", "head_dim", head_dim, at_least=2)
        if dim % 2:
            raise _checks.error(
                "check", "head_dim must be even", str(dim), f"Pass {dim + 1}, or the config of the model."
            )
        return Expected(pairing=pairing, base=base), Settings(dim, dim, base, arguments=arguments)
    if base is not None or pairing is not None or head_dim is not None:
        raise _checks.error(
            "check",
            "the expected rope must be passed only once",
            "base, pairing or head_dim together with config or rope",
            "Drop base, pairing and head_dim.",
        )
    if rope is not None:
        rope, length, longer = _static(rope, 2048)
        settings = Settings(rope.head_dim, rope.rotary_dim, rope.base, length, arguments=arguments)
        return Expected(rope, rope.pairing, rope.base, length=length, longer=longer), settings
    ropes = from_config(config, text_only=True)
    if layer is not None and not 0 <= layer < len(ropes.layers):
        raise _checks.error(
            "check",
            f"layer must be from 0 to {len(ropes.layers) - 1}",
            str(layer),
            "Pass the index of a layer of the model.",
        )
    rotating = {rope for rope in ropes.layers if rope is not None}
    layer_rope = (
        next(iter(rotating))
        if layer is None and len(rotating) == 1
        else ropes.rope
        if layer is None
        else ropes.layers[layer]
    )
    if layer_rope is None:
        raise _checks.error(
            "check", "the layer must rotate", f"layer {layer}, which does not", "Pass a layer that rotates."
        )
    layer_rope, length, longer = _static(layer_rope, ropes.trained_length or 2048)
    max_positions = ropes.max_position_embeddings
    settings = Settings(
        layer_rope.head_dim,
        layer_rope.rotary_dim,
        layer_rope.base,
        None if max_positions is None else min(max_positions, 131_072),
        ropes.config,
        arguments,
    )
    return (
        Expected(layer_rope, layer_rope.pairing, layer_rope.base, ropes.output_order, ropes.model_type, length, longer),
        settings,
    )


def for_slice(expected: Expected, settings: Settings) -> tuple[Expected, Settings] | None:
    """Return `expected` and `settings` for a function that is passed only the rotated channels of each head.

    Return None if all channels are rotated.
    """
    rope = expected.rope
    if rope is None or rope.rotary_dim == rope.head_dim:
        return None
    slice_rope = replace(rope, head_dim=rope.rotary_dim, rotary_offset=0)
    return replace(expected, rope=slice_rope), replace(settings, channels=rope.rotary_dim)


def _static(rope: Rope, trained: int) -> tuple[Rope, int | None, Rope | None]:
    """Resolve a rope that may depend on the length.

    Returns:
        The rope of short sequences; the trained length; and the rope of sequences twice as long. The last two are None
        if the rope does not depend on the length.
    """
    return (rope, None, None) if rope.is_static else (rope.at_length(1), trained, rope.at_length(2 * trained))
