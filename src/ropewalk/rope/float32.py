"""Compute and cache the float32 frequencies with which deployed code, such as transformers, rotates.

Deployed code rounds after each float32 operation, so its frequencies differ from the exact ones. Each scaling scheme
repeats these operations in its method `inv_freq_float32`. The cached results are constants for torch.compile.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ropewalk import _checks
from ropewalk.angles import fixed_point
from ropewalk.rope.axes import Axes
from ropewalk.schemes import Scaling, Scheme, default

_MAX_CACHED = 1024


def frequencies(
    base: float, rotary_dim: int, scaling: Scaling | None, axes: Axes | None = None
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the float32 frequency of each pair in radians per position, and the same frequencies as phase steps.

    A phase step is a 64-bit fraction of a turn per position (`angles.fixed_point`).

    Raises:
        RopeError: a frequency is not finite in float32.
    """
    return _cached_frequencies(base, rotary_dim, scaling, axes)


# The effect of torch.compiler.assume_constant_result, which would import the compiler (1.5 s) even if it is not used.
frequencies._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(_MAX_CACHED)
def _cached_frequencies(
    base: float, rotary_dim: int, scaling: Scaling | None, axes: Axes | None = None
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    lengths = (rotary_dim // 2,) if axes is None else axes.lengths
    # A separate thread is not affected by modes of the caller: fake tensors, functorch, a default device.
    with ThreadPoolExecutor(1) as executor:

        def progression(length: int, scheme: Scaling | None) -> tuple[float, ...]:
            compute = default.inv_freq_float32 if scheme is None else cast(Scheme, scheme).inv_freq_float32
            return executor.submit(compute, base, 2 * length).result()

        schemes = [None] * len(lengths) if scaling is None else scaling.of_axes(len(lengths))
        progressions = list(map(progression, lengths, schemes))
    inv_freq = progressions[0] if axes is None else axes.of_each_pair(progressions)
    for w in inv_freq:
        if not math.isfinite(w):
            must = "frequencies must be finite in float32"
            raise _checks.error("Rope.at", must, f"{w}", 'Pass numerics="exact".')
    return inv_freq, tuple(fixed_point.phase_step(w) for w in inv_freq)
