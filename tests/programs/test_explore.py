"""`ropewalk explore`, run as users run it."""

from __future__ import annotations

import json
import re
import webbrowser
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import command_line
import ropewalk
from command_line import LLAMA


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Record the addresses that the browser is asked to open, in a new working directory."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or True)
    monkeypatch.chdir(tmp_path)
    return addresses


run = partial(command_line.run, "explore")


def labels(path: Path) -> list[str]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return [curve["label"] for curve in json.loads(found[1])["curves"]]


def written(folder: Path, **more: Any) -> Path:
    folder.mkdir(parents=True)
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | more))
    return path


def test_without_a_source(tmp_path: Path, opened: list[str]) -> None:
    ran = run()
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "wrote ropewalk-explorer.html\n", "")
    page = tmp_path / "ropewalk-explorer.html"
    assert opened == [page.resolve().as_uri()]
    assert labels(page) == ["no scaling", "linear", "NTK", "YaRN", "Llama 3.1"]
    text = page.read_text(encoding="utf-8")
    assert "No model was named, so this page compares five ways to run the rope of Llama 3 8B" in text
    assert "<td>65,536</td>" in text


def test_sources(tmp_path: Path, opened: list[str]) -> None:
    base = written(tmp_path / "base")
    tuned = written(tmp_path / "tuned", rope_theta=1e6)
    page = tmp_path / "both.html"
    assert run(base, tuned.parent, "--no-open", "-o", page).exit_code == 0
    assert opened == []
    assert labels(page) == ["base", "tuned"]
    assert "No model was named" not in page.read_text(encoding="utf-8")


def test_sources_of_one_name(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a" / "model"), written(tmp_path / "b" / "model")
    assert run(first, second).exit_code == 0
    assert labels(tmp_path / "ropewalk-explorer.html") == ["model", str(second)]
    refused = run(first, second, second)
    assert refused.exit_code == 2
    assert f"{second} is listed twice" in refused.stderr


def test_options_reach_the_page(tmp_path: Path) -> None:
    own = written(tmp_path / "own", model_type="own", head_dim=64)
    own.write_text(
        json.dumps({key: value for key, value in json.loads(own.read_text()).items() if key != "rope_theta"})
    )
    refused = run(own)
    assert refused.exit_code == 1
    assert f"Error: {own}: model_type must be one that ropewalk knows" in refused.stderr
    page = tmp_path / "page.html"
    ran = run(own, "--pairing", "half", "--base", "5e5", "--length", 999, "--pair", 2, "--pair", 1, "-o", page)
    assert ran.exit_code == 0, ran.stderr
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (curve,) = json.loads(found[1])["curves"]
    assert curve["longest"] == 999
    assert curve["vectors"]["pairs"] == [1, 2]
    assert curve["after"]["speed"][1] == pytest.approx(5e5 ** (-1 / 32), rel=1e-6)


def test_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    ran = run()
    address = Path("ropewalk-explorer.html").resolve().as_uri()
    assert (ran.exit_code, ran.stderr) == (0, f"No browser could be started. Open this address in one: {address}\n")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refused = run("-o", tmp_path / "nowhere" / "page.html")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: --output: the file must be writable, got ")
    assert "(No such file or directory). Pass a path in an existing folder" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_name_that_utf_8_cannot_encode(tmp_path: Path) -> None:
    """Linux allows any bytes in a name. Python reads those that are not UTF-8 as lone surrogates."""
    path = written(tmp_path / "\udcff")
    assert run(path, "--no-open").exit_code == 0
    page = (tmp_path / "ropewalk-explorer.html").read_text(encoding="utf-8")
    assert "<title>RoPE explorer: \\udcff<" in page


def test_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    refused = run()
    assert refused.exit_code == 1
    assert 'Run pip install ".[explore]" in a clone of ropewalk.' in refused.stderr
    assert not Path("ropewalk-explorer.html").exists()


def test_the_ropes_without_a_source_are_those_of_llama() -> None:
    """The last scheme is the published one, with its factor of 8."""
    from ropewalk.tools.commands import explore

    rows = json.loads((Path(__file__).parents[1] / "golden" / "models" / "llama-3.1-8b.json").read_text())
    assert explore._llama3_under_five_schemes()["Llama 3.1"] == ropewalk.from_config(rows["config"]).rope
