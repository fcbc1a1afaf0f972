"""Hub ids: the cache of huggingface_hub, downloads on request, and errors. No test uses the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner
from huggingface_hub.constants import ENDPOINT

from ropewalk import RopeError, from_config
from ropewalk.tools.cli import main

CONFIG = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 5e5}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a cache with one model, in the layout of huggingface_hub."""
    model = tmp_path / "models--owner--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_from_the_cache(cache: Path) -> None:
    ropes = from_config("owner/name")
    assert ropes.layers == from_config(CONFIG).layers
    assert ropes.source.endswith("config.json")
    assert from_config(Path("owner/name")).layers == ropes.layers
    ran = CliRunner().invoke(main, ["explain", "owner/name"])
    assert ran.exit_code == 0, ran.output


def test_nothing_is_downloaded_by_default(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected_download(*_: object) -> str:
        raise AssertionError("the config was downloaded")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unexpected_download)
    with pytest.raises(RopeError, match=r"owner/other: .* If it is a hub id, pass download=True, or pass the path"):
        from_config("owner/other")


def test_a_requested_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache / "config.json"
    path.write_text(json.dumps(CONFIG))
    asked = []

    def downloaded(name: str, file: str) -> str:
        asked.append((name, file))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: asked.append(url))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", downloaded)
    assert from_config("owner/other", download=True).rope.base == 5e5
    assert CliRunner().invoke(main, ["explain", "owner/other", "--download"]).exit_code == 0
    assert asked == [f"{ENDPOINT}/owner/other/resolve/main/config.json", ("owner/other", "config.json")] * 2


def test_a_download_that_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hf_hub_download, which tries again for half a minute and prints each attempt, is not called."""

    def failing(*_: object) -> str:
        raise OSError("no network\nmore")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", failing)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: pytest.fail("it was called"))
    with pytest.raises(RopeError) as raised:
        from_config("owner/other", download=True)
    reason = (
        "owner/other: config.json cannot be downloaded: OSError: no network. If the model exists, download it by hand"
    )
    assert str(raised.value).startswith(reason)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fix = (
        r"owner/name is not a file, but may be a hub id: huggingface_hub must be installed\. Run pip install .\.\[hub\]"
    )
    with pytest.raises(RopeError, match=fix):
        from_config("owner/name")


@pytest.mark.parametrize("path", ["owner/config.json", "a/b/c", "name", "./owner/name.gguf", "/owner/name", "../name"])
def test_other_names_are_paths(path: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert "hub id" not in str(raised.value)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 7e5}))
    assert from_config("owner/name").rope.base == 7e5


def test_download_is_a_boolean() -> None:
    with pytest.raises(RopeError, match="from_config: download must be True or False, got 'yes'"):
        from_config(CONFIG, download="yes")  # type: ignore[arg-type]
