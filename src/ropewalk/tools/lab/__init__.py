"""The lab: train small language models, and measure context-extension methods on them."""

import importlib.util

from ropewalk import _checks

if importlib.util.find_spec("safetensors") is None:
    raise _checks.missing_package("lab", "safetensors", "lab")
