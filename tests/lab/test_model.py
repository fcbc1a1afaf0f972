"""Test the model's sizes, its absolute positions, and its errors. test_export.py tests the whole forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ropewalk import KVCache, Rope, RopeError
from ropewalk.tools.lab.model import EPS, LanguageModel, Size, SwiGLU

SIZE = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_layers": 2, "num_heads": 2}
TOKENS = torch.tensor([[1, 2, 3, 10], [0, 9, 9, 4]])


def test_parameters_of_the_two_models() -> None:
    """They have about 0.85 and 0.41 million parameters, as in the experiments that they repeat."""
    for size, wanted in ((Size(256, 128, 344, 4, 4), 857_216), (Size(65, 128, 344, 2, 4), 412_544)):
        # embedding and head; q, k, v, o, gate, up, down and two norms for each layer; the last norm
        by_hand = 2 * size.vocab_size * 128 + size.num_layers * (4 * 128 * 128 + 3 * 128 * 344 + 2 * 128) + 128
        assert sum(p.numel() for p in LanguageModel(size).parameters()) == by_hand == wanted


def test_tied_head_is_the_embedding() -> None:
    model = LanguageModel(Size(**SIZE, tied=True))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_swiglu() -> None:
    torch.manual_seed(0)
    layer = SwiGLU(Size(**SIZE)).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    gate, up, down = (
        w.detach().numpy() for w in (layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight)
    )
    y = x.numpy() @ gate.T
    wanted = (y / (1 + np.exp(-y)) * (x.numpy() @ up.T)) @ down.T
    np.testing.assert_allclose(layer(x).detach().numpy(), wanted, rtol=1e-12)


def without_layers(model: LanguageModel) -> LanguageModel:
    """Make attention and SwiGLU return 0, so that the logits depend only on the embedding."""
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model.double()


def head(model: LanguageModel, x: np.ndarray) -> np.ndarray:
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return normed @ model.lm_head.weight.detach().numpy().T


@pytest.mark.parametrize("positions", [torch.tensor([0, 1, 7, 300]), torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])])
def test_sinusoidal_positions(positions: torch.Tensor) -> None:
    """Vaswani et al.

    2017: √width · embedding, plus sin (even channels) and cos (odd) of position / 10000^(2i/width).
    """
    model = without_layers(LanguageModel(Size(**SIZE, absolute="sinusoidal")))
    waves = np.zeros((*positions.shape, 8))
    for i in range(4):
        angle = positions.numpy() / 10_000 ** (2 * i / 8)
        waves[..., 2 * i], waves[..., 2 * i + 1] = np.sin(angle), np.cos(angle)
    x = np.sqrt(8) * model.embed_tokens.weight.detach().numpy()[TOKENS] + waves
    logits = model(TOKENS, None, positions=positions).detach().numpy()
    np.testing.assert_allclose(logits, head(model, x), rtol=1e-12, atol=1e-14)


def test_learned_positions() -> None:
    model = without_layers(LanguageModel(Size(**SIZE, absolute="learned", max_positions=6)))
    positions = torch.tensor([5, 0, 1, 1])
    x = model.embed_tokens.weight[TOKENS] + model.embed_positions.weight[positions]
    logits = model(TOKENS, None, positions=positions).detach().numpy()
    np.testing.assert_allclose(logits, head(model, x.detach().numpy()), rtol=1e-12, atol=1e-14)
    with pytest.raises(RopeError, match="LanguageModel: positions must be below max_positions=6, got 6"):
        model(TOKENS, None, positions=torch.tensor([0, 1, 2, 6]))


def test_every_layer_gets_the_rotation() -> None:
    """Rotating q and k in only one layer changes the logits, whichever layer it is."""
    torch.manual_seed(0)
    model = LanguageModel(Size(**SIZE)).double()
    rotation = Rope(4, 1e4, "half").at(torch.arange(4), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        plain, turned = model(TOKENS, None), model(TOKENS, rotation)
        for i in range(2):
            kept = model.layers[i].self_attn.q_proj.weight.clone()
            model.layers[i].self_attn.q_proj.weight.zero_()  # scores are 0, turned or not
            other = model(TOKENS, rotation) - model(TOKENS, None)
            model.layers[i].self_attn.q_proj.weight.copy_(kept)
            assert other.abs().max() > 1e-3
    assert (plain - turned).abs().max() > 1e-3


@pytest.mark.parametrize("absolute", [None, "sinusoidal"])
def test_with_a_cache(absolute: Any) -> None:
    torch.manual_seed(0)
    size = Size(**SIZE, num_kv_heads=1, absolute=absolute)
    model, rope = LanguageModel(size).double(), Rope(4, 1e4, "half")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        positions = torch.arange(4) if absolute else None
        whole = model(TOKENS, rope.at(torch.arange(4), dtype=torch.float64), positions=positions)
        cache = KVCache(2, 2, 1, 4, capacity=4, dtype=torch.float64)
        parts = []
        for part in TOKENS.split([2, 1, 1], dim=1):
            step = cache.step(part.shape[1])
            placed = step.positions if absolute else None
            rotation = step.rotation(rope, dtype=torch.float64)
            parts.append(model(part, rotation, positions=placed, cache=step))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)


def test_positions_are_required_only_for_absolute_positions() -> None:
    with pytest.raises(RopeError, match=r"positions must be passed if and only if .*absolute='sinusoidal'\), got None"):
        LanguageModel(Size(**SIZE, absolute="sinusoidal"))(TOKENS, None)
    with pytest.raises(RopeError, match=r"\(absolute=None\), got a tensor of shape \(4,\)"):
        LanguageModel(Size(**SIZE))(TOKENS, None, positions=torch.arange(4))
