"""The vLLM plugin: verify each model that vLLM has loaded, if the environment variable ROPEWALK_VERIFY is set."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from ropewalk._checks import RopeError, error, shown

__all__ = ["register"]
__dir__ = __all__.copy

_WHO, _VARIABLE = "ropewalk in vLLM", "ROPEWALK_VERIFY"
TESTED = "0.32.0"  # the version of vLLM whose classes were tried
logger = logging.getLogger("vllm.ropewalk")


def register() -> None:
    """Have vLLM compare the rotary tables of each model with the model's config, after it has loaded the model.

    vLLM calls this in each of its processes. Nothing happens unless `ROPEWALK_VERIFY` is set: with "1", the log says
    for each model whether its tables are right; with "strict", a model whose tables are wrong is not served. A model
    that cannot be judged is served. A second call changes nothing.

    Raises:
        RopeError: the variable has another value, or vLLM has no model loaders where they are expected.
    """
    mode = os.environ.get(_VARIABLE, "")
    if mode in ("", "0"):
        return
    if mode not in ("1", "strict"):
        raise error(_WHO, f'{_VARIABLE} must be "1" or "strict"', shown(mode), "Unset it to verify nothing.")
    try:
        loader = importlib.import_module("vllm.model_executor.model_loader").BaseModelLoader
        classes = [cls for cls in _subclasses(loader) if "load_model" in vars(cls)]
    except (ImportError, AttributeError) as e:
        must = f"vLLM must be installed, with its model loaders (tested with {TESTED})"
        raise error(_WHO, must, f"{type(e).__name__}: {e}", f"Install that version, or unset {_VARIABLE}.") from e
    for cls in classes:
        if not hasattr(cls.load_model, "verified"):
            cls.load_model = _verifying(cls.load_model, strict=mode == "strict")


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


def _verifying(load_model: Callable[..., Any], *, strict: bool) -> Callable[..., Any]:
    """Return the method of a loader that loads a model, and then verifies it."""

    @functools.wraps(load_model)
    def load(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, vllm_config, model_config, *args, **kwargs)
        _verify(model, model_config, strict=strict)
        return model

    load.verified = True  # type: ignore[attr-defined]
    return load


def _verify(model: Any, model_config: Any, *, strict: bool) -> None:
    """Log what `conformance.verify` says of a model. With `strict`, raise a RopeError if it is wrong.

    It compares with the file of the model or, if vLLM was told to override it or it cannot be read, with vLLM's config.
    """
    from ropewalk import conformance

    file = [] if model_config.hf_overrides else [model_config.model]
    for config in (*file, model_config.hf_config):
        try:
            verified = conformance.verify(model, config)
            break
        except (RopeError, OSError) as e:
            unreadable = e
    else:
        logger.warning("not verified: %s", unreadable)
        return
    logger.log(logging.INFO if verified.verdict == "right" else logging.WARNING, "verified %s", verified)
    if strict and verified.verdict == "wrong":
        fix = f"Mend the config, or set {_VARIABLE}=1 to serve it all the same."
        raise error(_WHO, "the rotary tables of a model must be those of its config", str(verified), fix)
