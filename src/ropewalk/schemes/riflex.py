"""RIFLEx: one slower pair of the time axis, so that longer videos of a trained model do not repeat themselves.

Source: Zhao et al. 2025, "RIFLEx: A Free Lunch for Length Extrapolation in Video Diffusion Transformers",
arXiv:2502.15894, section 4; `get_1d_rotary_pos_embed_riflex` in riflex_utils.py of thu-ml/RIFLEx at 48889fb.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme


@dataclass(frozen=True)
class RIFLEx(Scheme):
    """RIFLEx: one pair completes at most `turns` turns within the video. Other frequencies do not change.

    It belongs to the time axis alone: pass `PerAxis([RIFLEx(...), None, None])`. It does not change a video in which
    the pair completes no more turns without it.

    Args:
        pair: index of the pair among those of its axis, from 0. It is the one whose `Rope.wavelength` (the paper's N_k)
            is nearest to the number of latent frames after which videos of the model repeat. The paper counts from 1:
            its k is pair + 1 (4 in HunyuanVideo, 2 in CogVideoX). In Wan 2.1 its authors advise 6, not the nearest, 4.
        length: positions of the video on this axis, in latent frames: at least 1.
        turns: turns of the pair within the video, greater than 0 and at most 1. The authors' code has 0.9.

    Raises:
        RopeError: a value is outside its range, or the axis has no such pair.

    Examples:
        >>> RIFLEx(pair=0, length=100).inv_freq(10_000.0, 4)
        (0.05654866776461628, 0.01)
    """

    rope_type: ClassVar[str] = "riflex"
    in_configs: ClassVar[bool] = False
    pair: int
    length: int
    turns: float = 0.9

    def __post_init__(self) -> None:
        pair = _checks.integer("RIFLEx", "pair", self.pair, at_least=0, at_most=_checks.MAX_HEAD_DIM)
        object.__setattr__(self, "pair", pair)
        self._set_length("length")
        self._set_number("turns", above=0.0, at_most=1.0)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the default frequencies of the axis, the pair's as low as needed, in radians per position."""
        return self._with_pair(default.inv_freq(base, rotary_dim))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies that the authors' code computes in float32."""
        import torch

        return default.to_floats(
            torch.tensor(self._with_pair(default.inv_freq_float32(base, rotary_dim)), dtype=torch.float32, device="cpu")
        )

    def _with_pair(self, inv_freq: tuple[float, ...]) -> tuple[float, ...]:
        if self.pair >= len(inv_freq):
            must = f"pair must be less than {len(inv_freq)}, the number of pairs of the axis"
            fix = "Count the pairs of this axis alone, from 0."
            raise _checks.error("RIFLEx", must, str(self.pair), fix)
        slowed = min(inv_freq[self.pair], self.turns * 2 * math.pi / self.length)
        return (*inv_freq[: self.pair], slowed, *inv_freq[self.pair + 1 :])
