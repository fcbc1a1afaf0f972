"""Determine what the target should compute, from a config, a rope, or the user's options."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk import Axes, ModelRopes, Rope, _checks, from_config
from ropewalk._layout import Pairing
from ropewalk.tools.check.find.target import Target, name_of


@dataclass(frozen=True)
class Expected:
    """What the target should compute, and the values with which a class is constructed.

    If rope, pairing and base are None, only results that no rope explains count as wrong.

    Args:
        rope: the expected rope, for one fixed length. None if the user's options do not determine a whole rope.
        pairing, base: the expected pairing and base.
        head_dim: the number of channels of a head, for constructors.
        states_head_dim: whether the user states it, so that functions which take tables get it, too.
        output_order: "half" if the model reads interleaved pairs and writes them in halves.
        model_type: the model_type of the config, for the report.
        length: the number of tokens up to which `rope` holds, if its scheme depends on the length. Otherwise None.
        unresolved: the rope whose scheme depends on the length, of which `rope` is that of short sequences. Or None.
        table_length: the number of tokens, for constructors with such a parameter. None keeps the default of the class,
            or means 4096.
        config: the config, for constructors with a parameter for it: its keys, or a config object of transformers.
        layer_type: the kind of the layer whose rope is expected, such as "full_attention", for code with a parameter
            for it. None if all layers are alike.
        layer: the index of that layer.
        is_still: whether that layer must not rotate. `rope` is then that of another layer.
        still: the index of a layer that must not rotate, if there is one and the user states no layer.
        notes: the warnings about the config, such as that only the rope of text tokens is read.
        axis_names: the names of the axes of positions, if the config states them.
        is_slice: whether the target gets only the rotated channels, which its caller slices out.
        front: with a slice, the number of channels that only q has before those, as in MLA.
        dtype: that of q and k, for constructors with such a parameter. None means float32.
    """

    rope: Rope | None = None
    pairing: str | None = None
    base: float | None = None
    head_dim: int = 64
    states_head_dim: bool = False
    output_order: str | None = None
    model_type: str | None = None
    length: int | None = None
    unresolved: Rope | None = None
    table_length: int | None = None
    config: Any = None
    layer_type: str | None = None
    layer: int = 0
    is_still: bool = False
    still: int | None = None
    notes: tuple[str, ...] = ()
    axis_names: tuple[str, ...] = ()
    is_slice: bool = False
    front: int = 0
    dtype: Any = None

    @property
    def axes(self) -> Axes | None:
        """The axis of each pair, or None if tokens have one position or no rope is expected."""
        return None if self.rope is None else self.rope.axes

    def sizes_of_axes(self, count: int = 3) -> list[int]:
        """Return the number of pairs of each of `count` axes. If none are expected, those of time are fewer."""
        if self.axes is not None:
            return [self.axes.axis.count(axis) for axis in range(self.axes.count)]
        first = self.rotary_dim // (8 if count == 3 else 2 * count)
        rest = self.rotary_dim // 2 - first
        return [first, *((rest + i) // (count - 1) for i in range(count - 1))]

    @property
    def rotary_dim(self) -> int:
        """The number of rotated channels."""
        return self.head_dim if self.rope is None else self.rope.rotary_dim

    @property
    def channels(self) -> int:
        """The number of channels of a head that is passed to the target, which may be only the rotated slice."""
        return self.head_dim if self.rope is None else self.rope.head_dim


def read(
    target: Target,
    config: Any,
    rope: Rope | None,
    reading: Mapping[str, Any],
    *,
    head_dim: int | None,
    layer: int | None,
) -> Expected:
    """Return what to expect from the target.

    The arguments are those of `check`. `reading` contains those that `from_config` has too.
    """
    reading = {name: value for name, value in reading.items() if value is not None}
    options = {"config": config, "rope": rope, "head_dim": head_dim, "layer": layer, **reading}
    stated = [name for name, value in options.items() if value is not None]
    allowed = {"head_dim", "base", "pairing"} if config is None else {"config", "layer", *reading}
    if not {*stated} <= (allowed if rope is None else {"rope"}):
        must = "the expected rope must be stated by rope alone, by config, or by base, pairing and head_dim"
        fix = "Drop the others. layer and factor belong to a config."
        raise _checks.error("check", must, " and ".join(stated), fix)
    base, pairing = reading.get("base"), reading.get("pairing")
    if config is None and rope is None:
        if pairing is not None:
            _checks.check_pairing("check", pairing)
        dim = 64 if head_dim is None else _checks.integer("check", "head_dim", head_dim, at_least=2)
        if dim % 2:
            fix = f"Pass {dim + 1}, or the config of the model."
            raise _checks.error("check", "head_dim must be even", str(dim), fix)
        return Expected(pairing=pairing, base=base, head_dim=dim, states_head_dim=head_dim is not None)
    if rope is not None:
        expected = _of_rope(rope, 2048)
        return replace(expected, table_length=expected.length)
    ropes, converted = _read(config, reading)
    notes, tower = ropes.warnings, ropes.vision
    if converted is not None:
        notes = (
            *notes,
            f"its weights must be in the order of the pairing {converted!r}, as `ropewalk convert` writes.",
        )
    if tower is not None and (not ropes.layers or "vision" in name_of(target.objects[0]).lower()):
        if len(tower.ropes) != 1:
            fix = "Check each rope alone: pass it as rope."
            raise _checks.error("check", "the tower must have one rope", f"{len(tower.ropes)}", fix)
        return replace(
            _of_rope(tower.ropes[0] if converted is None else replace(tower.ropes[0], pairing=converted), 2048),
            model_type=tower.model_type,
            config=getattr(config, "vision_config", config) if hasattr(config, "to_dict") else tower.config,
            notes=notes,
            axis_names=tower.axis_names,
        )
    chosen, layer_rope = _choose_layer(ropes.layers, layer)
    layer_rope = layer_rope if converted is None else replace(layer_rope, pairing=converted)
    longest = ropes.max_position_embeddings
    return replace(
        _of_rope(layer_rope, ropes.trained_length or 2048),
        output_order=ropes.output_order,
        model_type=ropes.model_type,
        table_length=None if longest is None else min(longest, 163_840),  # that of DeepSeek V3
        config=config if hasattr(config, "to_dict") else _keys_of(config, ropes),
        layer_type=ropes.layer_kinds[chosen] if ropes.layer_kinds else None,
        layer=chosen,
        is_still=ropes.layers[chosen] is None,
        still=ropes.layers.index(None) if layer is None and None in ropes.layers else None,
        notes=notes,
        axis_names=ropes.axis_names,
    )


def _read(config: Any, reading: Mapping[str, Any]) -> tuple[ModelRopes, Pairing | None]:
    """Read all ropes of a config, or only those of text tokens if the others cannot be read.

    Return the stated pairing as well if the config requires the other one, or None.
    """
    try:
        return from_config(config, **reading), None
    except _checks.RopeError:
        others: list[tuple[dict[str, Any], Pairing | None]] = [({"text_only": True, **reading}, None)]
        if (pairing := reading.get("pairing")) in ("half", "interleaved"):
            others.append(({name: value for name, value in reading.items() if name != "pairing"}, pairing))
        for options, converted in others:
            with contextlib.suppress(_checks.RopeError):
                return from_config(config, **options), converted
        raise


def _keys_of(config: Any, ropes: ModelRopes) -> Mapping[str, Any] | None:
    """Return the keys of a config, or None for a file whose keys code does not read."""
    if ropes.file_format != "params.json":
        return None if ropes.file_format else ropes.config
    if isinstance(config, Mapping):
        return config
    path = Path(config, "params.json") if Path(config).is_dir() else Path(config)
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else None


def _choose_layer(layers: Sequence[Rope | None], layer: int | None) -> tuple[int, Rope]:
    """Return the layer to compare with: the one that the user chose, or any if all rotate alike.

    Return its rope as well, or that of another layer if it does not rotate.
    """
    if layer is not None and not 0 <= layer < len(layers):
        fix = "Pass the index of a layer of the model."
        raise _checks.error("check", f"layer must be from 0 to {len(layers) - 1}", str(layer), fix)
    first_of = {rope: i for i, rope in reversed([*enumerate(layers)]) if rope is not None}
    if layer is None and len(first_of) > 1:
        listed = ", ".join(f"{i} (base {rope.base:.10g})" for rope, i in sorted(first_of.items(), key=lambda kv: kv[1]))
        must = f"{_checks.argument('layer')} must be passed, because layers rotate in {len(first_of)} ways"
        raise _checks.error("check", must, "none", f"Pass one layer of each kind, each in its own check: {listed}.")
    if not first_of:
        raise _checks.error("check", "a layer must rotate", "a config of none that does", "Pass another config.")
    chosen = layer if layer is not None else min(first_of.values())
    return chosen, layers[chosen] or next(iter(first_of))


def for_slice(expected: Expected) -> Expected | None:
    """Return what to expect from a function that is passed only the rotated channels, or None if all are rotated."""
    rope = expected.rope
    if rope is None or rope.rotary_dim == rope.head_dim:
        return None
    head_dim = rope.rotary_dim if rope.rotary_offset else expected.head_dim  # in MLA, the slice counts as the head
    rope = replace(rope, head_dim=rope.rotary_dim, rotary_offset=0)
    return replace(expected, rope=rope, head_dim=head_dim, is_slice=True)


def _of_rope(rope: Rope, trained: int) -> Expected:
    if rope.is_static:
        return Expected(rope, rope.pairing, rope.base, rope.head_dim)
    short = rope.at_length(1)
    return Expected(short, rope.pairing, rope.base, rope.head_dim, length=trained, unresolved=rope)
