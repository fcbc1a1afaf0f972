"""Classes that stand in the place of vLLM's rotary layers: they inherit from them, and rotate through ropewalk.

A layer that ropewalk cannot describe, or whose table says something else, rotates as vLLM does and says so in the log.
`cos_sin_cache` stays what it is: fused kernels of vLLM read it.
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

# Those of this process, for `report`.
LAYERS: weakref.WeakSet[Layer] = weakref.WeakSet()
_KEPT = "ropewalk"


class Layer(torch.nn.Module):
    """What the stand-ins have in common; the class of vLLM comes after it in the order of inheritance.

    `ropes` holds the rope in both pairings, by `is_neox_style`, which models change after they have built the layer,
    and for M-RoPE also the rope of text, whose positions have one axis. It is None where the layer rotates as vLLM
    does, and `reason` says why. `max_position_asked_for` is the length that vLLM was given: M-RoPE makes a longer
    table, and forgets it.
    """

    vllm_name: str
    in_place = True  # whether vLLM's own layer changes q and k, or returns new ones
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
        except Exception as e:  # another vLLM may have other attributes: its layer works all the same
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
        """Compare with vLLM's table; a difference is an error, or where the user asked for it a warning."""
        differs = difference(rope, self._first_rows())
        if differs and not override:
            cure = 'It rotates as vLLM does; additional_config={"ropewalk": {"override": True}} takes the numbers.'
            raise error(WHO, "vLLM's table must be what the numbers of the layer mean", differs, cure)
        if differs:
            logger.warning("%s rotates by its numbers, as asked; vLLM's table has %s", self.vllm_name, differs)

    def _compute_cos_sin_cache(self, *args: Any) -> Tensor:
        """vLLM's own. What it returns is kept until the layer is built: afterwards it is rounded."""
        table: Tensor = super()._compute_cos_sin_cache(*args)  # type: ignore[misc]
        self._table = (*self._table, table[:2])
        return table

    def _first_rows(self) -> Tensor:
        """Rows 0 and 1 of the float32 table that the layer uses; LongRoPE has made the short one and the long one."""
        if not self._table:
            raise error(WHO, "vLLM must have made a table", "none", "It rotates as vLLM does.")
        return self._table[int(getattr(self, "use_long_rope", False))]

    @property
    def rope(self) -> Rope | None:
        """The rope in the pairing that the layer has now, with its axes."""
        return None if self.ropes is None else self.ropes[getattr(self, "is_neox_style", True), False]

    def _rope(self, ropes: dict[tuple[bool, bool], Rope], positions: Tensor) -> Rope:
        """That for positions `[tokens]` or `[axes, tokens]`."""
        return ropes[getattr(self, "is_neox_style", True), positions.ndim == 1]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As vLLM's: query `[tokens, heads · head_size]` or `[tokens, heads, head_size]`, key the same or None."""
        if self.ropes is None:
            args = (positions, query, key) if offsets is None else (positions, query, key, offsets)
            done: tuple[Tensor, Tensor | None] = super().forward(*args)
            return done
        rope = self._rope(self.ropes, positions)
        if torch.compiler.is_compiling():
            return self._new(_made(rope, positions, offsets), query, key)
        self.calls += 1
        if self.calls == 1:
            logger.info("first rotation by ropewalk: %s", rope)
        rotation = _of_this_pass(rope, positions) if offsets is None else _made(rope, positions, offsets)
        if not self.in_place:
            return self._new(rotation, query, key)
        tokens = positions.shape[-1] if rope.axes is not None else positions.numel()
        rotation.apply_(self._heads(query, tokens), None if key is None else self._heads(key, tokens), layout="thd")
        return query, key

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The same in new tensors; some models of vLLM call it themselves."""
        if self.ropes is None:
            args = (positions, query, key) if offsets is None else (positions, query, key, offsets)
            done: tuple[Tensor, Tensor | None] = super().forward_native(*args)  # type: ignore[misc]
            return done
        return self._new(_made(self._rope(self.ropes, positions), positions, offsets), query, key)

    def _heads(self, x: Tensor, tokens: int) -> Tensor:
        return x.view(tokens, -1, self.head_size)

    def _new(self, rotation: Rotation, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        tokens = rotation.cos.shape[0]
        q = self._heads(query, tokens)
        if key is None:
            return rotation(q, layout="thd").reshape(query.shape), None
        q, k = rotation(q, self._heads(key, tokens), layout="thd")
        return q.reshape(query.shape), k.reshape(key.shape)

    def extra_repr(self) -> str:
        """vLLM's own, and the rope."""
        theirs: str = super().extra_repr()
        return theirs if self.rope is None else f"{theirs}, {self.rope}"


def _made(rope: Rope, positions: Tensor, offsets: Tensor | None) -> Rotation:
    places = positions if offsets is None else positions + offsets
    return rope.at(places.flatten() if rope.axes is None else places)


def _of_this_pass(rope: Rope, positions: Tensor) -> Rotation:
    """The rotation of these positions, made by the first layer of a forward pass and used by the others.

    It is kept in vLLM's forward context, which is new in each pass. The positions of all passes are written into one
    buffer, so that neither its address nor its shape says whether they are the same. Within a pass another tensor of
    positions gets another rotation.
    """
    from vllm import forward_context

    if not forward_context.is_forward_context_available():
        return _made(rope, positions, None)
    context = forward_context.get_forward_context()
    kept: dict[int, tuple[Rope, Tensor, Rotation]] = context.additional_kwargs.setdefault(_KEPT, {})
    found = kept.get(id(rope))
    if found is None or found[1] is not positions:
        found = (rope, positions, _made(rope, positions, None))
        kept[id(rope)] = found
    return found[2]


def _override() -> bool:
    """Whether vLLM was given additional_config={"ropewalk": {"override": True}}, which its compile cache knows.

    Raises:
        RopeError: it was given something else for ropewalk.
    """
    from vllm.config import get_current_vllm_config

    given = get_current_vllm_config().additional_config
    asked = given.get("ropewalk", {"override": False}) if isinstance(given, dict) else {"override": False}
    if isinstance(asked, dict) and list(asked) == ["override"] and isinstance(asked["override"], bool):
        return asked["override"]
    must = 'additional_config["ropewalk"] must be {"override": True} or {"override": False}'
    raise error(WHO, must, shown(asked), "Leave it out to keep vLLM's rotation where its table differs.")


def _length() -> int:
    """The longest sequence that the engine will run."""
    from vllm.config import get_current_vllm_config

    model = get_current_vllm_config().model_config
    if model is None:
        raise error(WHO, "vLLM must have a model", "a configuration without one", "Start an engine with a model.")
    length: int = model.max_model_len
    return length
