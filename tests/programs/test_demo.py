"""Test that the demo prints what it measured, that its statements are true, and that a wrong result stops it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ropewalk
from kernel_cases import record_calls
from ropewalk.kernels import cpu
from ropewalk.tools import cli, demo

ROOT = Path(__file__).parents[2]
PICTURES = ("rotated_vector.png", "pairs.png", "inv_freq.png", "decay.png")
NUMBER = r"(\d\.\de[+-]\d\d)"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the demo once. Return its folder, which did not exist, its lines, and the kernels that were called."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    said = []
    with pytest.MonkeyPatch.context() as patch:
        calls = record_calls(cpu, patch)
        demo.run(folder, said.append)
    return folder, said, calls


@pytest.fixture
def said(ran):
    return ran[1]


def step(said, number):
    """Return the lines of one step, without its heading."""
    starts = [i for i, line in enumerate(said) if re.match(r"\[\d/4\]", line)]
    end = starts[number] if number < 4 else len(said)
    return said[starts[number - 1] + 1 : end]


def table(rows):
    """Parse rows `position ours usual` as numbers."""
    found = [re.fullmatch(rf"\s*([\d,]+)\s+{NUMBER}\s+{NUMBER}", row) for row in rows]
    return {int(m[1].replace(",", "")): (float(m[2]), float(m[3])) for m in found if m}


def test_reads_the_published_config(said):
    text = "\n".join(step(said, 1))
    assert "Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0" in text
    assert "32 equal layers, 64 pairs" in text
    assert "wavelengths from 6.28 to 20,473,564 tokens" in text


def test_angles_are_exact_at_every_position_and_the_usual_ones_drift(said):
    errors = table(step(said, 2))
    assert list(errors) == [255, 8_191, 131_071, 1_048_575, 2**31 - 1]
    for ours, _ in errors.values():
        assert 1e-8 < ours < 3.1e-8  # half a unit in the last place of float32: there is no better
    usual = [error for _, error in errors.values()]
    assert usual == sorted(usual)
    assert usual[0] < 1e-4  # it is good code near the start
    assert 1e-3 < usual[2] < 2e-2


def test_measures_the_rotation(ran):
    *rows, kernel = step(ran[1], 3)
    errors = [re.fullmatch(rf"  [qk]: {NUMBER}", row) for row in rows]
    assert all(1e-8 < float(error[1]) <= 2.0**-22 for error in errors)
    assert len(errors) == 2
    assert kernel == f"  CPU kernel of ropewalk: {ropewalk.backends()['cpu kernel']}"
    assert bool(ran[2]) == (not cpu.unavailable())


def test_writes_the_pictures_and_names_them(ran):
    folder, said, _ = ran
    assert [line.strip() for line in step(said, 4)[:-1]] == [str(folder / name) for name in PICTURES]
    assert {path.name for path in folder.iterdir()} == set(PICTURES)
    for name in PICTURES:
        assert (folder / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def refused(tmp_path, match, step_number):
    """Check that the demo raises in this step and draws nothing."""
    said = []
    with pytest.raises(ropewalk.RopeError, match=match):
        demo.run(tmp_path, said.append)
    assert [line[:5] for line in said if line.startswith("[")][-1] == f"[{step_number}/4]"
    assert not list(tmp_path.iterdir())


def test_float32_angles_are_caught(tmp_path, monkeypatch):
    right = ropewalk.Rope.at

    def float32_angles(rope, positions, **kwargs):
        angle = positions.float().unsqueeze(-1) * torch.from_numpy(rope.inv_freq).float()
        rotation = right(rope, positions, **kwargs)
        return ropewalk.Rotation(angle.cos(), angle.sin(), pairing=rotation.pairing)

    monkeypatch.setattr(ropewalk.Rope, "at", float32_angles)
    refused(tmp_path, "error of cos and sin up to position 255 must be at most 3.0e-08, got", 2)


def test_nan_angles_are_caught(tmp_path, monkeypatch):
    def nan_angles(rope, positions, **kwargs):
        nan = torch.full((len(positions), 64), torch.nan)
        return ropewalk.Rotation(nan, nan, pairing="half")

    monkeypatch.setattr(ropewalk.Rope, "at", nan_angles)
    refused(tmp_path, "cos and sin up to position 255 .*got nan", 2)


@pytest.mark.parametrize("wrong", ["q", "k"])
def test_a_wrong_rotation_is_caught(tmp_path, monkeypatch, wrong):
    right = ropewalk.Rotation.__call__

    def rotates_one_token_backwards(rotation, q, k=None, *, layout):
        turned = dict(zip("qk", right(rotation, q, k, layout=layout), strict=True))
        back = dict(zip("qk", right(rotation.inverse(), q, k, layout=layout), strict=True))
        turned[wrong][:, 1, 5] = back[wrong][:, 1, 5]
        return turned["q"], turned["k"]

    monkeypatch.setattr(ropewalk.Rotation, "__call__", rotates_one_token_backwards)
    refused(tmp_path, f"error of rotated {wrong} must be at most 2.4e-07", 3)


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    with pytest.raises(FileExistsError):
        demo.run(tmp_path / "file", said.append)
    assert not said


def test_without_matplotlib_only_the_plots_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises
    said: list[str] = []
    demo.run(tmp_path / "plots", said.append)
    reason = 'plots: matplotlib must be installed. Run pip install ".[plots]" in a clone of ropewalk.'
    assert said[-3:-1] == ["[4/4] Plot", f"  left out: {reason}"]
    assert re.fullmatch(r"All checks passed in [\d.]+ s\.", said[-1])
    assert sum(line.startswith("[") for line in said) == 4
    assert not (tmp_path / "plots").exists()


def test_without_mpmath_it_says_which_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpmath", None)  # importing it raises
    done = CliRunner().invoke(cli.main, ["demo", "--folder", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output == ('Error: demo: mpmath must be installed. Run pip install ".[demo]" in a clone of ropewalk.\n')
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"ropewalk[plots]", "mpmath>=1.3"} == set(extras["demo"])


def test_only_the_demo_and_the_tests_need_mpmath() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not any(requirement.startswith("mpmath") for requirement in project["dependencies"])
    assert "mpmath>=1.3" in project["optional-dependencies"]["test"]
    importing = {
        path.name
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"(import|from|_module\(\")\s*mpmath", path.read_text("utf-8"))
    }
    assert importing == {"demo.py"}


def test_demo_and_benchmark_need_no_package_of_another_extra():
    """`pip install ".[demo]"` installs matplotlib and mpmath, and nothing that other extras need."""
    blocked = ("safetensors", "filelock", "plotly", "huggingface_hub", "transformers", "tokenizers")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import ropewalk.tools.demo, ropewalk.tools.bench"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
