"""`diff.draft`: whether the draft of speculative decoding rotates like its target, and reaches its length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ropewalk import diff
from ropewalk.tools.commands.diff import diff as command

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
HEAD = {**TARGET, "num_hidden_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def test_a_head_with_the_rope_of_the_target_rotates_alike() -> None:
    found = diff.draft(TARGET, HEAD)
    assert found.alike
    assert "The draft rotates like the target, up to 131,072 tokens." in found.text()
    assert "what this means" not in found.text()
    assert diff.draft(TARGET, {**HEAD, "hidden_size": 1024, "head_dim": 128}).alike  # other sizes do not matter


def test_a_head_without_the_scaling_of_the_target() -> None:
    found = diff.draft({**TARGET, "max_position_embeddings": 32_768, "rope_scaling": YARN}, HEAD)
    assert not found.alike
    assert [change["what"] for change in found.facts["layers"][0]["changed"]] == ["scaling"]
    assert not found.facts["too_short"]  # the scaled context of the target has 131,072 tokens as well
    text = " ".join(found.text().split())
    assert "The draft does not rotate like the target, up to 131,072 tokens." in text
    assert "A draft that reads the KV cache of the target must rotate like it, and does not." in text


def test_a_head_that_ends_early() -> None:
    found = diff.draft(TARGET, {**HEAD, "max_position_embeddings": 2048})
    assert not found.alike
    assert found.facts["layers"] == []
    assert "The draft rotates like the target, and states 2,048 positions of 131,072." in found.text()
    assert "vllm#48894" in found.text()
    assert diff.draft(TARGET, {**HEAD, "max_position_embeddings": 2048}, length=2048).alike


def test_a_layer_of_the_draft_may_have_the_rope_of_any_layer_of_the_target() -> None:
    gemma = {"model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "head_dim": 256}
    gemma |= {"num_hidden_layers": 6, "max_position_embeddings": 32_768, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    gemma |= {"sliding_window": 512, "sliding_window_pattern": 6}
    plain = {"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 1}
    plain |= {"max_position_embeddings": 32_768}
    assert [diff.draft(gemma, {**plain, "rope_theta": base}).alike for base in (1e4, 1e6, 1e5)] == [True, True, False]

    # If none has its rope, it is compared with the layers of its kind, or with the nearest ones.
    scaled = {**gemma, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for target, other, what in ((scaled, gemma, "scaling"), (gemma, {**plain, "rope_theta": 9e5}, "base")):
        [row] = diff.draft(target, other).facts["layers"]
        assert [(change["what"], change["first"]) for change in row["changed"]] == [
            (what, {"rope_type": "linear", "factor": 8.0} if what == "scaling" else 1e6)
        ]


@pytest.mark.parametrize(("changed", "status"), [({}, 0), ({"rope_theta": 1e4}, 1), ({"rope_theta": "no"}, 2)])
def test_the_exit_status(changed: dict[str, Any], status: int, tmp_path: Path) -> None:
    paths = [tmp_path / "target.json", tmp_path / "draft.json"]
    for path, config in zip(paths, (TARGET, {**HEAD, **changed}), strict=True):
        path.write_text(json.dumps(config))
    ran = CliRunner().invoke(command, [*map(str, paths), "--draft"])
    assert ran.exit_code == status
    if status == 0:
        as_json = CliRunner().invoke(command, [*map(str, paths), "--draft", "--json"]).stdout
        assert json.loads(as_json) == diff.draft(*map(str, paths)).facts
    assert CliRunner().invoke(command, [str(paths[0]), "--draft"]).exit_code == 2
