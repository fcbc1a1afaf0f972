"""Comparison with numbers that were recorded from other projects' code (see golden/README.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
import ropewalk
from each import each
from ropewalk import NTK, Llama3, Rope, YaRN, schemes

# Some of these configs state no base.
pytestmark = pytest.mark.filterwarnings("ignore:.* so the base is 10000:UserWarning")

GOLDEN = Path(__file__).parent / "golden"
LARGEST_PAIR = math.sqrt(2)  # of the inputs

# Other projects compute the power in float32, where the rounding of the exponent alone costs ln(base) · 2⁻²⁵. These
# recordings are this far from the exact value (mpmath); test_recorded_distances holds the numbers.
FAR_FROM_EXACT = {"default-lfm2": 4.3e-7, "llama-3.1-8b": 3.3e-7, "llama 3.1, peers": 3.3e-7}


def load(path: Path) -> Any:
    return json.loads(path.read_text())


MODELS = {path.stem: load(path) for path in sorted((GOLDEN / "models").glob("*.json"))}
PEERS = {path.stem: load(path) for path in sorted((GOLDEN / "peers").glob("*.json"))}
ROWS = load(GOLDEN / "schemes.json")["rows"]
CASES = [pytest.param(name, case, id=f"{name}: {case['id']}") for name, p in PEERS.items() for case in p["cases"]]


def recorded(case: dict[str, Any], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the recorded output of q or k, with the same heads: [1, heads, tokens, head_dim]."""
    make, heads = (oracle.golden_q, case["q_heads"]) if name == "q" else (oracle.golden_k, case["k_heads"])
    x = make(case[f"{name}_shape"])[:, :heads]
    rotated = np.array(case[f"{name}_rot"], dtype=np.float32).reshape(x.shape)
    return torch.from_numpy(x), torch.from_numpy(rotated)


def assert_rotated(rope: Rope, case: dict[str, Any], slack: float = 1.0) -> None:
    rotation = rope.at(torch.tensor(case["positions"]))
    bound = torch.tensor([p * 2.0**-23 + 1e-6 for p in case["positions"]]).unsqueeze(-1)
    bound = slack * LARGEST_PAIR * rope.attention_factor * bound
    for name in ("q", "k"):
        x, expected = recorded(case, name)
        error = (rotation(x, layout="bhsd") - expected).abs()
        assert (error <= bound).all(), f"{name}: {error.amax((0, 1, 3))} over {bound.squeeze()}"


@pytest.mark.parametrize("name", MODELS)
class TestModels:
    def rope(self, name: str) -> Rope:
        return ropewalk.from_config(MODELS[name]["config"]).rope

    def test_frequencies_and_attention_factor(self, name: str) -> None:
        case, rope = MODELS[name]["case"], self.rope(name)
        np.testing.assert_allclose(rope.inv_freq, case["inv_freq"], rtol=FAR_FROM_EXACT.get(name, 3e-7))
        assert rope.attention_factor == pytest.approx(case["attention_scaling"], rel=1e-7)

    def test_rotated_q_and_k(self, name: str) -> None:
        assert_rotated(self.rope(name), MODELS[name]["case"])


def test_schemes_of_released_models() -> None:
    each(((f"{row['model']} {row['case']}", row) for row in ROWS), check_scheme)


def check_scheme(row: dict[str, Any]) -> None:
    given = {k: v for k, v in row["rope_parameters"].items() if k not in ("type", "finetuned", "llama_4_scaling_beta")}
    base, rope_type = given.pop("rope_theta"), given.pop("rope_type")
    given.pop("partial_rotary_factor", None)
    given = {k: v for k, v in given.items() if not k.startswith("mrope")}
    scaling = None if rope_type == "default" else schemes.SCHEMES[rope_type](**given)
    rope = Rope(row["rotary_dim"], base, "half", scaling=scaling)
    np.testing.assert_allclose(rope.inv_freq, row["inv_freq"], rtol=FAR_FROM_EXACT.get(row["model"], 3e-7))
    assert rope.attention_factor == pytest.approx(row["attention_scaling"], rel=1e-7)


def test_recorded_distances() -> None:
    by_model = {row["model"]: row["inv_freq"] for row in ROWS}
    exact = {
        "default-lfm2": oracle.inv_freq(1e6, 80),
        "llama-3.1-8b": oracle.by_parts(5e5, 128, factor=8, alpha=1, beta=4, length=8192),
    }
    for model, frequencies in exact.items():
        error = np.abs(np.array(by_model[model]) / np.array(frequencies, dtype=np.float64) - 1).max()
        assert FAR_FROM_EXACT[model] - 1e-8 < error < FAR_FROM_EXACT[model]


