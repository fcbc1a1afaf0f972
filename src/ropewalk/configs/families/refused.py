"""`Refused`: the `Architecture` of models that no `Rope` describes. Reading their configs raises an error."""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.layer_ropes import LayerRopes
from ropewalk.configs.reader import Reader


@dataclass(frozen=True)
class Refused(Architecture):
    """The `Architecture` of a model_type that no `Rope` describes.

    Args:
        why: the reason, in whole sentences, with an alternative if there is one.
    """

    why: str = ""
    is_supported = False

    def read(self, c: Reader) -> LayerRopes:
        """Raise a RopeError with the reason `why`."""
        must = "must name a model that a Rope describes"
        raise c.fields.error("model_type", must, repr(c.fields.get("model_type")), self.why)
