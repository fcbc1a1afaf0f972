"""The recipe of docs/several-axes.md for V-JEPA 2, compared with numbers of transformers in golden/vjepa2.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
import ropewalk
from ropewalk import RopeError, from_config
from test_docs import ROOT, blocks_of

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "vjepa2.json").read_text())


def recipe() -> dict[str, Any]:
    """Run the block of the page that defines `as_vjepa2`, unchanged. Return its names."""
    (block,) = (one for one in blocks_of(ROOT / "docs" / "several-axes.md") if "def as_vjepa2(" in one.code)
    names = {"torch": torch, "Rope": ropewalk.Rope, "Axes": ropewalk.Axes}
    block.run(names)
    return names


@pytest.mark.parametrize("name", ["q", "k"])
def test_as_recorded(name: str) -> None:
    """The result agrees up to the last bits of float32 sums; positions are below 16. A plain rotation does not."""
    shape = GOLDEN[f"{name}_shape"]
    x = torch.from_numpy(getattr(oracle, f"golden_{name}")(shape)[:, : GOLDEN[f"{name}_heads"]].copy())
    expected = np.array(GOLDEN[f"{name}_rot"], dtype=np.float32).reshape(x.shape)
    names = recipe()
    rotation = names["vjepa2"].at(torch.tensor(GOLDEN["positions"]))
    # The bound of the recording: |pair| · (position · 2⁻²³ + 1e-6).
    bound = np.sqrt(2) * (np.max(GOLDEN["positions"], axis=0) * 2.0**-23 + 1e-6)[:, None]
    assert (np.abs(names["as_vjepa2"](x, rotation).numpy() - expected) <= bound).all()
    assert np.abs(rotation(x, layout="bhsd").numpy() - expected).max() > 1.0


def test_from_config_refuses_it_and_names_the_recipe() -> None:
    with pytest.raises(RopeError, match=r"which is not a rotation; see docs/several-axes\.md"):
        from_config({"model_type": "vjepa2", "hidden_size": 1024, "num_attention_heads": 16})
