"""Read Meta's params.json (Llama 1 to 3.2). Pairs are interleaved.

The format does not contain the factor of the scaling. The caller passes it, or adds `rope_scaling_factor` to the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ropewalk._checks import argument, option, possible, shown
from ropewalk.configs import unread_keys
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.reader import Fields
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Llama3

_SOURCE = "meta-llama/llama-models at a9c89c47, models/llama3/model.py: torch.view_as_complex"
_KEYS = ("rope_theta", "use_scaled_rope", "rope_scaling_factor")

_OTHER_FORMATS = {
    "use_hf_rope model_architecture": "in ExecuTorch's params.json it means other pairings, and Meta's has no such key",
    "qk_rope_head_dim rope_factor": "it belongs to latent attention (DeepSeek, Mistral), which rotates part of a head",
    "nope_layer_interval": "it belongs to the params.json of Llama 4, in which some layers do not rotate",
}
"""Keys of formats that name sizes as Meta does, but define rotation differently, and where these keys belong."""


def read(config: Mapping[str, Any], source: str, *, base: float | None, factor: float | None) -> ModelRopes:
    """Read the ropes of a params.json. See `from_config` for arguments and errors."""
    fields = Fields(config, source, base=base)
    _refuse_other_formats(fields)
    fields.origins |= {"pairing": f"Meta's format ({_SOURCE})", "layers": "n_layers"}
    unread_keys.refuse(fields, {}, _KEYS)
    head_dim = _head_dim(fields)
    base = _base(fields)
    with fields.prefix_errors():
        rope = Rope(head_dim, base, "interleaved", scaling=_scaling(fields, factor))
    layers = (rope,) * fields.layers(("n_layers",))
    sizes = {"hidden_size": config["dim"], "num_attention_heads": config["n_heads"], "num_hidden_layers": len(layers)}
    if fields.has("max_position_embeddings"):  # which Meta's files do not state
        sizes["max_position_embeddings"] = fields.size("max_position_embeddings")
    return ModelRopes(
        layers=layers,
        model_type="Meta params.json",
        source=source,
        config={"model_type": "llama", **sizes, "head_dim": head_dim},
        file_format="params.json",
        trained_length=None if rope.scaling is None else rope.scaling.trained_length(None),
        origins=fields.origins,
        warnings=tuple(fields.warnings),
    )


def needs_factor(config: Mapping[str, Any]) -> bool:
    """Whether the rope of a params.json is scaled, by a factor that the caller may pass."""
    return config.get("use_scaled_rope") is True


def _refuse_other_formats(fields: Fields) -> None:
    """Raise a RopeError for formats that name sizes as Meta does, but define rotation differently."""
    if fields.has("sinusoidal_pos_embds") or fields.has("initializer_range"):
        must, fix = (
            "must be given in a config.json of Hugging Face",
            "Add the model_type, which this file seems to lack.",
        )
        raise fields.error("model_type", must, "none", f"{fix} DistilBERT, whose files have these keys, has no rope.")
    for keys, why in _OTHER_FORMATS.items():
        for key in keys.split():
            if fields.config.get(key) is not None:
                fix = "Read the config.json of the model instead."
                raise fields.error(key, f"must not be given: {why}", shown(fields.config[key]), fix)


def _head_dim(fields: Fields) -> int:
    if fields.has("head_dim"):
        fields.origins["head_dim"] = "head_dim"
        return fields.channels("head_dim")
    fields.origins["head_dim"] = "dim / n_heads"
    return fields.head_width(("dim",), ("n_heads",), "head_dim")


def _base(fields: Fields) -> float:
    if fields.has("rope_theta"):
        fields.origins["base"] = "rope_theta"
        return fields.check_base("rope_theta", fields.get("rope_theta"))
    if fields.passed_base is not None:
        fields.origins["base"] = "passed by the caller"
        return fields.passed_base
    if fields.has("use_scaled_rope") or fields.has("hidden_dim"):  # files of Llama 3 and newer and of Mistral state it
        fix = f"Add it{possible(', or pass ' + argument('base'), 'base')}."
        raise fields.error("rope_theta", "must be given, since it is the base", "none", fix)
    fields.origins["base"] = "implied: files of Llama 1 and 2 have no rope_theta"
    fields.assume(
        "the file has no rope_theta, so the base is 10000, as in Llama 1 and 2. In a newer model the key was lost."
    )
    return 10_000.0


def _scaling(fields: Fields, factor: float | None) -> Llama3 | None:
    scaled = fields.boolean("use_scaled_rope", False)
    config_factor = fields.get("rope_scaling_factor")
    if not scaled:
        if config_factor is not None or factor is not None:
            raise fields.error(
                "use_scaled_rope",
                "must be true if a factor is given",
                shown(fields.get("use_scaled_rope")),
                "Omit the factor.",
            )
        fields.origins["scaling"] = (
            "use_scaled_rope" if fields.has("use_scaled_rope") else "no use_scaled_rope is given"
        )
        return None
    if config_factor is None and factor is None:
        factors = f"{argument('factor', 8.0)} (Llama 3.1) or {argument('factor', 32.0)} (Llama 3.2 1B and 3B)"
        if fields.has("vision_chunk_size"):
            factors = f"{argument('factor', 8.0)} (Llama 3.2 Vision)"
        raise fields.error(
            "use_scaled_rope",
            "needs the factor of the scaling, which the format does not contain",
            "none",
            f"{possible(f'Pass {factors}, or add', 'factor') or 'Add'} rope_scaling_factor to the file.",
        )
    if config_factor is not None and factor is not None and config_factor != factor:
        raise fields.error(
            "rope_scaling_factor",
            f"is {shown(config_factor)}, and factor must agree with it",
            shown(factor),
            f"Omit {option('factor')}.",
        )
    fields.origins["scaling"] = "use_scaled_rope"
    fields.origins["factor"] = "passed by the caller" if config_factor is None else "rope_scaling_factor"
    # The other three parameters are constants in Meta's code.
    fields.origins["low_freq_factor, high_freq_factor, original_max_position_embeddings"] = f"constants of {_SOURCE}"
    return Llama3(
        factor=cast(float, factor if config_factor is None else config_factor),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