def meta(case: dict[str, Any]) -> Rope:
    p = case["params"]
    scaling = None
    if p["use_scaled"]:
        scaling = Llama3(p["scale_factor"], p["low_freq_factor"], p["high_freq_factor"], p["old_context_len"])
    return Rope(p["dim"], p["theta"], "interleaved", scaling=scaling)


def llama2c(case: dict[str, Any]) -> Rope:
    return Rope(case["params"]["head_size"], case["params"]["theta"], "interleaved")


def lucidrains(case: dict[str, Any]) -> Rope:
    p = case["params"]
    scaling = NTK(p["theta_rescale_factor"]) if "theta_rescale_factor" in p else None
    return Rope(p["dim"], p.get("theta", 10_000.0), "interleaved", scaling=scaling)


def flash_attn(case: dict[str, Any]) -> Rope:
    p = case["params"]
    return Rope(case["q_shape"][-1], p["base"], pairing(p["interleaved"]), rotary_dim=p["rotary_dim"])


def ggml(case: dict[str, Any]) -> Rope:
    p = case["params"]
    scaling: schemes.Scheme | None = None
    if p["ext_factor"]:
        scaling = YaRN(1 / p["freq_scale"], p["n_ctx_orig"], beta_fast=p["beta_fast"], beta_slow=p["beta_slow"])
    elif p["freq_factors"]:
        scaling = schemes.PerPair(p["freq_factors"], attention_factor=p["attn_factor"])
    return Rope(
        case["q_shape"][-1],
        p["freq_base"],
        pairing(p["mode"] == 0),
        rotary_dim=p["n_dims"],
        rotary_offset=p["offset"],
        scaling=scaling,
    )


def mlx(case: dict[str, Any]) -> Rope:
    p = case["params"]
    head_dim, layout = case["q_shape"][-1], pairing(p["traditional"])
    if "freqs" in p:  # the reciprocals of Llama 3.1's frequencies
        return Rope(head_dim, 500_000.0, layout, scaling=Llama3(8, 1, 4, 8192))
    return Rope(head_dim, p["base"], layout, rotary_dim=p["dims"])


def yarn_authors(case: dict[str, Any]) -> Rope:
    p = case["params"]
    if case["id"].startswith("linear"):
        return Rope(128, 10_000.0, "half", scaling=schemes.Linear(p["scale"]))
    factor = p.get("scale") or (max(case["positions"]) + 1) / p["max_position_embeddings"]
    return Rope(128, 10_000.0, "half", scaling=YaRN(factor, p["original_max_position_embeddings"]))


def torchtune(case: dict[str, Any]) -> Rope:
    p = case["params"]
    scaling = Llama3(p["scale_factor"], 1, 4, 8192) if "scale_factor" in p else None
    return Rope(p["dim"], p["base"], pairing("half" not in case["layout"]), scaling=scaling)


def gpt_fast(case: dict[str, Any]) -> Rope:
    return Rope(case["q_shape"][-1], case["params"]["theta"], "interleaved")


def pairing(interleaved: bool) -> str:
    return "interleaved" if interleaved else "half"


MEANING: dict[str, Callable[[dict[str, Any]], Rope]] = {
    "flash_attn_torch": flash_attn,
    "ggml": ggml,
    "gpt_fast": gpt_fast,
    "jquesnelle_yarn": yarn_authors,
    "llama2c": llama2c,
    "meta_llama": meta,
    "mlx": mlx,
    "rotary_embedding_torch": lucidrains,
    "torchtune": torchtune,
}


def test_every_peer_is_read() -> None:
    assert set(PEERS) == set(MEANING)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_peers_rotate_alike(name: str, case: dict[str, Any]) -> None:
    rope = MEANING[name](case)
    if case.get("layout") is not None:
        assert rope.pairing == case["layout"]
    assert_rotated(rope, case, slack=4.0 if name == "ggml" else 1.0)


@pytest.mark.parametrize(("name", "case"), [c for c in CASES if c.values[1].get("inv_freq")])
def test_peers_have_the_same_frequencies(name: str, case: dict[str, Any]) -> None:
    rope = MEANING[name](case)
    recording = "llama 3.1, peers" if isinstance(rope.scaling, Llama3) else case["id"]
    # The YaRN authors' linear class divides the position, not the frequency.
    divided = rope.scaling.factor if isinstance(rope.scaling, schemes.Linear) else 1.0
    np.testing.assert_allclose(rope.inv_freq * divided, case["inv_freq"], rtol=FAR_FROM_EXACT.get(recording, 3e-7))
    if case.get("mscale") is not None:
        assert rope.attention_factor == pytest.approx(case["mscale"], rel=1e-7)
