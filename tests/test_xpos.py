"""xPos, compared with three other implementations, and its documented bounds, compared with mpmath."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import oracle
from ropewalk import Axes, Rope, RopeError, YaRN, xpos

GOLDEN = json.loads((Path(__file__).parent / "golden" / "xpos.json").read_text())["cases"]
ROPE = Rope(head_dim=8, base=10_000.0, pairing="half")


def exact(positions: list[int], centre: int, scale_base: float = 512.0) -> list[np.ndarray]:
    """Compute cos and sin of q and k for ROPE in mpmath."""
    made: list[list[list[float]]] = [[], [], [], []]
    with mpmath.workdps(oracle.PRECISION):
        for p in positions:
            for sign, (cos, sin) in ((1, made[:2]), (-1, made[2:])):
                rows: list[list[float]] = [[], []]
                for i, w in enumerate(oracle.inv_freq(10_000.0, 8)):
                    zeta = (2 * i + mpmath.mpf("0.4") * 8) / (mpmath.mpf("1.4") * 8)
                    scale = zeta ** (sign * mpmath.mpf(p - centre) / scale_base)
                    rows[0].append(float(mpmath.cos(p * mpmath.mpf(float(w))) * scale))
                    rows[1].append(float(mpmath.sin(p * mpmath.mpf(float(w))) * scale))
                cos.append(rows[0])
                sin.append(rows[1])
    return [np.array(each) for each in made]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["peer"])
def test_other_implementations(case: dict[str, Any]) -> None:
    """Each implementation has its own centre. The bound is the error of the implementation, relative to the scale."""
    rope = Rope(head_dim=64, base=10_000.0, pairing=case["pairing"])
    places = torch.tensor(case["positions"])
    rotations = xpos.at(rope, places, centre=case["centre"])
    shape = (1, 1, len(places), 64)
    zeta = (2 * np.arange(32) + 0.4 * 64) / (1.4 * 64)
    power = (places.numpy() - case["centre"])[:, None] / 512
    columns = np.tile(zeta, 2) if case["pairing"] == "half" else np.repeat(zeta, 2)
    for rotation, sign, x, rotated in (
        (rotations.q, 1, oracle.golden_q((1, 4, len(places), 64)), case["q_rot"]),
        (rotations.k, -1, oracle.golden_k((1, 4, len(places), 64)), case["k_rot"]),
    ):
        first = torch.from_numpy(x[:, :1].astype(np.float32))
        found = rotation(first, layout="bhsd").numpy()
        wanted = np.array(rotated, dtype=np.float32).reshape(shape)
        bound = 2**0.5 * columns ** (sign * power) * (places.numpy()[:, None] * 2.0**-23 + 2e-6)
        assert (np.abs(found - wanted) <= bound).all()


def test_exact() -> None:
    positions = [0, 1, 300, 20_000, 36_000, -9]
    q, k = xpos.at(ROPE, torch.tensor(positions), centre=100)
    for found, wanted in zip((q.cos, q.sin, k.cos, k.sin), exact(positions, 100), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-30)


def test_scores_decay_with_distance_and_do_not_depend_on_the_centre() -> None:
    """The score of q at p and k at p − n is that of the rotation alone, with each pair multiplied by ζ^(n / 512)."""
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    for centre in (0, 1_000, -3_000):
        for p, n in ((5, 0), (400, 400), (4_000, 1_500)):
            rotations = xpos.at(ROPE, torch.tensor([p, p - n]), centre=centre)
            rotated = rotations.q[:1](q, layout="thd"), rotations.k[1:](k, layout="thd")
            score = float((rotated[0] * rotated[1]).sum())
            plain = [ROPE.at(torch.tensor([each]), dtype=torch.float64) for each in (p, p - n)]
            parts = (plain[0](q, layout="thd") * plain[1](k, layout="thd")).reshape(2, 4).sum(0)
            zeta = (2 * np.arange(4) + 0.4 * 8) / (1.4 * 8)
            assert score == pytest.approx(float((parts.numpy() * zeta ** (n / 512)).sum()), abs=1e-5)


def test_attention_factor_and_slice_are_kept() -> None:
    rope = Rope(16, 1e4, "interleaved", rotary_dim=8, rotary_offset=4, scaling=YaRN(4, 64))
    q, k = xpos.at(rope, torch.tensor([32]), centre=32)
    plain = rope.at(torch.tensor([32]))
    for rotation in (q, k):
        assert (rotation.head_dim, rotation.rotary_offset, rotation.pairing) == (16, 4, "interleaved")
        assert rotation.attention_factor == rope.attention_factor
        torch.testing.assert_close(rotation.cos, plain.cos, rtol=1e-7, atol=1e-7)


def test_compiled() -> None:
    places = torch.arange(5)
    made = torch.compile(lambda p: xpos.at(ROPE, p, centre=2).q.cos, fullgraph=True, backend="aot_eager")(places)
    torch.testing.assert_close(made, xpos.at(ROPE, places, centre=2).q.cos)


@pytest.mark.parametrize(
    ("rope", "more", "said"),
    [
        ("rope", {}, "rope must be a Rope of one axis"),
        (Rope(8, 1e4, "half", axes=Axes.sections((2, 2))), {}, "rope must be a Rope of one axis"),
        (ROPE, {"centre": 0.5}, "centre must be an integer"),
        (ROPE, {"scale_base": 0.0}, "scale_base must be"),
        (ROPE, {"centre": 60_000}, "every position must be within 36260 tokens of the centre"),
        (ROPE, {"centre": -800, "scale_base": 11.0}, "every position must be within 779 tokens of the centre"),
    ],
)
def test_refusals(rope: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(RopeError, match=said):
        xpos.at(rope, torch.arange(3), **{"centre": 0, **more})


def test_no_number_overflows() -> None:
    """No distance is beyond the limit of a huge scale_base, and distances of int32 positions do not wrap around."""
    q, _ = xpos.at(ROPE, torch.arange(3), centre=0, scale_base=1e307)
    torch.testing.assert_close(q.cos, ROPE.at(torch.arange(3)).cos)
    with pytest.raises(RopeError, match="got a distance of 4294967296"):
        xpos.at(ROPE, torch.tensor([-(2**31)], dtype=torch.int32), centre=2**31)


def test_up_to_the_last_position() -> None:
    q, k = xpos.at(ROPE, torch.tensor([36_260]), centre=0)
    assert bool(torch.isfinite(torch.stack((q.cos, k.cos, q.sin, k.sin))).all())
