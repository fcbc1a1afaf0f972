"""Build explicit positions for text, images, videos, and sequences that mix them.

Positions of text have shape `[seq]` or `[batch, seq]`. If tokens have several coordinates, the axes come first: `[axes,
seq]` or `[axes, batch, seq]`.
"""

from __future__ import annotations

from ropewalk.positions.augmentation import augment
from ropewalk.positions.axes import axis, crop
from ropewalk.positions.batches import padded, with_unrotated
from ropewalk.positions.context_parallel import context_parallel
from ropewalk.positions.grids import grid, mesh
from ropewalk.positions.multimodal import Placed, mrope, xdrope
from ropewalk.positions.processor import from_processor
from ropewalk.positions.segments import Image, Markers, Text, Video
from ropewalk.positions.tokens import from_mask, packed, ragged

__all__ = [
    "Image", "Markers", "Placed", "Text", "Video", "augment", "axis", "context_parallel", "crop", "from_mask",
    "from_processor", "grid", "mesh", "mrope", "packed", "padded", "ragged", "with_unrotated", "xdrope",
]  # fmt: skip
__dir__ = __all__.copy
