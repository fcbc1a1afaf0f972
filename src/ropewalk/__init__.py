"""ropewalk: rotary position embeddings (RoPE). Read a model's config, compute exact angles, rotate q and k.

    ropes = ropewalk.from_config("config.json")
    rotation = ropes.rope.at(torch.arange(seq))
    q, k = rotation(q, k, layout="bshd")

This module exports the public names. Each is imported on first use, so names that do not need torch do not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk import formats as formats
    from ropewalk import parallel as parallel
    from ropewalk import positions as positions
    from ropewalk import schemes as schemes
    from ropewalk import xpos as xpos
    from ropewalk._checks import RopeError as RopeError
    from ropewalk.attention import masks as masks
    from ropewalk.attention.attend import AttendingCache as AttendingCache
    from ropewalk.attention.few_tokens import paged_attention as paged_attention
    from ropewalk.attention.layer import RotaryAttention as RotaryAttention
    from ropewalk.attention.layer import RotaryEmbedding as RotaryEmbedding
    from ropewalk.attention.self_extend import SelfExtend as SelfExtend
    from ropewalk.attention.two_pass import TwoPass as TwoPass
    from ropewalk.cache.kv_cache import KVCache as KVCache
    from ropewalk.cache.move import move_keys as move_keys
    from ropewalk.cache.step import CacheStep as CacheStep
    from ropewalk.cache.step import LayerCache as LayerCache
    from ropewalk.configs import ModelRopes as ModelRopes
    from ropewalk.configs import QueryScale as QueryScale
    from ropewalk.configs import VisionRopes as VisionRopes
    from ropewalk.configs import from_config as from_config
    from ropewalk.integrations.glibc import keep_memory as keep_memory
    from ropewalk.kernels.backend import backends as backends
    from ropewalk.learned import LearnedRope as LearnedRope
    from ropewalk.rope.axes import Axes as Axes
    from ropewalk.rope.rope import Rope as Rope
    from ropewalk.rotation.api import Rotation as Rotation
    from ropewalk.rotation.qk_norm import QKNorm as QKNorm
    from ropewalk.rotation.store import rotate_and_store as rotate_and_store
    from ropewalk.schemes import NTK as NTK
    from ropewalk.schemes import DynamicNTK as DynamicNTK
    from ropewalk.schemes import Llama3 as Llama3
    from ropewalk.schemes import LongRoPE as LongRoPE
    from ropewalk.schemes import Proportional as Proportional
    from ropewalk.schemes import YaRN as YaRN
    from ropewalk.tools import check as conformance  # noqa: F401 - the public name differs
    from ropewalk.tools import diff as diff
    from ropewalk.tools import plots as plots

__version__ = "0.1.0"

_MODULE_OF = {
    "AttendingCache": "attention.attend",
    "Axes": "rope.axes",
    "CacheStep": "cache.step",
    "DynamicNTK": "schemes",
    "KVCache": "cache.kv_cache",
    "LayerCache": "cache.step",
    "LearnedRope": "learned",
    "Llama3": "schemes",
    "LongRoPE": "schemes",
    "ModelRopes": "configs",
    "NTK": "schemes",
    "Proportional": "schemes",
    "QKNorm": "rotation.qk_norm",
    "QueryScale": "configs",
    "VisionRopes": "configs",
    "Rope": "rope.rope",
    "RopeError": "_checks",
    "RotaryAttention": "attention.layer",
    "RotaryEmbedding": "attention.layer",
    "Rotation": "rotation.api",
    "SelfExtend": "attention.self_extend",
    "TwoPass": "attention.two_pass",
    "YaRN": "schemes",
    "backends": "kernels.backend",
    "from_config": "configs",
    "keep_memory": "integrations.glibc",
    "move_keys": "cache.move",
    "paged_attention": "attention.few_tokens",
    "rotate_and_store": "rotation.store",
}
_MODULES = {
    "conformance": "tools.check",
    "diff": "tools.diff",
    "formats": "formats",
    "masks": "attention.masks",
    "parallel": "parallel",
    "plots": "tools.plots",
    "positions": "positions",
    "schemes": "schemes",
    "xpos": "xpos",
}

__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"ropewalk.{_MODULES[name]}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"ropewalk.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'ropewalk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
