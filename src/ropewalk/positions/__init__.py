"""Build explicit positions for text, images, videos, and sequences that mix them.

Positions of text have shape `[seq]` or `[batch, seq]`. If tokens have several coordinates, the axes come first: `[axes,
seq]` or `[axes, batch, seq]`.
"""

from __future__ import annotations

from ropewalk.positions.augmentation import augment as augment
from ropewalk.positions.axes import axis as axis
from ropewalk.positions.axes import crop as crop
from ropewalk.positions.batches import padded as padded
from ropewalk.positions.batches import with_unrotated as with_unrotated
from ropewalk.positions.context_parallel import context_parallel as context_parallel
from ropewalk.positions.grids import grid as grid
from ropewalk.positions.grids import mesh as mesh
from ropewalk.positions.multimodal import Placed as Placed
from ropewalk.positions.multimodal import mrope as mrope
from ropewalk.positions.multimodal import xdrope as xdrope
from ropewalk.positions.processor import from_processor as from_processor
from ropewalk.positions.segments import Image as Image
from ropewalk.positions.segments import Markers as Markers
from ropewalk.positions.segments import Text as Text
from ropewalk.positions.segments import Video as Video
from ropewalk.positions.tokens import from_mask as from_mask
from ropewalk.positions.tokens import packed as packed
from ropewalk.positions.tokens import ragged as ragged
