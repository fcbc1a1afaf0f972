"""RotaryEmbedding has no state that a cast, a move or a wrapper can change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ropewalk import Rope, RopeError, RotaryEmbedding, YaRN

ROPE = Rope(16, 5e5, "half", scaling=YaRN(4, 64))
POSITIONS = torch.tensor([0, 9, 1_000_003])


def embed() -> RotaryEmbedding:
    return RotaryEmbedding(ROPE, layout="bshd")


def to_meta_and_back(module: nn.Module) -> nn.Module:
    with torch.device("meta"):
        fresh = RotaryEmbedding(ROPE, layout="bshd")
    return fresh.to_empty(device="cpu")


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.float16),
    "to meta": lambda m: m.to("meta"),
    "meta and to_empty": to_meta_and_back,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "requires_grad_": lambda m: m.requires_grad_(True),
}


@pytest.mark.parametrize("way", WAYS)
def test_is_unchanged(way: str) -> None:
    q, k = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 1, 16)
    wanted = ROPE.at(POSITIONS)(q, k, layout="bshd")
    for mine, plain in zip(WAYS[way](embed())(q, k, POSITIONS), wanted, strict=True):
        assert torch.equal(mine, plain)


def test_has_no_parameters_or_buffers() -> None:
    module = embed()
    assert module.state_dict() == {}
    assert not list(module.buffers())
    assert not list(module.parameters())
    assert module.load_state_dict({}, strict=True)


def test_k_may_be_none() -> None:
    q = torch.randn(2, 3, 4, 16)
    rotated = embed()(q, None, POSITIONS)
    assert torch.equal(rotated, ROPE.at(POSITIONS)(q, layout="bshd"))


def test_angles_follow_q() -> None:
    assert embed()(torch.empty(2, 3, 4, 16, device="meta"), None, POSITIONS).is_meta


def test_repr() -> None:
    assert repr(RotaryEmbedding(Rope(8, 1e4, "half"), layout="thd")) == (
        "RotaryEmbedding(Rope(head_dim=8, base=10000.0, pairing='half'), layout='thd')"
    )


def test_refusals() -> None:
    with pytest.raises(RopeError, match="RotaryEmbedding: rope must be a Rope, got 64"):
        RotaryEmbedding(64, layout="bshd")  # type: ignore[arg-type]
    with pytest.raises(RopeError, match="RotaryEmbedding: layout must be one of"):
        RotaryEmbedding(ROPE, layout="bsdh")
    with pytest.raises(TypeError):
        embed()(torch.randn(2, 3, 4, 16), None)  # positions are never guessed
