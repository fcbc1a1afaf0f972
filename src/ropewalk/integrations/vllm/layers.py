"""Subclasses of vLLM's rotary layers that rotate through ropewalk.

A layer keeps vLLM's rotation, and logs the reason, if no `Rope` describes the layer, or if vLLM's table differs from
the rope and the option `override` is not set. `cos_sin_cache` does not change, because fused kernels of vLLM read it.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk._checks import RopeError, error, shown
from ropewalk.integrations.vllm.ropes import WHO, difference, rope_of
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation

logger = logging.getLogger("vllm.ropewalk")

# The layers of this process, for `report`.
LAYERS: weakref.WeakSet[Layer] = weakref.WeakSet()
_KEY = "ropewalk"  # in vLLM's forward context


class Layer(torch.nn.Module):
    """The base class of ropewalk's layers. It comes before vLLM's class in the method resolution order.

    Attributes:
        vllm_name: the name of vLLM's class.
        ropes: a dict of ropes. A key consists of `is_neox_style`, which models may change after they have built the
            layer, and whether positions have one axis, as for text in M-RoPE. None if the layer keeps vLLM's rotation.
        reason: why the layer keeps vLLM's rotation, or "" if it does not.
        calls: the number of rotations through ropewalk so far.
        max_position_asked_for: the `max_position_embeddings` that was passed to the layer. The attribute with that name
            is larger in M-RoPE. Missing if none was passed.
    """

    vllm_name: str
    in_place = True  # whether vLLM's own layer rotates q and k in place, instead of returning new tensors
    head_size: int
    ropes: dict[tuple[bool, bool], Rope] | None = None
    reason = ""
    calls = 0
    _table: tuple[Tensor, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) > 2 or "max_position_embeddings" in kwargs:
            self.max_position_asked_for = args[2] if len(args) > 2 else kwargs["max_position_embeddings"]
        super().__init__(*args, **kwargs)
        try:
            override = _override()
            rope = rope_of(self.vllm_name, self, _length())
            self._compare(rope, override)
        except Exception as e:  # another version of vLLM may have other attributes, and its own rotation still works
            self.reason = str(e) if isinstance(e, RopeError) else f"{type(e).__name__}: {e}"
            logger.warning("%s keeps vLLM's rotation: %s", self.vllm_name, self.reason)
        else:
            of_text = replace(rope, axes=None)
            self.ropes = {
                (neox, text): replace(of_text if text else rope, pairing="half" if neox else "interleaved")
                for neox in (True, False)
                for text in (True, False)
            }
            logger.info("%s rotates through ropewalk: %s", self.vllm_name, rope)
        self._table = ()
        LAYERS.add(self)

    def _compare(self, rope: Rope, override: bool) -> None:
        """Compare the rope with vLLM's table.

        Raises:
            RopeError: they differ, and `override` is False. With `override`, the difference is logged as a warning.
        """
        differs = difference(rope, self._first_rows())
        if differs and not override:
            option = 'additional_config={"ropewalk": {"override": True}}'
            fix = f"The layer keeps vLLM's rotation. To rotate by its attributes, pass {option}."
            raise error(WHO, "vLLM's table must agree with the attributes of the layer", differs, fix)
        if differs:
            logger.warning("%s rotates by its attributes. vLLM's table has %s", self.vllm_name, differs)

    def _compute_cos_sin_cache(self, *args: Any) -> Tensor:
        """Compute vLLM's own table, and keep its first two rows for a comparison, because vLLM rounds it later."""
        table: Tensor = super()._compute_cos_sin_cache(*args)  # type: ignore[misc]
        self._table = (*self._table, table[:2])
        return table

    def _first_rows(self) -> Tensor:
        """Return rows 0 and 1 of the float32 table in use, which is the short or the long one for LongRoPE."""
        if not self._table:
            raise error(WHO, "vLLM must have computed a table", "none", "The layer keeps vLLM's rotation.")
        return self._table[int(getattr(self, "use_long_rope", False))]

    @property
    def rope(self) -> Rope | None:
        """The rope with its axes, in the layer's current pairing. None if the layer keeps vLLM's rotation."""
        return None if self.ropes is None else self.ropes[getattr(self, "is_neox_style", True), False]

    def _rope(self, ropes: dict[tuple[bool, bool], Rope], positions: Tensor) -> Rope:
        """Return the rope for positions `[tokens]` or `[axes, tokens]`."""
        return ropes[getattr(self, "is_neox_style", True), positions.ndim == 1]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query, and key unless it is None: `[tokens, heads · head_size]` or `[tokens, heads, head_size]`."""
        if self.ropes is None:
            args = (positions, query, key) if offsets is None else (positions, query, key, offsets)
            rotated: tuple[Tensor, Tensor | None] = super().forward(*args)
            return rotated
        rope = self._rope(self.ropes, positions)
        if torch.compiler.is_compiling():
            return self._rotate_out_of_place(_rotation_at(rope, positions, offsets), query, key)
        self.calls += 1
        if self.calls == 1:
            logger.info("first rotation by ropewalk: %s", rope)
        rotation = _shared_rotation(rope, positions) if offsets is None else _rotation_at(rope, positions, offsets)
        if not self.in_place:
            return self._rotate_out_of_place(rotation, query, key)
        tokens = positions.shape[-1] if rope.axes is not None else positions.numel()
        rotation.apply_(self._heads(query, tokens), None if key is None else self._heads(key, tokens), layout="thd")
        return query, key

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate into new tensors. Some models of vLLM call this method directly."""
        if self.ropes is None:
            args = (positions, query, key) if offsets is None else (positions, query, key, offsets)
            rotated: tuple[Tensor, Tensor | None] = super().forward_native(*args)  # type: ignore[misc]
            return rotated
        return self._rotate_out_of_place(
            _rotation_at(self._rope(self.ropes, positions), positions, offsets), query, key
        )

    def _heads(self, x: Tensor, tokens: int) -> Tensor:
        return x.view(tokens, -1, self.head_size)

    def _rotate_out_of_place(
        self, rotation: Rotation, query: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        tokens = rotation.cos.shape[0]
        q = self._heads(query, tokens)
        if key is None:
            return rotation(q, layout="thd").reshape(query.shape), None
        q, k = rotation(q, self._heads(key, tokens), layout="thd")
        return q.reshape(query.shape), k.reshape(key.shape)

    def extra_repr(self) -> str:
        """Return the text of vLLM's layer, followed by the rope."""
        text: str = super().extra_repr()
        return text if self.rope is None else f"{text}, {self.rope}"


def _rotation_at(rope: Rope, positions: Tensor, offsets: Tensor | None) -> Rotation:
    offset_positions = positions if offsets is None else positions + offsets
    return rope.at(offset_positions.flatten() if rope.axes is None else offset_positions)


def _shared_rotation(rope: Rope, positions: Tensor) -> Rotation:
    """Return the Rotation at these positions. The first layer of a forward pass computes it, and the others reuse it.

    The Rotation is stored in vLLM's forward context, which is new in each pass. The address and the shape of a
    tensor do not tell its positions from those of another pass, because vLLM writes the positions of every pass into
    the same buffer. If a pass uses several tensors of positions, each of them gets its own Rotation.
    """
    from vllm import forward_context

    if not forward_context.is_forward_context_available():
        return _rotation_at(rope, positions, None)
    context = forward_context.get_forward_context()
    rotations: dict[int, tuple[Rope, Tensor, Rotation]] = context.additional_kwargs.setdefault(_KEY, {})
    entry = rotations.get(id(rope))
    if entry is None or entry[1] is not positions:
        entry = (rope, positions, _rotation_at(rope, positions, None))
        rotations[id(rope)] = entry
    return entry[2]


def _override() -> bool:
    """Return whether vLLM was started with additional_config={"ropewalk": {"override": True}}.

    That option is part of the key of vLLM's compile cache.

    Raises:
        RopeError: additional_config["ropewalk"] is neither {"override": True} nor {"override": False}.
    """
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config().additional_config
    options = config.get("ropewalk", {"override": False}) if isinstance(config, dict) else {"override": False}
    if isinstance(options, dict) and list(options) == ["override"] and isinstance(options["override"], bool):
        return options["override"]
    must = 'additional_config["ropewalk"] must be {"override": True} or {"override": False}'
    raise error(WHO, must, shown(options), "Omit it to keep vLLM's rotation in layers whose table differs.")


def _length() -> int:
    """Return the length of the longest sequence that the engine can run, in tokens."""
    from vllm.config import get_current_vllm_config

    model = get_current_vllm_config().model_config
    if model is None:
        raise error(WHO, "vLLM must have a model", "a configuration without one", "Start an engine with a model.")
    length: int = model.max_model_len
    return length
