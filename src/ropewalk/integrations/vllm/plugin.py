"""The entry point of vLLM's plugins: its rotary classes are replaced where `VLLM_PLUGINS` names ropewalk."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from ropewalk._checks import error

WHO = "ropewalk in vLLM"
TRIED = "0.32.0"  # the version with which this was tried
logger = logging.getLogger("vllm.ropewalk")

_RPC = "ropewalk_state"
_FUNCTIONAL = {"DeepseekScalingRotaryEmbedding", "Phi3LongRoPEScaledRotaryEmbedding", "MRotaryEmbedding"}


def asked() -> bool:
    """Whether `VLLM_PLUGINS` names ropewalk. vLLM loads every plugin that is installed where it is not set."""
    return "ropewalk" in [name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")]


def register() -> None:
    """Let vLLM make ropewalk's layers in the place of its own. vLLM calls it in each of its processes.

    It does nothing unless `VLLM_PLUGINS` names ropewalk; that name is also part of the key of vLLM's compile cache, so
    that a graph made without ropewalk is never run with it. A second call changes nothing.

    Raises:
        RopeError: this vLLM has no such place for layers, or another plugin has taken it.
    """
    if not asked():
        logger.info("ropewalk is installed and off. VLLM_PLUGINS=ropewalk switches it on.")
        return
    registry, package, worker = _vllm()
    from ropewalk.integrations.vllm.layers import Layer
    from ropewalk.integrations.vllm.ropes import SCHEMES

    if getattr(worker, _RPC, None) is not None:
        return
    stand_ins = {name: _stand_in(Layer, name, getattr(package, name)) for name in SCHEMES}
    taken = [name for name in stand_ins if name in registry]
    if taken:
        got = ", ".join(f"{name} ({registry[name].__module__})" for name in taken)
        raise error(WHO, "no other plugin may replace vLLM's rotary layers", got, "Name one of them in VLLM_PLUGINS.")
    for name, made in stand_ins.items():
        if hasattr(made, "forward_static"):  # a CustomOp: vLLM looks its name up when one is made
            registry[name] = made
        else:
            setattr(package, name, made)
    setattr(worker, _RPC, lambda self: state())


def report(llm: Any) -> list[dict[str, Any]]:
    """What rotates in a running engine, for each of its workers: calls of this are safe at any time.

    Args:
        llm: a `vllm.LLM`, or anything with its `collective_rpc`. A server gives the same for the method
            "ropewalk_state" at `/collective_rpc`, which vLLM serves with `VLLM_SERVER_DEV_MODE=1`.

    Returns:
        For each worker: "process" (its number), "layers" (what rotates through ropewalk: class, rope, and "calls", the
        rotations done so far outside of compiled code), "left" (what rotates as vLLM does, and why). A layer is shared
        by all layers of the model that have the same rope. Compiled code holds the rotation itself, and is not counted.

    Raises:
        RopeError: the plugin is not in force in the workers.
    """
    try:
        states: list[dict[str, Any]] = llm.collective_rpc(_RPC)
    except Exception as e:
        if _RPC not in str(e):
            raise
        cure = "Set VLLM_PLUGINS=ropewalk before vLLM starts, and look for 'Failed to load plugin' in its log."
        raise error(WHO, "the plugin must be in force", "workers that do not know it", cure) from e
    return states


def state() -> dict[str, Any]:
    """What `report` says of this process."""
    from ropewalk.integrations.vllm.layers import LAYERS, Layer

    _, package, _ = _vllm()
    served = [layer for layer in LAYERS if layer.rope is not None]
    left = {layer.vllm_name: layer.reason for layer in LAYERS if layer.rope is None}
    for layer in package._ROPE_DICT.values():
        if not isinstance(layer, Layer):
            left[type(layer).__name__] = "ropewalk has no rope for this class"
    return {
        "process": os.getpid(),
        "layers": [{"class": each.vllm_name, "rope": str(each.rope), "calls": each.calls} for each in served],
        "left": left,
    }


def _vllm() -> tuple[dict[str, Any], Any, Any]:
    """vLLM's registry of layers from outside, its package of rotary layers, and the base class of its workers."""
    try:
        registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
        package = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
        worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    except (ImportError, AttributeError) as e:
        must = f"vLLM must be installed, with its registry of layers (tried with {TRIED})"
        raise error(
            WHO, must, f"{type(e).__name__}: {e}", "Install that version, or drop ropewalk from VLLM_PLUGINS."
        ) from e
    return registry, package, worker


def _stand_in(layer: type, name: str, theirs: type) -> type:
    """The class that vLLM makes in the place of one of its own."""
    members = {"vllm_name": name, "in_place": name not in _FUNCTIONAL, "__module__": layer.__module__}
    if hasattr(theirs, "name"):
        members["name"] = theirs.name  # custom_ops=["+rotary_embedding"] speaks of it
    return type(name, (layer, theirs), members)
