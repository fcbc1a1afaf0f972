"""Test every number on the page of `plots.explorer` against an independent calculation, and its errors."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
import ropewalk
from ropewalk import plots, schemes
from ropewalk.tools.plots.interactive import page as page_module

GOLDEN = Path(__file__).parent / "golden"
LLAMA3 = schemes.Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LLAMA = ropewalk.Rope(head_dim=128, base=500_000.0, pairing="half", scaling=LLAMA3)
YARN = schemes.YaRN(factor=16.0, original_max_position_embeddings=4096)
YARNED = ropewalk.Rope(head_dim=64, base=10_000.0, pairing="interleaved", scaling=YARN)
UNSCALED = ropewalk.Rope(head_dim=64, base=10_000.0, pairing="half")


def config(name: str) -> dict[str, Any]:
    rows = json.loads((GOLDEN / "text_models.json").read_text())["rows"]
    (found,) = [row["config"] for row in rows if row["name"] == name]
    return dict(found)


def data_of(page: str) -> dict[str, Any]:
    """Return the numbers of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def curves_of(*args: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
    data = data_of(plots.explorer(*args, **kwargs))
    return {curve["label"]: {**curve, "distances": data["distances"]} for curve in data["curves"]}


def unpacked(array: dict[str, str]) -> np.ndarray:
    shape = [int(n) for n in array["shape"].split(",")]
    return np.frombuffer(base64.b64decode(array["bdata"]), dtype=f"<{array['dtype']}").reshape(shape)


@pytest.fixture(scope="module")
def curves() -> dict[str, dict[str, Any]]:
    """Return three ropes with trained lengths of 8,192 or 4,096 tokens, at up to 65,536."""
    return curves_of({"llama": LLAMA, "yarn": YARNED, "plain": UNSCALED}, length=65_536, trained_length=4096)


EXPECTED = {
    # name → frequencies before and after scaling, attention factor, trained length
    "llama": (
        oracle.inv_freq(500_000.0, 128),
        oracle.by_parts(500_000.0, 128, 8.0, 1.0, 4.0, 8192),
        1.0,
        8192,
    ),
    "yarn": (
        oracle.inv_freq(10_000.0, 64),
        oracle.yarn(10_000.0, 64, 16.0, 4096),
        0.1 * math.log(16.0) + 1.0,
        4096,
    ),
    "plain": (oracle.inv_freq(10_000.0, 64), oracle.inv_freq(10_000.0, 64), 1.0, 4096),
}
each_curve = pytest.mark.parametrize("name", EXPECTED)
SEVEN_DIGITS = 5e-7  # relative: numbers are written with so many


@each_curve
def test_frequencies(curves: dict[str, dict[str, Any]], name: str) -> None:
    curve = curves[name]
    before, after, factor, trained = EXPECTED[name]
    assert curve["factor"] == pytest.approx(factor, rel=1e-12)
    assert curve["trained"] == trained
    assert (curve["before"] is None) == (name == "plain")
    for row, expected in ((curve["before"] or curve["after"], before), (curve["after"], after)):
        speed = np.array([float(w) for w in expected])
        np.testing.assert_allclose(row["speed"], speed, rtol=SEVEN_DIGITS)
        np.testing.assert_allclose(row["wavelength"], 2 * math.pi / speed, rtol=SEVEN_DIGITS)
        np.testing.assert_allclose(row["turns"], trained * speed / (2 * math.pi), rtol=SEVEN_DIGITS)


@each_curve
def test_vectors(curves: dict[str, dict[str, Any]], name: str) -> None:
    vectors = curves[name]["vectors"]
    _, after, factor, _ = EXPECTED[name]
    assert vectors["strides"] == [1, 32, 1024]
    assert vectors["pairs"] == ([0, 13, 25, 38, 50, 63] if name == "llama" else [0, 6, 12, 19, 25, 31])
    positions = [stride * step for stride in vectors["strides"] for step in range(vectors["steps"] + 1)]
    assert max(positions) == 65_536
    cos, sin = oracle.cos_sin(positions, [float(after[pair]) for pair in vectors["pairs"]])
    drawn = unpacked(vectors["xy"]).reshape(len(positions), len(vectors["pairs"]), 2)
    # 2⁻²⁵ from float32 below 1 (2⁻²⁴ below 2), and 65,536 positions times what a frequency is rounded by in float64.
    np.testing.assert_allclose(drawn, factor * np.stack([cos, sin], axis=-1), rtol=0, atol=2**-24 + 1e-10)


@each_curve
def test_heat(curves: dict[str, dict[str, Any]], name: str) -> None:
    _, after, _, _ = EXPECTED[name]
    near, far = curves[name]["heat"]
    assert near["positions"] == list(range(160))
    assert (far["positions"][0], far["positions"][-1]) == (1, 65_536)
    assert far["positions"] == sorted(set(far["positions"]))
    for heat in (near, far):
        cos, _ = oracle.cos_sin(heat["positions"][::7], [float(w) for w in after])
        drawn = unpacked(heat["cos"])[:, ::7] / 127
        np.testing.assert_allclose(drawn, cos.T, rtol=0, atol=0.5 / 127 + 1e-9)


@each_curve
def test_score_and_bound(curves: dict[str, dict[str, Any]], name: str) -> None:
    curve = curves[name]
    _, after, _, _ = EXPECTED[name]
    distances = curve["distances"]
    assert (distances[0], distances[-1]) == (0, 65_536)
    some = slice(0, None, 29)
    cos, sin = oracle.cos_sin(distances[some], [float(w) for w in after])
    np.testing.assert_allclose(unpacked(curve["score"])[some], cos.mean(1), rtol=0, atol=1e-6)
    sums = [[abs(sum(complex(c, s) for c, s in zip(cs[:j], ss[:j], strict=True))) for j in range(1, len(cs) + 1)]
            for cs, ss in zip(cos, sin, strict=True)]  # fmt: skip
    np.testing.assert_allclose(unpacked(curve["bound"])[some], np.mean(sums, axis=1), rtol=1e-6, atol=0)


@each_curve
def test_angles_never_seen(curves: dict[str, dict[str, Any]], name: str) -> None:
    angles = curves[name]["angles"]
    before, after, _, trained = EXPECTED[name]
    assert angles["lengths"] == [trained * 2**i for i in range(5 if trained == 4096 else 4)]
    seen = [float(trained * w / (2 * oracle.mpmath.pi)) for w in before]
    np.testing.assert_allclose(angles["seen"], np.minimum(seen, 1), rtol=SEVEN_DIGITS)
    for key, frequencies in (("without", before), ("with", after)):
        for length, met in zip(angles["lengths"], angles[key], strict=True):
            reached = [float(length * w / (2 * oracle.mpmath.pi)) for w in frequencies]
            np.testing.assert_allclose(met["part"], np.minimum(reached, 1), rtol=SEVEN_DIGITS)
            unseen = [i for i, (a, b) in enumerate(zip(seen, reached, strict=True)) if a < 1 and b > a + 1e-9]
            assert met["unseen"] == unseen
            assert f"At {length:,} tokens, " in met["words"]
            assert (f"{len(unseen)} of {len(seen)} pairs reach" in met["words"]) == bool(unseen)


def test_angles_in_words(curves: dict[str, dict[str, Any]]) -> None:
    angles = curves["llama"]["angles"]
    # 8,192 tokens are a turn of pair i where 500,000^(i/64) = 8192 / 2π: i = 34.98.
    assert angles["without"][1]["words"] == (
        "At 16,384 tokens, 29 of 64 pairs reach angles that were not seen in training: pairs 35–63."
    )
    assert angles["with"][3]["words"] == "At 65,536 tokens, every angle was seen in training."


def test_layers_with_different_ropes_are_separate_curves() -> None:
    curves = curves_of({"Gemma 3": ropewalk.from_config(config("gemma-3-27b-it"))})
    assert list(curves) == ["Gemma 3: sliding attention", "Gemma 3: full attention"]
    sliding, full = curves.values()
    local = [float(w) for w in oracle.inv_freq(10_000.0, 128)]
    np.testing.assert_allclose(sliding["after"]["speed"], local, rtol=SEVEN_DIGITS)
    assert sliding["before"] is None
    stretched = [float(w) for w in oracle.linear(1_000_000.0, 128, 8.0)]
    np.testing.assert_allclose(full["after"]["speed"], stretched, rtol=SEVEN_DIGITS)
    assert sliding["trained"] is None  # its config does not say
    assert sliding["angles"] is None
    assert sliding["after"]["turns"] is None


def test_layers_without_a_kind_are_named_by_number() -> None:
    text = config("olmo-3.1-32b-instruct")
    curves = curves_of({"Olmo": ropewalk.from_config(text)})
    assert list(curves) == ["Olmo: sliding attention", "Olmo: full attention"]
    layers = ropewalk.from_config(text).layers
    plain = ropewalk.ModelRopes(layers=layers[:6], model_type="own", source="own")
    assert list(curves_of({"Olmo": plain})) == ["Olmo: layers 0–2, 4–5", "Olmo: layer 3"]


def test_a_rope_that_depends_on_the_length_is_drawn_at_both_ends() -> None:
    text = config("phi-3.5-mini-instruct")
    curves = curves_of({"Phi": ropewalk.from_config(text)})
    assert list(curves) == ["Phi: up to 4,096 tokens", "Phi: up to 131,072 tokens"]
    scaling = text["rope_scaling"]
    for curve, key, end in zip(curves.values(), ("short_factor", "long_factor"), (4096, 131_072), strict=True):
        speed = [float(w) / f for w, f in zip(oracle.inv_freq(10_000.0, 96), scaling[key], strict=True)]
        np.testing.assert_allclose(curve["after"]["speed"], speed, rtol=SEVEN_DIGITS)
        assert curve["scheme"] == "LongRoPE, factor 32"  # 131,072 over 4,096
        assert curve["longest"] == end
        assert curve["angles"]["lengths"][-1] == end


def test_a_second_rope_of_each_layer() -> None:
    """The indexer of DeepSeek-V3.2 differs only in pairing, so it shares the curve."""
    text = config("deepseek-v3.2")
    assert list(curves_of({"DeepSeek": ropewalk.from_config(text)})) == ["DeepSeek"]
    model = ropewalk.from_config(text)
    other = ropewalk.ModelRopes(
        layers=model.layers, model_type="own", source="own", extra_ropes={"indexer": UNSCALED}, trained_length=4096
    )
    assert list(curves_of({"own": other})) == ["own: attention", "own: indexer"]


def test_axes() -> None:
    """Qwen2-VL divides the pairs into sections of 16, 24 and 24.

    Its tower has rows and columns, with half of the pairs each.
    """
    model = ropewalk.from_config(config("qwen2-vl-72b-instruct-gptq-int4"))
    data = data_of(plots.explorer({"Qwen": model}))
    (curve,) = data["curves"]
    assert curve["axisNames"] == ["time", "height", "width"]
    assert curve["axis"] == [0] * 16 + [1] * 24 + [2] * 24
    np.testing.assert_allclose(
        curve["after"]["speed"], [float(w) for w in oracle.inv_freq(1_000_000.0, 128)], rtol=SEVEN_DIGITS
    )
    (tower,) = data["towers"]
    assert tower["label"] == "Qwen: vision tower"
    assert tower["unit"] == "patch"
    assert tower["axis"] == [0] * 20 + [1] * 20
    along = [float(w) for w in oracle.inv_freq(10_000.0, 40)]
    np.testing.assert_allclose(tower["after"]["speed"], [*along, *along], rtol=SEVEN_DIGITS)


def test_pairs_that_do_not_rotate() -> None:
    """Gemma 4 rotates 64 of the 256 pairs of its full attention."""
    curve = curves_of({"Gemma 4": ropewalk.from_config(config("gemma-4-26b-a4b"))})["Gemma 4: full attention"]
    speed = [float(w) for w in oracle.proportional(1_000_000.0, 512, 0.25)]
    np.testing.assert_allclose(curve["after"]["speed"][:64], speed[:64], rtol=SEVEN_DIGITS)
    assert curve["after"]["speed"][64:] == [None] * 192
    assert curve["after"]["wavelength"][64:] == [None] * 192
    assert curve["vectors"]["pairs"] == [0, 13, 25, 38, 50, 63]
    assert curve["angles"]["seen"][64:] == [0.0] * 192


def test_chosen_pairs() -> None:
    vectors = curves_of({"plain": UNSCALED}, pairs=[3, 1, 3], length=100)["plain"]["vectors"]
    assert vectors["pairs"] == [1, 3]
    assert unpacked(vectors["xy"]).shape == (1, 65, 2, 2)  # 100 tokens are one for each step, and 36 more


@pytest.mark.parametrize("length", [1, 2, 63, 64, 100, 10_000_000, 2**31 - 1])
def test_every_length(length: int) -> None:
    curve = curves_of({"plain": UNSCALED}, length=length, trained_length=7)["plain"]
    assert curve["longest"] == length
    assert curve["angles"]["lengths"][0] == 7
    assert len(curve["angles"]["lengths"]) <= 12


def test_the_longest_is_that_of_the_scaled_context() -> None:
    """As Qwen documents it for Qwen2.5: max_position_embeddings stays 32,768."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    model = ropewalk.from_config({**config("qwen2.5-7b-instruct"), "rope_scaling": scaling})
    (curve,) = curves_of({"Qwen2.5": model}).values()
    assert curve["longest"] == 131_072


def test_the_longest_is_one_of_the_lengths() -> None:
    """It need not be a doubling of the trained length.

    Without scaling, four times the trained length is shown as well.
    """
    angles = curves_of({"llama": LLAMA}, length=100_000)["llama"]["angles"]
    assert angles["lengths"] == [8192, 16_384, 32_768, 65_536, 100_000]
    angles = curves_of({"plain": UNSCALED}, length=5000, trained_length=4096)["plain"]["angles"]
    assert angles["lengths"] == [4096, 8192, 16_384]


def test_ten_models_fit() -> None:
    """This is the page of the documentation, which tools/explorer_for_docs.py writes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    try:
        import explorer_for_docs
    finally:
        sys.path.pop(0)
    models = explorer_for_docs.models()
    assert len(models) == 10
    page = plots.explorer(models, note=explorer_for_docs.NOTE)
    assert len(page.encode()) < 6_000_000
    labels = [curve["label"] for curve in data_of(page)["curves"]]
    assert {"Gemma 3 27B: sliding attention", "Phi-3.5 mini: up to 4,096 tokens", "Llama 4 Scout"} <= {*labels}
    assert explorer_for_docs.NOTE in page


def test_names_are_text() -> None:
    """A folder can have any name."""
    name = '</script><img src=x onerror="alert(1)">{{data}}&amp;'
    page = plots.explorer({name: UNSCALED}, note=name)
    assert "<img" not in page.split("<script>")[0]
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=&quot;alert(1)&quot;&gt;{{data}}&amp;amp;") == 4
    assert data_of(page)["curves"][0]["label"] == name


def test_nothing_is_loaded() -> None:
    page = plots.explorer({"plain": UNSCALED})
    head = page.split("<style>")[0]
    assert "default-src 'none'" in head
    assert not re.findall(r'(?:src|href)="(?!data:)', head)
    assert "<link" not in page.split("<script>")[0].replace('<link rel="icon" href="data:,">', "")


@pytest.mark.parametrize(
    ("models", "kwargs", "message"),
    [
        ({}, {}, "models must have a rope for text tokens, got none. Pass a model that rotates."),
        ({"a": 3}, {}, "models must map names to Rope or ModelRopes objects, got 3. "),
        (UNSCALED, {}, "models must map names to Rope or ModelRopes objects, got Rope(head_dim=64, "),
        ({3: UNSCALED}, {}, "models must map names to Rope or ModelRopes objects, got {3: Rope(head_dim=64, "),
        ({"a": UNSCALED}, {"pairs": []}, "pairs must be a sequence of 1 to 12 pairs, got []. "),
        ({"a": UNSCALED}, {"pairs": 3}, "pairs must be a sequence of 1 to 12 pairs, got 3. "),
        ({"a": UNSCALED}, {"pairs": range(13)}, "pairs must be a sequence of 1 to 12 pairs, got range(0, 13). "),
        ({"a": UNSCALED}, {"pairs": [32]}, "pairs must be an integer from 0 to 31, got 32. The last pair of a is 31."),
        ({"a": UNSCALED}, {"length": 0}, "length must be an integer from 1 to 2147483647, got 0. "),
        ({"a": UNSCALED}, {"trained_length": 2**31}, "trained_length must be an integer from 1 to 2147483647, "),
    ],
)
def test_bad_input(models: dict[str, Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ropewalk.RopeError, match=re.escape(f"plots.explorer: {message}")):
        plots.explorer(models, **kwargs)


def test_a_model_that_does_not_rotate() -> None:
    still = ropewalk.ModelRopes(layers=(None, None), model_type="own", source="own")
    with pytest.raises(ropewalk.RopeError, match=r"must have a rope for text tokens, got no layer that rotates\."):
        plots.explorer({"still": still})


def test_a_page_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MOST_BYTES", 1_000_000)
    with pytest.raises(
        ropewalk.RopeError, match=r"the page must have at most 1,000,000 bytes, got [\d,]+ with 1 ropes\. Pass fewer"
    ):
        plots.explorer({"plain": UNSCALED})


def test_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ropewalk.RopeError, match=r"plotly must be installed\. Run pip install"):
        plots.explorer({"plain": UNSCALED})
