"""Self-Extend: group the positions of distant tokens, and keep those of near tokens. It needs no training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rope.rope import Rope


@dataclass(frozen=True)
class SelfExtend:
    """A rope that compresses long distances, so that none exceeds the distances of training.

    The distance between a query at position m and a key at position n becomes

        m − n                              if m − n < window
        ⌊m/G⌋ − ⌊n/G⌋ + window − ⌊window/G⌋   otherwise, with G = group

    so beyond the window the distance grows by 1 for every G tokens. A model trained on L tokens meets no new distance
    in texts of up to (L − window) · G + window tokens. Source: Jin et al., "LLM Maybe LongLM",
    https://arxiv.org/abs/2401.01325, section 3. The authors' code (`datamllab/LongLM`) has the same rule, but some of
    its files do not round window / G.

    Pass the result of `at` to `RotaryAttention` instead of a `Rotation`. Attention then runs in plain PyTorch, and
    computes the scores twice: for up to 64 tokens it keeps them in memory, for more the keys get twice the channels.

    Args:
        rope: the rope of the model. It must be static and have one axis.
        group: number of positions in a group, in tokens, at least 1. With 1, distances do not change.
        window: distance from which positions are grouped, in tokens, at least 0.

    Raises:
        RopeError: rope is not a static Rope with one axis, or group or window is out of range.

    Examples:
        >>> extended = SelfExtend(Rope(head_dim=4, base=10_000.0, pairing="half"), group=4, window=8)
        >>> rotation = extended.at(torch.arange(32))  # computed once, passed to every layer
        >>> rotation.far.shape
        torch.Size([32, 32])
    """

    rope: Rope
    group: int
    window: int

    def __post_init__(self) -> None:
        if not isinstance(self.rope, Rope):
            fix = "Read a model's with from_config(...).rope."
            raise _checks.error("SelfExtend", "rope must be a Rope", _checks.shown(self.rope), fix)
        if self.rope.axes is not None:
            must, fix = "rope must have one axis", "Self-Extend is for text only. Pass a rope without axes."
            raise _checks.error("SelfExtend", must, repr(self.rope), fix)
        if not self.rope.is_static:
            must = "rope must be static"
            fix = "Use rope.at_length(n) with the longest length n."
            raise _checks.error("SelfExtend", must, repr(self.rope), fix)
        _checks.length("SelfExtend", "group", self.group)
        _checks.length("SelfExtend", "window", self.window, at_least=0)

    def at(
        self,
        positions: Tensor,
        key_positions: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> TwoPass:
        """Return the rotations for near and for far pairs, and the mask of far pairs. Call this once per forward pass.

        Args:
            positions: positions of the new tokens, int32 or int64, `[seq]` or `[batch, seq]`.
            key_positions: positions of all keys, `[batch, keys]`: with a cache, `CacheStep.key_positions`. None means
                that the new tokens are the only keys.
            device, dtype: as in `Rope.at`.

        Returns:
            A `TwoPass` for `RotaryAttention`. It rotates cached keys by `Rope.shift`, so that the attention factor is
            not applied twice.

        Raises:
            RopeError: positions or key_positions has a wrong dtype or shape.
        """
        near = self.rope.at(positions, device=device, dtype=dtype)
        keys = positions if key_positions is None else key_positions
        for name, value in (("positions", positions), ("key_positions", keys)):
            if value.dtype not in (torch.int32, torch.int64) or value.ndim not in (1, 2):
                raise _checks.error(
                    "SelfExtend.at",
                    f"{name} must be int32 or int64 of shape [tokens] or [batch, tokens]",
                    _checks.describe(value),
                    "Pass integer positions; fractions of a token cannot be grouped.",
                )
        grouped = positions // self.group + (self.window - self.window // self.group)
        far_queries = self.rope.at(grouped, device=device, dtype=dtype)
        far_keys = self.rope.shift(keys // self.group - keys, device=device, dtype=dtype)
        far = positions.long() - self.window, keys.long()
        return TwoPass(near, far_queries, far_keys, far if device is None else (far[0].to(device), far[1].to(device)))
