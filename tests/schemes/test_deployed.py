"""Schemes of single models, compared with the code of engines (golden/deployed.json) and with formulas in mpmath."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import oracle
from each import each
from ropewalk import Rope, RopeError, Rotation, diff, formats, from_config, schemes
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.engines import ENGINES
from ropewalk.rope.axes import Axes
from ropewalk.schemes import NTK, DynamicNTK, PerAxis, RIFLEx, Scheme, TeleChat3, YaRN, default

ROWS = json.loads((Path(__file__).parents[1] / "golden" / "deployed.json").read_text())["rows"]
GROK = {
    "architectures": ["Grok1ForCausalLM"],
    "model_type": "git",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 208533496,
    "attn_temperature_len": 1024,
    "attn_logit_softcapping": 30.0,
    "rope_type": "original",
    "original_max_position_embeddings": 8192,
    "scaling_factor": 16.0,
    "extrapolation_factor": 1.0,
    "attn_factor": 1.0,
    "beta_fast": 8,
    "beta_slow": 1,
}
"""The config of Grok 2, with fewer layers."""


def rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    return [(row["id"], row) for row in ROWS if row["id"].split()[0] == name]


def test_grok() -> None:
    """`from_config` gives the frequencies of SGLang's class, which applies no attention factor."""

    def check(row: dict[str, Any]) -> None:
        p = row["params"]
        config = {
            **GROK,
            "head_dim": p["rotary_dim"],
            "rope_theta": p["base"],
            "original_max_position_embeddings": p["max_position_embeddings"],
            "rope_type": p["extra_method"],
            "scaling_factor": p["scaling_factor"],
            "beta_fast": p.get("beta_fast", 32),
            "beta_slow": p.get("beta_slow", 1),
        }
        rope = from_config(config).rope
        assert (rope.pairing, rope.rotary_dim) == ("half", p["rotary_dim"])
        assert rope.attention_factor == row["largest_cos"] == 1.0
        # The logarithm of the slowest frequency is about -19, and is rounded to float32 before its power is taken.
        np.testing.assert_allclose(rope.inv_freq, row["inv_freq"], rtol=3e-6)
        if isinstance(rope.scaling, Scheme):
            found = np.array(rope.scaling.inv_freq_float32(p["base"], p["rotary_dim"]))
            deployed = np.float32(row["inv_freq"]).astype(np.float64)
            # A derived bound. A float32 function is correct to a unit of its last place, at most 2^-23 of the value, so
            # the power of two processors differs by that, and so does a product or sum of what differs.
            # Power, factor, reciprocal, product and sum: 5 units.
            assert (np.abs(found / deployed - 1) <= 5 * 2.0**-23).all()

    each(rows("grok"), check)
    assert {row["params"]["extra_method"] for _, row in rows("grok")} == {"original", "yarn_linear"}


def test_half_of_the_head_of_grok() -> None:
    rope = from_config({**GROK, "rope_rotate_half_dims": True}).rope
    assert rope == Rope(128, 208533496.0, "half", rotary_dim=64)


def test_grok_1() -> None:
    """The file of Grok 1 states no base."""
    config = {"model_type": "grok-1", "hidden_size": 6144, "num_attention_heads": 48, "num_hidden_layers": 64}
    with pytest.warns(UserWarning, match="the base is 10000"):
        ropes = from_config(config)
    assert (ropes.rope, ropes.query_scale) == (Rope(128, 1e4, "half"), None)


def test_git_has_no_rope() -> None:
    for architectures in (["GitForCausalLM"], None):
        with pytest.raises(RopeError, match="git has no rotary positions"):
            from_config({**GROK, "architectures": architectures})


