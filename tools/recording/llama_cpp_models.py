"""The ropes of llama.cpp's models, from the keys that its converter writes for a config.

The keys are used as `llama_cpp.py` describes. The base and the scale of layers with a sliding window are looked up in
the source of the architecture's loader. The pairing is only recorded for latent attention, whose weights the converter
does not permute.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from .llama_cpp import convert, converter, loader, table
from .mlx_models import rope_of
from .model_files import TOKENS, Engine, Rope, filled
from .sglang_models import MIMO
from .transformers_models import class_of

_STEP = ("moe_num_experts", "moe_top_k", "num_attention_groups", "share_expert_dim")
FILLED: dict[str, dict[str, Any]] = {
    "falcon_h1": {"head_dim": 64},
    "hrm_text": {"num_attention_heads": 8},
    "hunyuan_v1_moe": {"moe_intermediate_size": [64], "moe_topk": [1], "num_shared_expert": [1]},
    "mimo_v2_flash": MIMO,
    "minimax_m2": {"rotary_dim": 64},
    "minimax_m3_vl": {"text_config.n_shared_experts": 1},
    "step3p7": {f"text_config.{key}": 8 for key in _STEP},
}
"""Values of keys that a file of the converter reads and that the class of transformers does not have."""


def architecture(source: Path, config: dict[str, Any]) -> str:
    """Return the class that a config names, else the class of transformers for its model_type."""
    return class_of(config, converter(source).TEXT_MODEL_MAP)


def file(source: Path, config: dict[str, Any]) -> str:
    """Return the file of the converter."""
    return f"conversion/{converter(source).TEXT_MODEL_MAP[architecture(source, config)]}.py"


def layers(source: Path, config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Convert a config, and return the rope of each layer."""
    written = convert(source, config, architecture(source, config))
    name, keys, _ = written  # for tokens with several positions, `ggml_mrope_cache_init` has the frequencies of one
    count = keys["block_count"]
    head = int(keys.get("attention.key_length") or keys["embedding_length"] // keys["attention.head_count"])
    sizes = {False: int(keys.get("rope.dimension_count", head))}
    sizes[True] = int(keys.get("rope.dimension_count_swa", sizes[False]))
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), config)
    kinds = text.get("layer_types") or []
    windows = "attention.sliding_window" in keys and "swa_pattern" in loader(source, name)
    sliding = [windows and kind == "sliding_attention" for kind in kinds] if len(kinds) == count else [False] * count
    pairing = _pairing(source, name) if "attention.kv_lora_rank" in keys else ""
    tables = {each: table(source, written, sizes[each], tokens, sliding=each) for each in {*sliding}}
    ropes = {each: {**_rope(found, head), "pairing": pairing} for each, found in tables.items()}
    return [ropes[each] for each in sliding]


def _rope(found: Any, head: int) -> Rope:
    cos, sin = found
    pairs = [
        (i, i + 1, angle, length)
        for i, (angle, length) in enumerate(zip(sin[1].atan2(cos[1]).tolist(), cos[0].tolist(), strict=True))
    ]
    return rope_of(pairs, max(head, 2 * len(pairs)))


def _pairing(source: Path, name: str) -> str:
    """Return the pairing with which an architecture rotates."""
    [case] = re.findall(rf'{{ (LLM_ARCH_\w+), *"{name}" *}}', (source / "src" / "llama-arch.cpp").read_text())
    cases = (source / "src" / "llama-model.cpp").read_text().partition("llama_model_rope_type(const")[2]
    found = re.search(rf"case {case}:.*?return LLAMA_ROPE_TYPE_(\w+)", cases, re.DOTALL)
    return {"NORM": "interleaved", "NEOX": "half"}.get(found[1] if found else "", "")


def engine(source: Path) -> Engine:
    """Return llama.cpp, whose source is in a folder."""
    return Engine(
        "llama_cpp",
        "torch",
        lambda config: file(source, config),
        lambda config: layers(source, config),
        lambda config: filled(config, FILLED.get(config["model_type"], {})),
        {"cohere2": {"rotary_pct": 1.0}},
        loaded=lambda config: loaded(source, config),
    )


def loaded(source: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config as the converter loads it from a folder: by the class of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return converter(source).ModelBase.load_hparams(Path(folder), False)  # type: ignore[no-any-return]
