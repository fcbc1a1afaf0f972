"""Errors for unread keys, and the argument `ignore`, which these errors suggest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gguf_files import write
from ropewalk import RopeError, from_config
from ropewalk.tools.cli import main

LLAMA = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 5e5}
SCALED = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
META = {"dim": 64, "n_layers": 2, "n_heads": 4, "rope_theta": 5e5}


def suggested_ignore(message: str) -> tuple[str, ...]:
    """Return the keys that the message says to pass as ignore."""
    found = re.search(r"ignore=\('([^']+)',\)", message)
    assert found, message
    return (found[1],)


@pytest.mark.parametrize(
    ("plain", "stray"),
    [
        (LLAMA, {**LLAMA, "rope_flavour": "vanilla"}),
        (LLAMA, {**LLAMA, "rope_thetta": 1e6}),
        (LLAMA, {**LLAMA, "rotary_pct": 0.25}),
        (LLAMA, {**LLAMA, "qk_rope_head_dim": 4}),
        (LLAMA, {**LLAMA, "rope_interleaved": True}),
        (SCALED, {**SCALED, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}),
        ({"model_type": "llava", "text_config": LLAMA}, {"model_type": "llava", "text_config": {**LLAMA, "rope_x": 1}}),
    ],
)
def test_the_fix_in_the_message_works(plain: dict[str, Any], stray: dict[str, Any]) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(stray)
    ignored = suggested_ignore(str(raised.value))
    ropes = from_config(stray, ignore=ignored)
    assert ropes.layers == from_config(plain).layers
    warning = f"{ignored[0]} was ignored as requested, so its effect in the model's own code is missing."
    assert ropes.warnings == (*from_config(plain).warnings, warning)
    assert warning in ropes.explain()


def test_a_misspelt_key_is_named_if_the_right_one_is_missing() -> None:
    with pytest.raises(RopeError, match=r"'rope_thetta' is about rotation .* Did you mean 'rope_theta'"):
        from_config({"model_type": "mistral", "head_dim": 8, "num_hidden_layers": 2, "rope_thetta": 1e6})


def test_gguf(tmp_path: Path) -> None:
    keys = {
        "block_count": 1,
        "embedding_length": 64,
        "attention.head_count": 4,
        "context_length": 64,
        "rope.freq_base": 5e5,
    }
    path = write(tmp_path / "model.gguf", keys, more={"llama.rope.frq_base": 1e4})
    with pytest.raises(RopeError, match=r"llama\.rope\.frq_base' is about rotation"):
        from_config(path)
    assert from_config(path, ignore=("llama.rope.frq_base",)).rope.base == 5e5


def test_meta() -> None:
    assert from_config({**META, "rope_x": 1}, ignore=("rope_x",)).layers == from_config(META).layers


def test_a_missing_key_cannot_be_ignored() -> None:
    for config in (LLAMA, META):
        with pytest.raises(
            RopeError, match=r"every key in ignore must be in the config, got 'rope_teta'\. .*'rope_theta'"
        ):
            from_config(config, ignore=("rope_teta",))
    with pytest.raises(RopeError, match=r"got 'rope_scaling\.facto'\. .*'rope_scaling\.factor'"):
        from_config(SCALED, ignore=("rope_scaling.facto",))


@pytest.mark.parametrize("wrong", ["rope_theta", 3, None, [3]])
def test_ignore_is_a_collection_of_keys(wrong: Any) -> None:
    with pytest.raises(RopeError, match="from_config: ignore must be a collection of keys"):
        from_config(LLAMA, ignore=wrong)


def test_the_config_itself_is_not_changed() -> None:
    config = {**SCALED, "rope_scaling": {**SCALED["rope_scaling"], "beta_fast": 32}}  # type: ignore[dict-item]
    before = json.dumps(config)
    from_config(config, ignore=("rope_scaling.beta_fast",))
    assert json.dumps(config) == before


def test_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "rope_flavour": "vanilla", "rotary_pct": 1.0}))
    ran = CliRunner().invoke(main, ["explain", str(path), "--ignore", "rope_flavour", "--ignore", "rotary_pct"])
    assert ran.exit_code == 0, ran.output
    assert "! rope_flavour was ignored as requested" in ran.output
    assert "! rotary_pct was ignored as requested" in ran.output


def test_a_key_without_effect_is_a_warning() -> None:
    chatglm = {"model_type": "chatglm", "kv_channels": 128, "num_layers": 2, "rotary_percent": 0.5}
    assert from_config(chatglm).warnings == (
        "rotary_percent has no effect: the code of CodeGeeX 2 always rotates half of the head.",
    )
