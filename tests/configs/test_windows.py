"""The windows of the layers, compared with the masks that transformers' own models make of the same config."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from ropewalk import diff, from_config, plots

TOKENS = 40
SIZES = {"sliding_window": 8, "attention_chunk_size": 8, "local_attention": 16}
LAYERS = {"num_hidden_layers": 4}
OWN_ATTENTION = ("falcon", "gpt_neox_japanese")  # cannot be recorded, and have no window
# As they are, switched on and off, and without a window.
CASES = [
    *((name, {}) for name in tiny_models.MODELS if ":" not in name and name not in OWN_ATTENTION),
    *((name, LAYERS | {"use_sliding_window": True}) for name in ("qwen3_moe", "smollm3")),
    *(
        (name, LAYERS | {"use_sliding_window": True, "max_window_layers": n})
        for name in ("qwen2", "qwen2_moe", "qwen3")
        for n in (1, 3)
    ),
    ("qwen3", LAYERS | {"use_sliding_window": False}),
    ("dots1", LAYERS | {"max_window_layers": 2}),
    ("mistral", {"sliding_window": None}),
    ("gpt_oss", LAYERS),
    ("gemma3_text", LAYERS | {"use_bidirectional_attention": True}),
]
# In the schema of the released configs: these models have no layer_types there.
WITHOUT_LAYER_TYPES = (
    "dots1",
    "gemma2",
    "gpt_oss",
    "llama4_text",
    "modernbert",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "vaultgemma",
)


def largest_distances(config: Any) -> dict[int, int]:
    """Run a model of transformers, and return the largest distance between q and k in the mask of each layer."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel
    from transformers.masking_utils import eager_mask

    found = {}

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any = None, *_: Any, **named: Any) -> Any:
        mask = named.get("attention_mask", mask)
        seen = torch.ones(TOKENS, TOKENS).tril() if mask is None else mask[0, 0] > -1
        queries, keys = seen.nonzero().unbind(1)
        found[getattr(module, "layer_idx", len(found))] = int((queries - keys).abs().max())
        return torch.zeros(1, TOKENS, q.shape[1], v.shape[-1]), None

    AttentionInterface.register("recorded", attention)
    AttentionMaskInterface.register("recorded", eager_mask)
    model = AutoModel.from_config(config, attn_implementation="recorded").eval()
    with torch.no_grad():
        model(input_ids=torch.arange(TOKENS)[None] + 3)
    return found


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_windows_are_those_of_the_masks(name: str, changes: dict[str, Any]) -> None:
    default = tiny_models.config(name).to_dict()
    sizes = {key: value for key, value in SIZES.items() if default.get(key) is not None}
    config = tiny_models.config(name, **sizes | changes)
    distances = largest_distances(config)
    assert distances
    saved = {key: value for key, value in config.to_dict().items() if value is not None}
    saved |= SIZES if "use_bidirectional_attention" in changes else {}  # the class changes the window that it is passed
    for kept in [saved, {key: value for key, value in saved.items() if key != "layer_types"}]:
        if kept is saved or name in WITHOUT_LAYER_TYPES:
            windows = from_config(kept).windows
            wanted = {i: distance + 1 for i, distance in distances.items()}
            assert {i: min(windows[i] or TOKENS, TOKENS) for i in distances} == wanted


def test_a_mistral_with_kinds_of_layers(tmp_path: Path) -> None:
    """transformers loads such a file as a Ministral, of which only some layers have the window."""
    from transformers import AutoConfig

    config = tiny_models.config("mistral", sliding_window=8, head_dim=16).to_dict()
    config |= {"layer_types": ["full_attention", "sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    distances = largest_distances(AutoConfig.from_pretrained(tmp_path))
    assert [None if distances[i] == TOKENS - 1 else distances[i] + 1 for i in range(2)] == [None, 8]
    assert from_config(tmp_path).windows == (None, 8)


def test_a_window_bounds_what_is_said_about_a_length() -> None:
    """gpt-oss has YaRN and a window of 128 tokens in every second layer, which all other layers differ from."""
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    }
    ropes = from_config(config)
    assert ropes.windows == (128, None, 128, None)
    local, full = ropes.facts(1_000_000)["ropes"]
    assert (local["layers"], full["layers"]) == ([0, 2], [1, 3])
    # Pairs complete a turn of 2π · 150000^(2i / 64) tokens within 128 and 4,096 of them.
    assert local["rope"]["full_turns_when_trained"] == sum(2 * math.pi * 150_000 ** (i / 32) <= 128 for i in range(32))
    assert full["rope"]["full_turns_when_trained"] == sum(2 * math.pi * 150_000 ** (i / 32) <= 4096 for i in range(32))
    first, second = ropes.explain(1_000_000).split("layers 1, 3 of 4")
    assert "q and k are less than 128 tokens apart, at any length" in first
    assert "within the window; after scaling, no pair reaches an angle beyond those of training" in first
    assert "reach angles that are new unless training went on with this scaling" in second
    for found in (
        diff.engines(config).facts["ropes"],
        diff.configs(config, config | {"rope_theta": 300_000.0}).facts["layers"],
    ):
        assert [row["layers"] for row in found] == [[0, 2], [1, 3]]
        far = [set(distances_in(row["at"])) for row in found]
        assert max(far[0]) <= 127 < max(far[1])
    page = plots.explorer({"mistral": from_config(MISTRAL)}, length=65_536)
    assert page.count("At 65,536 tokens, every angle was seen in training.") == 2


MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "sliding_window": 4096,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
}


def distances_in(facts: Any) -> Iterator[int]:
    """Yield the distances at which scores differ most, in nested facts."""
    if isinstance(facts, dict):
        yield from [facts["at_distance"]] if "at_distance" in facts else []
    for value in facts.values() if isinstance(facts, dict) else facts if isinstance(facts, list) else ():
        yield from distances_in(value)
