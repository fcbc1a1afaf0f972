"""What the rounding of float32 explains. This module does not import torch."""

from __future__ import annotations

import numpy as np

FLOAT32 = 2.0**-22
"""The relative error that float32 code explains: four roundings, such as a power, its reciprocal and two of a scheme.

A frequency f is off by up to |ln f| · 2⁻²⁴ more, because the exponent of the power is rounded as well.
"""


def explained_error(inv_freq: np.ndarray) -> np.ndarray:
    """Return the error of frequencies that float32 code computes, as `FLOAT32` describes."""
    size = np.abs(inv_freq)
    logarithm = np.log(size, out=np.zeros_like(size), where=size > 0)
    error: np.ndarray = size * FLOAT32 + size * np.abs(logarithm) * 2.0**-24
    return error
