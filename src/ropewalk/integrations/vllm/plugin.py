"""The entry point of the vLLM plugin. It replaces vLLM's rotary classes if `VLLM_PLUGINS` names ropewalk."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import logging
import os
import re
from pathlib import Path
from typing import Any

from ropewalk._checks import error

WHO = "ropewalk in vLLM"
TESTED = "0.32.0"  # the version of vLLM with which this plugin is tested
logger = logging.getLogger("vllm.ropewalk")

_RPC = "ropewalk_state"
# On the CPU, these classes of vLLM return new tensors. The others rotate q and k in place.
_FUNCTIONAL = {"DeepseekScalingRotaryEmbedding", "Phi3LongRoPEScaledRotaryEmbedding", "MRotaryEmbedding"}


def is_enabled() -> bool:
    """Return whether `VLLM_PLUGINS` names ropewalk.

    Without that variable, vLLM loads every installed plugin, but this one stays off.
    """
    return "ropewalk" in os.environ.get("VLLM_PLUGINS", "").split(",")


def register() -> None:
    """Make vLLM create ropewalk's layers instead of its own. vLLM calls this in each of its processes.

    This function does nothing unless `VLLM_PLUGINS` names ropewalk. A second call changes nothing.

    `VLLM_PLUGINS` is part of the key of vLLM's compile cache. A hash of ropewalk's sources is added to the variable, as
    a name that no plugin has. So vLLM never runs a graph that was compiled without ropewalk or with another version of
    ropewalk.

    Raises:
        RopeError: vLLM is not installed or has no registry for layers, or another plugin has replaced the rotary
            layers.
    """
    if not is_enabled():
        logger.info("ropewalk is installed but not enabled. Set VLLM_PLUGINS=ropewalk to enable it.")
        return
    custom_op, package, worker = _import_vllm()
    from ropewalk.integrations.vllm.layers import Layer
    from ropewalk.integrations.vllm.ropes import SCHEMES

    _mark_compile_cache()
    if getattr(worker, _RPC, None) is not None:
        return
    registry = custom_op.op_registry_oot
    replaced = {name: getattr(package, name) for name in SCHEMES}
    conflicts = [registry.get(name, cls) for name, cls in replaced.items()]
    conflicts = [cls for cls in conflicts if cls.__module__.partition(".")[0] != "vllm"]
    if conflicts:
        got = ", ".join(f"{cls.__name__} ({cls.__module__})" for cls in conflicts)
        raise error(
            WHO,
            "no other plugin may replace vLLM's rotary layers",
            got,
            "Name only one in VLLM_PLUGINS.",
        )
    for name, cls in replaced.items():
        replacement = _replacement(Layer, name, cls)
        if issubclass(cls, custom_op.CustomOp):  # vLLM looks up its name in the registry when it creates an object
            registry[name] = replacement
        else:
            setattr(package, name, replacement)
    setattr(worker, _RPC, lambda self: state())


def report(llm: Any) -> list[dict[str, Any]]:
    """Report which layers of a running engine rotate through ropewalk, for each of its workers.

    Call this at any time. For an `AsyncLLM`, call `await llm.collective_rpc("ropewalk_state")` instead. For a server
    that was started with `VLLM_SERVER_DEV_MODE=1`, request the method "ropewalk_state" at `/collective_rpc`. Both
    return the same list as this function.

    Args:
        llm: a `vllm.LLM`.

    Returns:
        A dict for each worker. "process" is the process id. "layers" lists the rotary layers that rotate through
        ropewalk, with "class", "rope" and "calls", the number of rotations so far. "left" lists the rotary layers that
        keep vLLM's rotation, with "class" and "why". All layers of the model with the same rope share one rotary layer.
        Rotations in compiled code are not counted. Both lists are empty for a model that does not use vLLM's rotary
        layers, such as one that runs in the code of transformers.

    Raises:
        RopeError: the plugin is not active in the workers, or llm is asynchronous.
    """
    try:
        states = llm.collective_rpc(_RPC)
    except Exception as e:
        if not re.search(rf"'{_RPC}' is not implemented|no attribute '{_RPC}'", str(e)):  # in one process, in several
            raise
        fix = "Install ropewalk in the environment of vLLM, and set VLLM_PLUGINS=ropewalk before vLLM starts."
        raise error(WHO, "the plugin must be active", "workers that do not have it", fix) from e
    if not isinstance(states, list):
        if inspect.iscoroutine(states):
            states.close()
        fix = f'Call await llm.collective_rpc("{_RPC}") instead.'
        raise error(WHO, "llm must be a vllm.LLM", type(llm).__name__, fix)
    return states


def state() -> dict[str, Any]:
    """Return the report of this process, in the form of one entry of `report`."""
    from ropewalk.integrations.vllm.layers import LAYERS, Layer

    _, package, _ = _import_vllm()
    served = [layer for layer in LAYERS if layer.rope is not None]
    left = [{"class": layer.vllm_name, "why": layer.reason} for layer in LAYERS if layer.rope is None]
    for layer in package._ROPE_DICT.values():
        if not isinstance(layer, Layer):
            left.append({"class": type(layer).__name__, "why": "ropewalk has no rope for this class"})
    return {
        "process": os.getpid(),
        "layers": [{"class": layer.vllm_name, "rope": str(layer.rope), "calls": layer.calls} for layer in served],
        "left": left,
    }


def _mark_compile_cache() -> None:
    """Add a hash of ropewalk's sources to VLLM_PLUGINS, which is part of the key of vLLM's compile cache."""
    mark = f"ropewalk-{_sources()}"
    names = os.environ["VLLM_PLUGINS"].split(",")
    if mark not in names:
        os.environ["VLLM_PLUGINS"] = ",".join([*names, mark])


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _import_vllm() -> tuple[Any, Any, Any]:
    """Import the module with vLLM's registry of layers, the package of its rotary layers, and its worker class."""
    try:
        custom_op = importlib.import_module("vllm.model_executor.custom_op")
        _ = custom_op.op_registry_oot, custom_op.CustomOp
        package = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
        worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    except (ImportError, AttributeError) as e:
        must = f"vLLM must be installed, with its registry of layers (tested with {TESTED})"
        raise error(
            WHO, must, f"{type(e).__name__}: {e}", "Install that version, or drop ropewalk from VLLM_PLUGINS."
        ) from e
    return custom_op, package, worker


def _replacement(layer: type, name: str, replaced: type) -> type:
    """Create the class that replaces a class of vLLM.

    Args:
        layer: ropewalk's base class.
        name: the name of vLLM's class.
        replaced: vLLM's class.
    """
    members = {"vllm_name": name, "in_place": name not in _FUNCTIONAL, "__module__": layer.__module__}
    if hasattr(replaced, "name"):
        members["name"] = replaced.name  # the name in custom_ops=["+rotary_embedding"]
    return type(name, (layer, replaced), members)
