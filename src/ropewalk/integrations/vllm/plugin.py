"""The entry point of vLLM's plugins: its rotary classes are replaced where `VLLM_PLUGINS` names ropewalk."""

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
TRIED = "0.32.0"  # the version with which this was tried
logger = logging.getLogger("vllm.ropewalk")

_RPC = "ropewalk_state"
# Their own code for the CPU returns new tensors; that of the others rotates in place.
_FUNCTIONAL = {"DeepseekScalingRotaryEmbedding", "Phi3LongRoPEScaledRotaryEmbedding", "MRotaryEmbedding"}


def asked() -> bool:
    """Whether `VLLM_PLUGINS` names ropewalk, as vLLM reads it. Where it is not set, vLLM loads every plugin."""
    return "ropewalk" in os.environ.get("VLLM_PLUGINS", "").split(",")


def register() -> None:
    """Let vLLM make ropewalk's layers in the place of its own. vLLM calls it in each of its processes.

    It does nothing unless `VLLM_PLUGINS` names ropewalk. That variable is part of the key of vLLM's compile cache, so
    this adds a name made of ropewalk's sources to it, which is no plugin: a graph that was compiled without
    ropewalk, or with another one, is never run with this one. A second call changes nothing.

    Raises:
        RopeError: this vLLM has no such place for layers, or another plugin has taken it.
    """
    if not asked():
        logger.info("ropewalk is installed and off. VLLM_PLUGINS=ropewalk switches it on.")
        return
    custom_op, package, worker = _vllm()
    from ropewalk.integrations.vllm.layers import Layer
    from ropewalk.integrations.vllm.ropes import SCHEMES

    _mark()
    if getattr(worker, _RPC, None) is not None:
        return
    registry = custom_op.op_registry_oot
    theirs = {name: getattr(package, name) for name in SCHEMES}
    taken = [registry.get(name, cls) for name, cls in theirs.items()]
    taken = [cls for cls in taken if cls.__module__.partition(".")[0] != "vllm"]
    if taken:
        got = ", ".join(f"{cls.__name__} ({cls.__module__})" for cls in taken)
        raise error(WHO, "no other plugin may replace vLLM's rotary layers", got, "Name one of them in VLLM_PLUGINS.")
    for name, cls in theirs.items():
        made = _stand_in(Layer, name, cls)
        if issubclass(cls, custom_op.CustomOp):  # vLLM looks its name up when one is made
            registry[name] = made
        else:
            setattr(package, name, made)
    setattr(worker, _RPC, lambda self: state())


def report(llm: Any) -> list[dict[str, Any]]:
    """What rotates in a running engine, for each of its workers: calls of this are safe at any time.

    Args:
        llm: a `vllm.LLM`. A server gives the same for the method "ropewalk_state" at `/collective_rpc`, which vLLM
            serves with `VLLM_SERVER_DEV_MODE=1`, and an `AsyncLLM` for `await llm.collective_rpc("ropewalk_state")`.

    Returns:
        For each worker: "process" (its number), "layers" (what rotates through ropewalk: class, rope, and "calls", the
        rotations done so far outside of compiled code), "left" (what rotates as vLLM does: class and "why"). A layer is
        shared by all layers of the model that have the same rope. Compiled code holds the rotation itself, and is not
        counted. Both are empty for a model whose rotation is no layer of vLLM (those run by transformers' own code).

    Raises:
        RopeError: the plugin is not in force in the workers, or llm is asynchronous.
    """
    try:
        states = llm.collective_rpc(_RPC)
    except Exception as e:
        if not re.search(rf"'{_RPC}' is not implemented|no attribute '{_RPC}'", str(e)):  # in one process, in several
            raise
        cure = "Install ropewalk beside vLLM, and name it in VLLM_PLUGINS, without blanks, before vLLM starts."
        raise error(WHO, "the plugin must be in force", "workers that do not know it", cure) from e
    if not isinstance(states, list):
        if inspect.iscoroutine(states):
            states.close()
        cure = f'Ask it by await llm.collective_rpc("{_RPC}").'
        raise error(WHO, "llm must be a vllm.LLM", type(llm).__name__, cure)
    return states


def state() -> dict[str, Any]:
    """What `report` says of this process."""
    from ropewalk.integrations.vllm.layers import LAYERS, Layer

    _, package, _ = _vllm()
    served = [layer for layer in LAYERS if layer.rope is not None]
    left = [{"class": layer.vllm_name, "why": layer.reason} for layer in LAYERS if layer.rope is None]
    for layer in package._ROPE_DICT.values():
        if not isinstance(layer, Layer):
            left.append({"class": type(layer).__name__, "why": "ropewalk has no rope for this class"})
    return {
        "process": os.getpid(),
        "layers": [{"class": each.vllm_name, "rope": str(each.rope), "calls": each.calls} for each in served],
        "left": left,
    }


def _mark() -> None:
    """Add a name made of ropewalk's sources to VLLM_PLUGINS, for the key of vLLM's compile cache."""
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


def _vllm() -> tuple[Any, Any, Any]:
    """vLLM's module with the registry of layers from outside, its package of rotary layers, and its workers' class."""
    try:
        custom_op = importlib.import_module("vllm.model_executor.custom_op")
        _ = custom_op.op_registry_oot, custom_op.CustomOp
        package = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
        worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    except (ImportError, AttributeError) as e:
        must = f"vLLM must be installed, with its registry of layers (tried with {TRIED})"
        raise error(
            WHO, must, f"{type(e).__name__}: {e}", "Install that version, or drop ropewalk from VLLM_PLUGINS."
        ) from e
    return custom_op, package, worker


def _stand_in(layer: type, name: str, theirs: type) -> type:
    """The class that vLLM makes in the place of one of its own."""
    members = {"vllm_name": name, "in_place": name not in _FUNCTIONAL, "__module__": layer.__module__}
    if hasattr(theirs, "name"):
        members["name"] = theirs.name  # custom_ops=["+rotary_embedding"] speaks of it
    return type(name, (layer, theirs), members)
