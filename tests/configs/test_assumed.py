"""A value that a config does not state and that is assumed is a Python warning at the line that reads the config."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_files import write
from ropewalk import Rope, from_config
from ropewalk.tools.cli import main

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
META = {"dim": 64, "n_heads": 4, "n_layers": 2}
LATENT = {"num_hidden_layers": 1, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rope_theta": 1e4}
GGUF = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "context_length": 4096}
NO_BASE = "has no rope_theta, so the base is 10000"


def issued(source: Any, **arguments: Any) -> list[str]:
    """Read a config. Return the text of the Python warnings, which must all point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ropes = from_config(source, **arguments)
    assert all(w.category is UserWarning and w.filename == __file__ for w in caught)
    assert all(any(note in str(w.message) for note in ropes.warnings) for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LLAMA, f"config: the file {NO_BASE}"),
        ({"model_type": "falcon", **LLAMA, "text_config": None}, NO_BASE),
        (META, NO_BASE),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "hidden_size, num_attention_heads, "),
    ],
)
def test_one_warning_for_each_call(source: dict[str, Any], message: str) -> None:
    (warning,) = issued(source)
    assert message in warning
    assert len(issued(source)) == 1


def test_kinds_of_layers_share_a_warning() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_theta": 1e6}
    (warning,) = issued({"model_type": "gemma3", "text_config": text})
    assert warning.count("Those defaults are used.") == 1


def test_of_an_unknown_model() -> None:
    (warning,) = issued({"model_type": "mine", **LATENT}, pairing="interleaved")
    assert "is read like that of DeepSeek-V3" in warning


def test_of_gguf_files(tmp_path: Path) -> None:
    path = write(tmp_path / "llama.gguf", GGUF)
    (warning,) = issued(path)
    assert warning.startswith(f"{path}: the file has no llama.rope.freq_base, for which llama.cpp uses 10000.")
    assert issued(path, base=1e4) == []


def test_what_is_stated_is_no_warning() -> None:
    assert issued(LLAMA, base=1e4) == []
    assert issued({**LLAMA, "rope_theta": 1e4}) == []
    assert issued(META, base=1e4) == []
    # A warning about something else is in `.warnings` only.
    scaled = {
        **LLAMA,
        "rope_theta": 1e4,
        "max_position_embeddings": 8,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    assert from_config(scaled).warnings
    assert issued(scaled) == []


def test_it_can_be_made_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match=NO_BASE):
            from_config(LLAMA)


def test_commands_print_it_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "max_position_embeddings": 64}))
    for arguments in (["explain", path], ["diff", path, path], ["diff", path]):
        ran = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert ran.exit_code == 0, ran.output
        assert ran.output.count(NO_BASE) == (2 if arguments[1:] == [path, path] else 1)
        assert "Warning" not in ran.output
    ran = CliRunner().invoke(main, ["explore", str(path), "--no-open", "-o", str(tmp_path / "page.html")])
    assert ran.output.startswith(f"Warning: {path}: the file {NO_BASE}")
    assert ran.output.count("\n") == 2
    assert from_config(path, base=1e4).rope == Rope(16, 1e4, "half")


@pytest.mark.parametrize("schema", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("more", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 32.0}])
def test_without_an_original_length_it_is_that_of_transformers(schema: str, more: dict[str, Any]) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling = {**more, **({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if more["rope_type"] == "llama3" else {})}
    config = {**LLAMA, "head_dim": 64, "max_position_embeddings": 131_072}
    base = {"rope_theta": 5e5}
    config |= {**base, schema: scaling} if schema == "rope_scaling" else {schema: {**base, **scaling}}
    (said,) = issued(config)
    assert "transformers takes max_position_embeddings (131072). Other engines may take another length." in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rope = from_config(config).rope
    module = modeling.LlamaRotaryEmbedding(modeling.LlamaConfig.from_dict(config))
    np.testing.assert_allclose(rope.inv_freq, module.inv_freq, rtol=4.5e-7)
    assert rope.attention_factor == pytest.approx(module.attention_scaling)