@pytest.mark.parametrize(("position", "factor"), [(0, 1.0), (1024, 1.0), (32 * 1024, 1.5), (2**20, 2.0)])
def test_the_query_scale_of_grok(position: int, factor: float) -> None:
    """SGLang's kernel multiplies the scores of positions after 1024 by log2(position) / log2(1024)."""
    ropes = from_config(GROK)
    assert ropes.query_scale is not None
    assert ropes.query_scale.at(position) == pytest.approx(factor, rel=1e-15)  # type: ignore[call-arg, arg-type]
    assert "q is multiplied by max(1, ln(position) / ln(1024))" in ropes.explain()
    assert "after it has capped them" in ropes.warnings[0]
    assert from_config({**GROK, "attn_temperature_len": -1}).query_scale is None
    with pytest.raises(RopeError, match="attn_temperature_len must be an integer of at least 2"):
        from_config({**GROK, "attn_temperature_len": 1})


def test_telechat3() -> None:
    """`from_config` gives the attention factor that vLLM computes."""
    config = {
        "model_type": "telechat3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    }

    def check(row: dict[str, Any]) -> None:
        rope = from_config({**config, "rope_scaling": row["params"]}).rope
        read_as = dict(row["read_as"])
        assert rope.attention_factor == pytest.approx(read_as["attention_factor"], rel=1e-15)
        yarn = from_config({**config, "rope_scaling": read_as}).rope
        assert (yarn.scaling or 0) != rope.scaling
        assert rope.inv_freq.tolist() == yarn.inv_freq.tolist()

    each(rows("telechat3"), check)
    scaling = rows("telechat3")[0][1]["params"]
    written = from_config({**config, "rope_scaling": scaling}).to_hf_config(version=4)
    assert written["rope_scaling"]["rope_type"] == "telechat3-yarn"
    assert from_config(written).rope == from_config({**config, "rope_scaling": scaling}).rope
    assert TeleChat3(4.0, 8, attention_factor=1.5).compute_attention_factor() == 1.5
    # mlx-lm's models/telechat3.py has the YaRN of rope_utils.py, which reads the mscales. vLLM runs models/llama.py.
    config |= {"architectures": ["TeleChat3ForCausalLM"]}
    equal = {**config, "rope_scaling": {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}}
    assert not any("so the attention factor is 1" in said for said in from_config(equal).warnings)
    found = diff.engines(equal, names=("vllm", "mlx-lm"))
    assert (found.verdict, found.facts["states"]) == ("differ", {"vLLM": "same", "mlx-lm": "differs"})


LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 4096}
NANOCHAT = {**LLAMA, "model_type": "nanochat", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
TELECHAT3 = {
    **LLAMA,
    "model_type": "telechat3",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "telechat3-yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize(
    ("engine", "config", "factor", "sign"),
    [
        ("vllm", TELECHAT3, 1.242601513195981, 1),
        ("vllm", {**TELECHAT3, "rope_scaling": {**TELECHAT3["rope_scaling"], "attention_factor": 2.0}}, 1.2426015, 1),
        ("mlx-lm", TELECHAT3, 1.3465735902799727, 1),
        ("mlx-lm", NANOCHAT, 1.0, -1),
        ("transformers", NANOCHAT, 1.0, -1),
        ("sglang", TELECHAT3, None, 1),
    ],
)  # fmt: skip
def test_engines(engine: str, config: dict[str, Any], factor: float | None, sign: int) -> None:
    """mlx-lm 0.32.2 gives TeleChat 3 the factor of YaRN, and SGLang 0.5.23 does not know the scheme."""
    [(config_rope, _)] = ropes_for_engines(config)[1]
    answer = ENGINES[engine].apply_rule(config_rope)
    if factor is None:
        assert answer.refusal == "get_rope: Unknown RoPE scaling type (ValueError)"
        return
    assert answer.rope is not None
    assert answer.rope.attention_factor == pytest.approx(factor, rel=1e-7)
    assert answer.rope.inv_freq.tolist() == from_config(config).rope.inv_freq.tolist()
    assert np.sign(answer.rope.inv_freq[0]) == sign


def test_riflex() -> None:
    """One pair of the first axis has the frequency of the authors' code, whose programs call it only for videos longer
    than the pair's wavelength. All others are as without the scheme."""

    def check(row: dict[str, Any]) -> None:
        p = row["params"]
        others = (128 - p["dim"]) // 2
        axes = Axes.axial((p["dim"], others, others))
        riflex = RIFLEx(pair=p["k"] - 1, length=p["L_test"])
        scheme = PerAxis([riflex, None, None])
        rope = Rope(128, p["theta"], "interleaved", axes=axes, scaling=scheme)
        expected = [
            *oracle.inv_freq(p["theta"], p["dim"]),
            *oracle.inv_freq(p["theta"], others),
            *oracle.inv_freq(p["theta"], others),
        ]
        pair = p["k"] - 1
        longer = p["L_test"] > 2 * mpmath.pi / expected[pair]
        if longer:
            expected[pair] = mpmath.mpf("0.9") * 2 * mpmath.pi / p["L_test"]
        else:
            row["inv_freq"][pair] = default.inv_freq_float32(p["theta"], p["dim"])[pair]
        np.testing.assert_allclose(rope.inv_freq, np.array(expected, float), rtol=1e-14)
        np.testing.assert_allclose(rope.inv_freq[: p["dim"] // 2], row["inv_freq"], rtol=4e-7)
        assert riflex.inv_freq_float32(p["theta"], p["dim"]) == tuple(np.float32(row["inv_freq"]).tolist())
        grid = torch.tensor([[0, 3, 39], [1, 5, 7], [2, 4, 8]])
        deployed = rope.at(grid, numerics="float32")
        angle = np.float32(row["inv_freq"]) * np.float32([[0], [3], [39]])
        np.testing.assert_allclose(deployed.cos[:, : p["dim"] // 2], np.cos(angle), atol=2e-7)

    each(rows("riflex"), check)


def test_riflex_on_another_axis_of_the_same_size() -> None:
    plain = Rope(32, 1e4, "half", axes=Axes.axial((16, 16)))
    rope = Rope(32, 1e4, "half", axes=Axes.axial((16, 16)), scaling=PerAxis([None, RIFLEx(2, 100, turns=1.0)]))
    expected = plain.inv_freq
    expected[10] = 2 * np.pi / 100
    assert rope.inv_freq.tolist() == expected.tolist()
    assert Rope(16, 1e4, "half", scaling=RIFLEx(2, 100, turns=1.0)).inv_freq[2] == expected[10]


def test_a_scheme_for_each_axis() -> None:
    """CineScale multiplies the base of rows and columns by 20. YaRN scales an axis like a head of its channels."""
    axes = Axes.axial((44, 42, 42))
    rows = NTK(20.0 ** (40 / 42))
    rope = Rope(128, 1e4, "interleaved", axes=axes, scaling=PerAxis([None, rows, rows]))
    expected = [*oracle.inv_freq(1e4, 44), *oracle.inv_freq(2e5, 42), *oracle.inv_freq(2e5, 42)]
    np.testing.assert_allclose(rope.inv_freq, np.array(expected, float), rtol=1e-13)
    grid = torch.tensor([[0, 3], [1, 5], [2, 4]])
    angles = grid.double()[torch.tensor(axes.axis)].T * torch.tensor(rope.inv_freq)
    for numerics in ("exact", "float32"):
        assert torch.allclose(rope.at(grid, numerics=numerics).cos.double(), angles.cos(), atol=1e-6)
    yarn = YaRN(4.0, 64, attention_factor=1.0)
    scaled = Rope(128, 1e4, "half", axes=axes, scaling=PerAxis([None, yarn, None])).inv_freq[22:43]
    np.testing.assert_allclose(scaled, np.array(oracle.yarn(1e4, 42, 4.0, 64), float), rtol=1e-13)
    one = PerAxis([rows])
    assert (
        Rope(42, 1e4, "half", scaling=one).inv_freq.tolist()
        == list(one.inv_freq(1e4, 42))
        == list(rows.inv_freq(1e4, 42))
    )
    assert PerAxis([None, yarn]).facts() == {"rope_type": "per_axis", "schemes": [None, yarn.facts()]}


@pytest.mark.parametrize("model_type", ["nanochat", "talkie"])
def test_the_opposite_direction(model_type: str) -> None:
    """q as the model's own code rotates it, and exact angles at far positions."""
    config = {
        "model_type": model_type,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
    }
    ropes = from_config({**config, "rope_theta": 1e4})
    [(_, row)] = rows(model_type)
    q = torch.from_numpy(oracle.golden_q(row["params"]["shape"]))
    expected = torch.tensor(row["rotated"]).view(q.shape)
    rope = ropes.rope
    assert (rope.at(torch.arange(q.shape[-2]))(q, layout="bhsd") - expected).abs().max() < 2e-6
    positions = [0, 1, 100_003, -7, 2**31 - 1]
    cos, sin = oracle.cos_sin(positions, [-w for w in oracle.inv_freq(1e4, 8)])
    for found, exact in ((rope.at(torch.tensor(positions)), (cos, sin)), (rope.tables(positions), (cos, sin))):
        tables = found if isinstance(found, tuple) else (found.cos, found.sin)
        for table, wanted in zip(tables, exact, strict=True):
            assert np.abs(np.asarray(table, dtype=np.float64) - wanted).max() <= 3.2e-8
    assert rope.wavelength.tolist() == Rope(8, 1e4, "half").wavelength.tolist()
    for dtype in (torch.float32, torch.bfloat16):
        stored = torch.tensor([-float(w) for w in oracle.inv_freq(1e4, 8)]).to(dtype)
        assert formats.difference(rope, stored, 1.0) == ""
        assert "inv_freq[0] 1 instead of -1" in formats.difference(rope, -stored, 1.0)
    assert "reversed: on default" in ropes.explain()
    assert "pairs 0-3 are not slowed" in ropes.explain()


def test_the_opposite_direction_of_a_scheme() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = {
        "model_type": "nanochat",
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
        "rope_scaling": scaling,
    }
    ropes = from_config(config)
    assert ropes.rope.scaling == schemes.Reversed(schemes.Linear(4.0))
    np.testing.assert_allclose(ropes.rope.inv_freq, [-float(w) / 4 for w in oracle.inv_freq(1e4, 8)], rtol=1e-15)
    assert ropes.to_hf_config(version=4)["rope_scaling"] == scaling
    assert from_config(ropes.to_hf_config(version=5)).rope == ropes.rope
    assert from_config(config, engine="transformers").rope == ropes.rope
    with pytest.raises(RopeError, match="config: Reversed: scaling must be a scheme that is the same at every length"):
        from_config({**config, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})


def test_fope_is_refused_with_a_way_that_works() -> None:
    """The message names the tables of each key head, which `Rotation` applies as vLLM 0.32 does."""
    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    scaled = {**llama, "rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "fope_sep_head": True}}
    for config in (scaled, {"model_type": "interns1_pro", "text_config": {}}):
        with pytest.raises(RopeError, match=r"FoPE.*Rotation\(cos, sin, pairing='half', per_head=True\)"):
            from_config(config)
    [(_, row)] = rows("fope")
    p = row["params"]
    tokens, heads, key_heads, dim, pairs = (p[name] for name in ("tokens", "heads", "key_heads", "dim", "pairs"))
    angle = torch.arange(tokens)[:, None] * torch.tensor([float(w) for w in oracle.inv_freq(1e4, dim)[:pairs]]).double()
    mixed = [
        torch.einsum("tD,hDd->htd", table, torch.from_numpy(make((key_heads, pairs, pairs))).double())
        for table, make in ((angle.cos(), oracle.golden_q), (angle.sin(), oracle.golden_k))
    ]
    cos, sin = (torch.nn.functional.pad(table, (0, dim // 2 - pairs), value=1).float() for table in mixed)
    group = heads // key_heads
    of_q = Rotation(*(t.repeat_interleave(group, 0) for t in (cos, sin)), pairing="half", per_head=True)
    of_k = Rotation(cos, sin, pairing="half", per_head=True)
    for rotation, name, make, count in ((of_q, "q", oracle.golden_q, heads), (of_k, "k", oracle.golden_k, key_heads)):
        x = torch.from_numpy(make((1, tokens, count, dim)))
        expected = torch.tensor(row[name]).view(x.shape)
        assert (rotation(x, layout="bshd") - expected).abs().max() < 3e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RIFLEx(-1, 40), "RIFLEx: pair must be an integer from 0"),
        (lambda: RIFLEx(1, 0), "RIFLEx: length must be"),
        (lambda: RIFLEx(1, 40, turns=1.5), "RIFLEx: turns must be"),
        (
            lambda: Rope(16, 1e4, "half", scaling=RIFLEx(8, 40)),
            "pair must be less than 8, the number of pairs of the axis",
        ),
        (
            lambda: Rope(32, 1e4, "half", axes=Axes.axial((16, 16)), scaling=RIFLEx(1, 40)),
            "one progression over the whole head. Pass PerAxis with a scheme or None for each axis.",
        ),
        (
            lambda: Rope(16, 1e4, "half", scaling=PerAxis([None, NTK(2.0)])),
            "schemes must have 1, one for each axis, got",
        ),
        (lambda: PerAxis([DynamicNTK(2.0, 64)]), "schemes must be a list of schemes that are the same at every length"),  # type: ignore[list-item]
        (lambda: PerAxis([None, YaRN(4.0, 64)]), "Pass attention_factor=1.0 to YaRN."),
        (lambda: from_config({**GROK, "rope_type": "other"}), "rope_type must be one of default, "),
        (lambda: from_config({**GROK, "extrapolation_factor": 0.5}), "extrapolation_factor must be 1.0"),
    ],
)
def test_misuse(make: Any, message: str) -> None:
    with pytest.raises(RopeError, match=message):
        make()


def test_schemes_of_single_models_are_imported_when_they_are_used() -> None:
    """Their names and rope_types are known before, and the table states those of the classes."""
    program = (
        "import sys, ropewalk.schemes as s; assert 'telechat3-yarn' in s.SCHEMES and 'LeRoPE' in s.BY_NAME\n"
        "assert not {'ropewalk.schemes.telechat3', 'ropewalk.schemes.lerope'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    for name, (_, rope_type) in schemes._LATER.items():
        scheme = schemes.BY_NAME[name]
        assert (scheme.__name__, scheme.rope_type if scheme.in_configs else "") == (name, rope_type)
        assert scheme.aliases == ()


@pytest.mark.parametrize("on_top", [schemes.Reversed, lambda scheme: schemes.LeRoPE([0.5] * 4, scheme)])
def test_a_scheme_on_top_keeps_the_rest_of_the_other(on_top: Any) -> None:
    scaled = on_top(schemes.YaRN(4.0, 4096, mscale_all_dim=1.0, mscale=2.0))
    mscale = 0.1 * np.log(4) + 1
    assert scaled.softmax_factor == pytest.approx(mscale**2)
    assert scaled.compute_attention_factor() == pytest.approx((0.2 * np.log(4) + 1) / mscale)
    assert scaled.trained_length(16_384) == 4096
    assert {"on": "yarn", "factor": 4.0}.items() <= scaled.facts().items()
    plain = on_top(None)
    assert (plain.softmax_factor, plain.compute_attention_factor(), plain.trained_length(77)) == (1.0, 1.0, 77)
    assert plain.facts()["on"] == "default"
