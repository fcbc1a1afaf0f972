"""Replacements of vLLM's rotary layers, which inherit from them and rotate through ropewalk.

A layer that ropewalk cannot describe, or whose table has other numbers, keeps vLLM's rotation and logs that.
`cos_sin_cache` does not change, because fused kernels of vLLM read it.
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
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation

logger = logging.getLogger("vllm.ropewalk")

# The layers of this process, for `report`.
LAYERS: weakref.WeakSet[Layer] = weakref.WeakSet()
_KEPT = "ropewalk"


class Layer(torch.nn.Module):
    """The common part of the replacements. vLLM's class follows it in the order of inheritance.

    `ropes` holds the rope in both pairings, keyed by `is_neox_style`, because models change that attribute after they
    have built the layer. For M-RoPE it also holds the rope of text, whose positions have one axis. It is None if the
    layer keeps vLLM's rotation, and `reason` says why. `max_position_asked_for` is the length that was passed to the
    layer, which M-RoPE does not store when it makes a longer table.
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
            logger.warning("%s is left as it was: %s", self.vllm_name, self.reason)
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
        """Compare the rope with vLLM's table. A difference is an error, or with the override a warning."""
        differs = difference(rope, self._first_rows())
        if differs and not override:
            fix = 'It rotates as vLLM does; additional_config={"ropewalk": {"override": True}} takes the numbers.'
            raise error(WHO, "vLLM's table must be what the numbers of the layer mean", differs, fix)
        if differs:
            logger.warning("%s rotates by its numbers, as asked; vLLM's table has %s", self.vllm_name, differs)

    def _compute_cos_sin_cache(self, *args: Any) -> Tensor:
        """Compute vLLM's own table. Keep its first rows until the layer is built, because it is rounded afterwards."""
        table: Tensor = super()._compute_cos_sin_cache(*args)  # type: ignore[misc]
        self._table = (*self._table, table[:2])
        return table

    def _first_rows(self) -> Tensor:
        """Rows 0 and 1 of the float32 table that the layer uses. LongRoPE makes a short table and then a long one."""
        if not self._table:
            raise error(WHO, "vLLM must have made a table", "none", "It rotates as vLLM does.")
        return self._table[int(getattr(self, "use_long_rope", False))]

    @property
    def rope(self) -> Rope | None:
        """The rope in the current pairing of the layer, with its axes."""
        return None if self.ropes is None else self.ropes[getattr(self, "is_neox_style", True), False]

    def _rope(self, ropes: dict[tuple[bool, bool], Rope], positions: Tensor) -> Rope:
        """The rope for positions `[tokens]` or `[axes, tokens]`."""
        return ropes[getattr(self, "is_neox_style", True), positions.ndim == 1]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query, and key unless it is None: `[tokens, heads · head_size]` or `[tokens, heads, head_size]`."""
        if self.ropes is None:
            args = (positions, query, key) if offsets is None else (positions, query, key, offsets)
            done: tuple[Tensor, Tensor | None] = super().forward(*args)
            return done
        rope = self._rope(self.ropes, positions)
        if torch.compiler.is_compiling():
            return self._rotate_out_of_place(_rotation_at(rope, positions, offsets), query, key)
        self.calls += 1
        if self.calls == 1:
            logger.info("first rotation by ropewalk: %s", rope)
        rotation = (
            _rotation_of_this_pass(rope, positions) if offsets is None else _rotation_at(rope, positions, offsets)
        )
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
            done: tuple[Tensor, Tensor | None] = super().forward_native(*args)  # type: ignore[misc]
            return done
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
        """The text of vLLM's layer, and the rope."""
        text: str = super().extra_repr()
        return text if self.rope is None else f"{text}, {self.rope}"


def _rotation_at(rope: Rope, positions: Tensor, offsets: Tensor | None) -> Rotation:
    offset_positions = positions if offsets is None else positions + offsets
    return rope.at(offset_positions.flatten() if rope.axes is None else offset_positions)


def _rotation_of_this_pass(rope: Rope, positions: Tensor) -> Rotation:
    """The rotation of these positions, which the first layer of a forward pass computes and the others reuse.

    It is stored in vLLM's forward context, which is new in each pass. vLLM writes the positions of all passes into one
    buffer, so neither the address nor the shape tells whether they are the same. Within a pass, another tensor of
    positions gets another rotation.
    """
    from vllm import forward_context

    if not forward_context.is_forward_context_available():
        return _rotation_at(rope, positions, None)
    context = forward_context.get_forward_context()
    kept: dict[int, tuple[Rope, Tensor, Rotation]] = context.additional_kwargs.setdefault(_KEPT, {})
    found = kept.get(id(rope))
    if found is None or found[1] is not positions:
        found = (rope, positions, _rotation_at(rope, positions, None))
        kept[id(rope)] = found
    return found[2]


def _override() -> bool:
    """Whether additional_config={"ropewalk": {"override": True}} was passed to vLLM, which its compile cache includes.

    Raises:
        RopeError: additional_config["ropewalk"] is something else.
    """
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config().additional_config
    options = config.get("ropewalk", {"override": False}) if isinstance(config, dict) else {"override": False}
    if isinstance(options, dict) and list(options) == ["override"] and isinstance(options["override"], bool):
        return options["override"]
    must = 'additional_config["ropewalk"] must be {"override": True} or {"override": False}'
    raise error(WHO, must, shown(options), "Omit it to keep vLLM's rotation if its table differs.")


def _length() -> int:
    """The length of the longest sequence that the engine will run, in tokens."""
    from vllm.config import get_current_vllm_config

    model = get_current_vllm_config().model_config
    if model is None:
        raise error(WHO, "vLLM must have a model", "a configuration without one", "Start an engine with a model.")
    length: int = model.max_model_len
    return length
