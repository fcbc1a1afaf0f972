"""The frequencies that a rope has in deployed code, whose float32 operations round one after the other.

What they are is said by each scheme. Here they are made once, kept, and given to the compiler as constants.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ropewalk import _checks, _fixed_point
from ropewalk.axes import Axes
from ropewalk.schemes import Scaling, Scheme, default

_MOST_KEPT = 1024


def frequencies(
    base: float, rotary_dim: int, scaling: Scaling | None, axes: Axes | None = None
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Radians per position of each pair, exactly float32 numbers; and the same as steps (see `_fixed_point`).

    Raises:
        RopeError: one of them is not finite in float32.
    """
    return _cached_frequencies(base, rotary_dim, scaling, axes)


# What torch.compiler.assume_constant_result does, which would import the compiler (1.5 s) for those who do not compile.
frequencies._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(_MOST_KEPT)
def _cached_frequencies(
    base: float, rotary_dim: int, scaling: Scaling | None, axes: Axes | None = None
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    make = default.inv_freq_float32 if scaling is None else cast(Scheme, scaling).inv_freq_float32
    # In a thread of its own, which no mode of the caller reaches: fake tensors, functorch, a default device.
    with ThreadPoolExecutor(1) as apart:

        def progression(channels: int) -> tuple[float, ...]:
            return apart.submit(make, base, channels).result()

        inv_freq = progression(rotary_dim) if axes is None else axes.of_each_pair(progression)
    for w in inv_freq:
        if not math.isfinite(w):
            must = "frequencies must be finite in float32"
            raise _checks.error("Rope.at", must, f"{w}", 'Take numerics="exact".')
    return inv_freq, tuple(_fixed_point.step(w) for w in inv_freq)
