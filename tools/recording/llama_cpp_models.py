"""The ropes of llama.cpp's models, from the keys that its converter writes for a config.

The keys are used as `llama_cpp.py` describes. The base and the scale of layers with a sliding window are looked up in
the source of the architecture's loader. The pairing is not recorded, because the converter permutes some weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from .llama_cpp import convert, converter, loader, table
from .mlx_models import rope_of
from .model import CannotRecordError
from .model_files import TOKENS, AbsentError, Engine, Rope
from .sglang_models import architectures

FILLED = {
    "hrm_text": {"num_attention_heads": 8},
    "minimax_m2": {"rotary_dim": 64},
    "step3p7": {"num_attention_groups": 8},
}


def architecture(source: Path, config: dict[str, Any]) -> str:
    """Return the class that a config names, else the class of transformers for its model_type."""
    named = [*(config.get("architectures") or []), architectures().get(config["model_type"])]
    names = [name for name in named if name]
    if not names:
        raise CannotRecordError("no class is known for this model_type")
    found = next((name for name in names if name in converter(source).TEXT_MODEL_MAP), None)
    if found is None:
        raise AbsentError(f"there is no class {names[0]}")
    return found


def file(source: Path, config: dict[str, Any]) -> str:
    """Return the file of the converter."""
    return f"conversion/{converter(source).TEXT_MODEL_MAP[architecture(source, config)]}.py"


def layers(source: Path, config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Convert a config, and return the rope of each layer."""
    written = convert(source, config, architecture(source, config))
    name, keys, _ = written
    if "rope.dimension_sections" in keys:
        raise CannotRecordError("tokens have several positions")
    count = keys["block_count"]
    head = int(keys.get("attention.key_length") or keys["embedding_length"] // keys["attention.head_count"])
    sizes = {False: int(keys.get("rope.dimension_count", head))}
    sizes[True] = int(keys.get("rope.dimension_count_swa", sizes[False]))
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), config)
    kinds = text.get("layer_types") or []
    windows = "attention.sliding_window" in keys and "swa_pattern" in loader(source, name)
    sliding = [windows and kind == "sliding_attention" for kind in kinds] if len(kinds) == count else [False] * count
    ropes = {each: _rope(table(source, written, sizes[each], tokens, sliding=each), head) for each in {*sliding}}
    return [ropes[each] for each in sliding]


def _rope(found: Any, head: int) -> Rope:
    cos, sin = found
    pairs = [
        (i, i + 1, angle, length)
        for i, (angle, length) in enumerate(zip(sin[1].atan2(cos[1]).tolist(), cos[0].tolist(), strict=True))
    ]
    return {**rope_of(pairs, max(head, 2 * len(pairs))), "pairing": ""}


def engine(source: Path) -> Engine:
    """Return llama.cpp, whose source is in a folder."""
    return Engine(
        "llama_cpp",
        "torch",
        lambda config: file(source, config),
        lambda config: layers(source, config),
        lambda config: ({**config, **FILLED.get(config["model_type"], {})}, []),
        loaded=lambda config: loaded(source, config),
    )


def loaded(source: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config as the converter loads it from a folder: by the class of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return converter(source).ModelBase.load_hparams(Path(folder), False)  # type: ignore[no-any-return]
