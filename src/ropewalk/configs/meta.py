"""Meta's params.json (Llama 1 to 3.2): pairs interleaved, and a scaling whose factor the format does not carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ropewalk._checks import RopeError, error, integer, nearest, number, shown
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.rope import Rope
from ropewalk.schemes import Llama3

_SOURCE = "meta-llama/llama-models at a9c89c47, models/llama3/model.py: torch.view_as_complex"
_KEYS = ("rope_theta", "use_scaled_rope", "rope_scaling_factor")
_ROPE_WORDS = frozenset({"rope", "rotary", "theta", "yarn"})
_MAX_LAYERS = 10_000


def is_params(config: Mapping[str, Any]) -> bool:
    """Whether this is the content of a params.json."""
    return "model_type" not in config and {"dim", "n_layers", "n_heads"} <= config.keys()


def read(config: Mapping[str, Any], source: str, *, base: float | None, factor: float | None) -> ModelRopes:
    """The ropes of a params.json; see `from_config` for arguments and errors."""
    origins = {"pairing": f"Meta's format ({_SOURCE})", "layers": "n_layers"}
    warnings: list[str] = []
    _refuse_stray_keys(config, source)
    head_dim = _head_dim(config, source, origins)
    stated = _base(config, source, base, origins, warnings)
    try:
        rope = Rope(head_dim, stated, "interleaved", scaling=_scaling(config, source, factor, origins))
    except RopeError as e:
        raise e if str(e).startswith(source) else RopeError(f"{source}: {e}") from None
    layers = integer(source, "n_layers", config.get("n_layers"), at_least=1, at_most=_MAX_LAYERS)
    return ModelRopes(
        layers=(rope,) * layers,
        model_type="Meta params.json",
        source=source,
        trained_length=getattr(rope.scaling, "original_max_position_embeddings", None),
        origins=origins,
        warnings=tuple(warnings),
    )


def _refuse_stray_keys(config: Mapping[str, Any], source: str) -> None:
    for key, value in config.items():
        if key not in _KEYS and value is not None and _ROPE_WORDS.intersection(str(key).lower().split("_")):
            raise error(
                f"{source}: {shown(key)}",
                f"a key about rotation must be one of {', '.join(_KEYS)}",
                shown(value),
                f"It would have no effect.{nearest(str(key), _KEYS)} Mend or remove it.",
            )


def _head_dim(config: Mapping[str, Any], source: str, origins: dict[str, str]) -> int:
    if config.get("head_dim") is not None:
        origins["head_dim"] = "head_dim"
        return integer(source, "head_dim", config["head_dim"], at_least=2)
    dim = integer(source, "dim", config.get("dim"), at_least=1)
    heads = integer(source, "n_heads", config.get("n_heads"), at_least=1)
    if dim % heads:
        raise error(f"{source}: dim", f"it must be a multiple of n_heads={heads}", str(dim), "Add head_dim.")
    origins["head_dim"] = "dim / n_heads"
    return dim // heads


def _base(
    config: Mapping[str, Any], source: str, base: float | None, origins: dict[str, str], warnings: list[str]
) -> float:
    passed = None if base is None else number("from_config", "base", base, above=1.0)
    if config.get("rope_theta") is not None:
        origins["base"] = "rope_theta"
        stated = number(source, "rope_theta", config["rope_theta"], above=1.0)
        if passed not in (None, stated):
            raise error(
                f"{source}: rope_theta", f"it is {stated:g}, and base must agree", f"base={passed:g}", "Leave base out."
            )
        return stated
    if passed is not None:
        origins["base"] = "passed by the caller"
        return passed
    if config.get("use_scaled_rope") is not None:  # as new as Llama 3, whose files all state it
        raise error(
            f"{source}: rope_theta", "the base must be given", "none", "Add it, or pass base=... to from_config."
        )
    origins["base"] = "implied: files of Llama 1 and 2 have no rope_theta"
    warnings.append("the file states no rope_theta; 10000 is what Llama 1 and 2 meant. In a newer model it was lost.")
    return 10_000.0


def _scaling(config: Mapping[str, Any], source: str, factor: float | None, origins: dict[str, str]) -> Llama3 | None:
    scaled = config.get("use_scaled_rope")
    if scaled is not None and not isinstance(scaled, bool):
        raise error(f"{source}: use_scaled_rope", "it must be true or false", shown(scaled), "Mend it.")
    stated = config.get("rope_scaling_factor")
    if not scaled:
        if stated is not None or factor is not None:
            raise error(
                f"{source}: use_scaled_rope",
                "it must be true where a factor is given",
                shown(scaled),
                "Leave the factor out.",
            )
        origins["scaling"] = "use_scaled_rope" if scaled is False else "no use_scaled_rope is given"
        return None
    if stated is None and factor is None:
        raise error(
            f"{source}: use_scaled_rope",
            "the factor of the scaling must be passed, since the format does not carry it",
            "none",
            "Pass factor=8.0 (Llama 3.1) or factor=32.0 (Llama 3.2) to from_config.",
        )
    if stated is not None and factor is not None and stated != factor:
        raise error(
            f"{source}: rope_scaling_factor",
            f"it is {shown(stated)}, and factor must agree",
            f"{factor}",
            "Leave one out.",
        )
    origins["scaling"] = "use_scaled_rope"
    origins["factor"] = "passed by the caller" if stated is None else "rope_scaling_factor"
    # The other three are constants of Meta's code.
    origins["low_freq_factor, high_freq_factor, original_max_position_embeddings"] = f"constants of {_SOURCE}"
    return Llama3(
        factor=cast(float, factor if stated is None else stated),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
