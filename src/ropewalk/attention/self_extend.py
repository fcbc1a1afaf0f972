"""Self-Extend: positions of distant tokens in groups, those of near ones as they are. It needs no training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rope import Rope


@dataclass(frozen=True)
class SelfExtend:
    """A rope under which distant tokens seem nearer, so that no distance is longer than those of training.

    A key at position n is turned as if the distance to the query at position m were

        m − n                              where m − n < window
        ⌊m/G⌋ − ⌊n/G⌋ + window − ⌊window/G⌋   elsewhere, G = group

    which grows by 1 for G tokens. A model trained on L tokens meets no new distance up to (L − window) · G + window
    tokens. Jin et al., "LLM Maybe LongLM", https://arxiv.org/abs/2401.01325, section 3; the authors' code
    (`datamllab/LongLM`) has the same rule, in some files with window / G not rounded.

    `RotaryAttention` takes what `at` returns in the place of a `Rotation`. Its attention is plain PyTorch in two
    passes, merged before the softmax: twice the scores, and all of them in memory.

    Args:
        rope: how fast each pair turns; it must be static, and have one axis.
        group: positions that are made one, in tokens, at least 1; 1 changes nothing.
        window: distance from which tokens are grouped, in tokens, at least 0.

    Raises:
        RopeError: rope is no Rope, not static or of several axes, or a number is no such integer.

    Example:
        >>> extended = SelfExtend(Rope(head_dim=4, base=10_000.0, pairing="half"), group=4, window=8)
        >>> rotation = extended.at(torch.arange(32))  # made once, handed to every layer
        >>> rotation.far.shape
        torch.Size([32, 32])
    """

    rope: Rope
    group: int
    window: int

    def __post_init__(self) -> None:
        if not isinstance(self.rope, Rope):
            raise _checks.error("SelfExtend", "rope must be a Rope", _checks.shown(self.rope), "Pass one as rope.")
        if self.rope.axes is not None:
            must, cure = "rope must have one axis", "Grouped positions are those of text; pass a rope without axes."
            raise _checks.error("SelfExtend", must, repr(self.rope), cure)
        if not self.rope.is_static:
            must = "rope must be static"
            raise _checks.error("SelfExtend", must, repr(self.rope), "Use rope.at_length(n), once, for the longest.")
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
        """Both rotations of these tokens, and which pairs are far. Once for each forward pass.

        Args:
            positions: of the new tokens: int32 or int64, `[seq]` or `[batch, seq]`.
            key_positions: of all keys, where a cache holds more than the new ones: `[batch, keys]`, as
                `CacheStep.key_positions`. Those of the new tokens when None.
            device, dtype: as in `Rope.at`.

        Returns:
            What `RotaryAttention` takes in the place of a `Rotation`. Cached keys are moved by rotation only
            (`Rope.shift`), so that the attention factor is not applied a second time.

        Raises:
            RopeError: positions are no integers of such a shape.
        """
        near = self.rope.at(positions, device=device, dtype=dtype)
        keys = positions if key_positions is None else key_positions
        for name, value in (("positions", positions), ("key_positions", keys)):
            if value.dtype not in (torch.int32, torch.int64) or value.ndim not in (1, 2):
                raise _checks.error(
                    "SelfExtend.at",
                    f"{name} must be int32 or int64 of shape [tokens] or [batch, tokens]",
                    _checks.described(value),
                    "Pass whole positions: parts of a token cannot be grouped.",
                )
        grouped = positions // self.group + (self.window - self.window // self.group)
        far_queries = self.rope.at(grouped, device=device, dtype=dtype)
        far_keys = self.rope.shift(keys // self.group - keys, device=device, dtype=dtype)
        distance = positions.unsqueeze(-1) - keys.unsqueeze(-2)
        far = distance >= self.window
        far = far.unsqueeze(1) if far.ndim == 3 else far
        return TwoPass(near, far_queries, far_keys, far if device is None else far.to(device))
