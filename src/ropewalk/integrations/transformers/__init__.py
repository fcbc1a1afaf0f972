"""Make models of transformers rotate through ropewalk. This package does not import transformers itself."""

from ropewalk.integrations.transformers.api import Accelerated, accelerate, restore

__all__ = ["Accelerated", "accelerate", "restore"]
__dir__ = __all__.copy
