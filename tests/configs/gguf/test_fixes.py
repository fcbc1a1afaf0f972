"""The fixes in the messages about GGUF files work: they are applied here, and the file is then read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gguf.scripts import gguf_new_metadata

from gguf_files import write
from ropewalk import Rope, RopeError, from_config
from ropewalk.schemes import Linear

KEYS = {
    "block_count": 3,
    "embedding_length": 64,
    "attention.head_count": 4,
    "context_length": 4096,
    "rope.freq_base": 5e5,
    "rope.dimension_count": 16,
}
PATTERN = "attention.sliding_window_pattern"
SLIDES = {**KEYS, "attention.sliding_window": 128}
PLAIN = Rope(16, 5e5, "interleaved")
SLOW = Rope(16, 5e5, "interleaved", scaling=Linear(4.0))


def refused(path: Path) -> str:
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert "Mend" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("more", "stray", "fix", "rope"),
    [
        (
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
            "llama.rope.scaling.factor",
            "llama.cpp ignores the key there, or uses it in a way that no scheme describes.",
            PLAIN,
        ),
        (
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
            "llama.rope.scale_linear",
            "llama.cpp uses rope.scaling.factor:",
            SLOW,
        ),
    ],
)
def test_a_key_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], stray: str, fix: str, rope: Rope
) -> None:
    path, mended = write(tmp_path / "model.gguf", KEYS, more=more), tmp_path / "mended.gguf"
    message = refused(path)
    assert stray in message
    assert fix in message
    assert message.endswith("remove this key with gguf-new-metadata --remove-metadata, a command of the package gguf.")
    arguments = ["gguf-new-metadata", str(path), str(mended), "--remove-metadata", stray, "--force"]
    monkeypatch.setattr("sys.argv", arguments)
    gguf_new_metadata.main()
    assert from_config(mended).layers == (rope,) * 3


def test_a_base_under_other_names(tmp_path: Path) -> None:
    """As Ollama's own converter wrote Gemma 3."""
    ollama = {"gemma3.rope.global.freq_base": 1e6, "gemma3.rope.local.freq_base": 1e4}
    keys = {**SLIDES, "attention.key_length": 16, "block_count": 6, "rope.freq_base": None}
    path = write(tmp_path / "model.gguf", keys, architecture="gemma3", more=ollama)
    message = refused(path)
    assert (
        "Pass base=BASE. llama.cpp does not read gemma3.rope.global.freq_base, gemma3.rope.local.freq_base" in message
    )
    assert f"pass ignore={tuple(ollama)}, too" in message
    local, full = Rope(16, 1e4, "half"), Rope(16, 1e6, "half")
    assert from_config(path, base=1e6, ignore=tuple(ollama)).layers == (*[local] * 5, full)


YARN = {
    "unseen.rope.scaling.type": "yarn",
    "unseen.rope.scaling.factor": 8.0,
    "unseen.rope.scaling.original_context_length": 512,
}


@pytest.mark.parametrize(
    ("architecture", "more", "tensors"),
    [
        ("llama", {"llama.rope.frq_base": 1e4}, {}),
        ("llama", {"llama.rope.scaling.new": 2.0}, {}),
        ("llama", {"qwen2.rope.freq_base": 1e6}, {}),
        ("unseen", {"unseen.rope.scaling.type": "none", "unseen.rope.scaling.factor": 4.0}, {}),
        ("unseen", {"unseen.rope.scaling.attn_factor": 2.0}, {}),
        ("unseen", {"unseen.rope.freq_base_swa": 1e4}, {}),
        ("unseen", {**YARN, "unseen.rope.scaling.yarn_attn_factor": 1.0}, {}),
        ("unseen", {"unseen.rope.dimension_sections": [2, 3, 3, 0]}, {}),
        ("unseen", {"unseen.attention.key_length_mla": 16}, {}),
        ("unseen", {"unseen.rope.new": 2.0}, {}),
        ("unseen", {}, {"rope_factors_long.weight": [2.0] * 8}),
    ],
)
def test_nothing_is_said_about_what_is_not_known(
    tmp_path: Path, architecture: str, more: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """For a key or an architecture that ropewalk does not know, no advice leads to a rope that may be another."""
    path = write(tmp_path / "model.gguf", KEYS, tensors, architecture=architecture, more=more)
    with pytest.raises(RopeError) as raised:
        from_config(path, pairing=None if architecture == "llama" else "half")
    message = str(raised.value)
    assert "What llama.cpp does with it is not known here." in message
    assert message.endswith("Read the model's config.json instead.")
    assert not re.search("ignore|no effect|--remove|does not (use|read)", message)


@pytest.mark.parametrize(
    ("broken", "alignment"),
    [({PATTERN: [True, False]}, None), ({PATTERN: [1.0, 0.0, 1.0]}, None), ({PATTERN: [1, -1, 1]}, None), ({}, 24)],
)
def test_a_model_must_be_converted_again(tmp_path: Path, broken: dict[str, Any], alignment: int | None) -> None:
    more = {"general.alignment": alignment} if alignment else {}
    path = write(tmp_path / "model.gguf", {**SLIDES, **broken}, architecture="gemma2", more=more)
    assert refused(path).endswith("Convert the model again.")
    write(path, {**SLIDES, PATTERN: [True, False, True]}, architecture="gemma2")
    assert from_config(path).layer_kinds == ("sliding_attention", "full_attention", "sliding_attention")
