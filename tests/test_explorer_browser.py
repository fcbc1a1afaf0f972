"""Test the page of `plots.explorer` in a real browser: figures and controls, on narrow and dark screens.

Numbers are read from Plotly's figures and compared with oracle.py. The tests are skipped without Chromium.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import browser
import oracle
import ropewalk
from browser import Browser
from ropewalk import plots, schemes

if os.environ.get("ROPEWALK_REQUIRE_BROWSER") == "1":
    assert browser.EXECUTABLE is not None, "ROPEWALK_REQUIRE_BROWSER=1 needs Chromium"
pytestmark = pytest.mark.skipif(browser.EXECUTABLE is None, reason="there is no Chromium")

GOLDEN = Path(__file__).parent / "golden"
LLAMA3 = schemes.Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = schemes.YaRN(factor=16.0, original_max_position_embeddings=4096)
LLAMA_SPEED = oracle.by_parts(500_000.0, 128, 8.0, 1.0, 4.0, 8192)
YARN_SPEED = oracle.yarn(10_000.0, 64, 16.0, 4096)
YARN_FACTOR = 0.1 * math.log(16.0) + 1.0
NASTY = '<b>"YaRN"</b> & co.'
FIGURES = ("frequencies", "vectors", "heat", "score", "angles", "axes")
WIDE, NARROW = 1200, 380


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = json.loads((GOLDEN / "text_models.json").read_text())["rows"]
    qwen = next(row["config"] for row in rows if row["name"] == "qwen2-vl-72b-instruct-gptq-int4")
    models = {
        "Llama 3.1": ropewalk.Rope(128, 500_000.0, "half", scaling=LLAMA3),
        NASTY: ropewalk.Rope(64, 10_000.0, "interleaved", scaling=YARN),
        "Qwen2-VL": ropewalk.from_config(qwen),
    }
    page = tmp_path_factory.mktemp("explorer") / "page.html"
    page.write_text(plots.explorer(models, length=131_072), encoding="utf-8")
    assert page.stat().st_size < 6_000_000
    return page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture
def page(chromium: Browser, path: Path) -> Browser:
    """Open the page in a wide, light window."""
    chromium.resize(WIDE)
    chromium.set_dark(False)
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.open(path)
    return chromium


def traces(page: Browser, figure: str) -> list[dict[str, Any]]:
    """Return Plotly's traces of a figure as plain data."""
    script = """[...document.querySelector('#FIGURE .plot').data].map((trace) => {
        const plain = {};
        for (const key of ["type", "name", "x", "y", "z", "text", "visible", "base"])
            if (trace[key] !== undefined) plain[key] = ArrayBuffer.isView(trace[key]) ? [...trace[key]] : trace[key];
        return {...plain, colour: (trace.line ?? trace.marker ?? {}).color};
    })"""
    return list(page.evaluate(script.replace("FIGURE", figure)))


def choose(page: Browser, selector: str, index: int) -> None:
    """Choose an option of a <select>."""
    page.evaluate(
        f"(s => {{ s.value = {index}; s.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
        f"(document.querySelector({json.dumps(selector)}))"
    )


def drawn_vectors(page: Browser) -> np.ndarray:
    """Return tip minus centre of each vector, [pairs, 2]. The centres are those of the circles."""
    circles = page.evaluate(
        "document.querySelector('#vectors .plot').layout.shapes.map((s) => [(s.x0 + s.x1) / 2, (s.y0 + s.y1) / 2])"
    )
    tips = traces(page, "vectors")[3]
    return np.stack([tips["x"], tips["y"]], axis=-1) - np.array(circles)


def expected_vectors(position: int, frequencies: list[Any], pairs: list[int], factor: float = 1.0) -> np.ndarray:
    cos, sin = oracle.cos_sin([position], [float(frequencies[pair]) for pair in pairs])
    return factor * np.stack([cos[0], sin[0]], axis=-1)


def shown_position(page: Browser) -> int:
    shown = re.fullmatch(r"position ([\d,]+)", page.evaluate("document.querySelector('#vectors output').textContent"))
    assert shown is not None
    return int(shown[1].replace(",", ""))


FLOAT32 = 1e-6  # what float32 and a centre of up to 10 leave of a coordinate


def test_it_loads_without_errors_and_without_the_network(page: Browser, path: Path) -> None:
    assert page.problems == []
    assert page.requests[0] == path.as_uri()
    assert all(request.startswith("data:") for request in page.requests[1:])


def test_problems_and_requests_are_recorded(page: Browser) -> None:
    """The checks above can fail, because errors and requests are recorded."""
    page.evaluate("console.error('broken'), setTimeout(() => { throw new Error('thrown') }), 0")
    page.evaluate("fetch('https://example.invalid/').catch(() => 0)")
    page.wait_for("true")
    assert any("broken" in problem for problem in page.problems)
    assert any("thrown" in problem for problem in page.problems)
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_every_figure_is_drawn(page: Browser) -> None:
    for figure in FIGURES:
        size = page.evaluate(
            f"(({{width, height}}) => [width, height])"
            f"(document.querySelector('#{figure} .plot svg.main-svg').getBoundingClientRect())"
        )
        assert min(size) > 250, figure
        marks = f"#{figure} .plot :is(.js-line, .point, .hm image)"
        assert page.evaluate(f"document.querySelectorAll('{marks}').length") > 0, figure


def test_frequencies(page: Browser) -> None:
    names = [trace["name"] for trace in traces(page, "frequencies")]
    assert names == [
        "Llama 3.1, before scaling",
        "Llama 3.1, after scaling (Llama3, factor 8)",
        '&lt;b>"YaRN"&lt;/b> &amp; co., before scaling',
        '&lt;b>"YaRN"&lt;/b> &amp; co., after scaling (YaRN, factor 16)',
        "Qwen2-VL",
    ]
    frequencies = (
        oracle.inv_freq(500_000.0, 128),
        LLAMA_SPEED,
        oracle.inv_freq(10_000.0, 64),
        YARN_SPEED,
        oracle.inv_freq(1_000_000.0, 128),
    )
    for trace, expected in zip(traces(page, "frequencies"), frequencies, strict=True):
        assert trace["x"] == list(range(len(expected)))
        np.testing.assert_allclose(trace["y"], [float(w) for w in expected], rtol=5e-7)


def test_hover(page: Browser) -> None:
    """Hover over pair 40 of Llama 3.1, which is at 40/63 of the points of the first trace with markers."""
    page.hover("#frequencies .plot .scatterlayer .trace:nth-child(2) .point:nth-child(41)")
    page.wait_for("document.querySelector('#frequencies .hovertext') !== null")
    text = page.evaluate("document.querySelector('#frequencies .hovertext').textContent")
    wavelength = 2 * math.pi / float(LLAMA_SPEED[40])
    assert text == (
        "Llama 3.1, after scaling (Llama3, factor 8)"
        "pair 40"
        f"wavelength {wavelength:,.0f} tokens"
        f"{8192 / wavelength:.3g} turns within 8,192 tokens"
    )


def test_slider_moves_the_vectors(page: Browser) -> None:
    pairs = [0, 13, 25, 38, 50, 63]
    assert shown_position(page) == 12
    np.testing.assert_allclose(drawn_vectors(page), expected_vectors(12, LLAMA_SPEED, pairs), atol=FLOAT32)
    page.evaluate("document.querySelector('#vectors input').focus()")
    for _ in range(5):
        page.press("ArrowRight", 39)
    assert shown_position(page) == 17
    np.testing.assert_allclose(drawn_vectors(page), expected_vectors(17, LLAMA_SPEED, pairs), atol=FLOAT32)
    page.press("End", 35)
    assert shown_position(page) == 64
    choose(page, "#vectors .stride", 2)  # 64 steps up to the longest sequence
    assert shown_position(page) == 131_072
    np.testing.assert_allclose(drawn_vectors(page), expected_vectors(131_072, LLAMA_SPEED, pairs), atol=FLOAT32)
    labels = page.evaluate("document.querySelector('#vectors .plot').layout.annotations.map((a) => a.text)")
    assert labels[0] == "<b>pair 0</b>, 6.28 tokens per turn"
    assert labels[5] == f"<b>pair 63</b>, {2e-6 * math.pi / float(LLAMA_SPEED[63]):.3g} million tokens per turn"


def test_vectors_of_another_rope(page: Browser) -> None:
    """The vectors are as long as its attention factor, and all other figures of one rope follow."""
    choose(page, "#vectors .curve", 1)
    expected = expected_vectors(12, YARN_SPEED, [0, 6, 12, 19, 25, 31], YARN_FACTOR)
    np.testing.assert_allclose(drawn_vectors(page), expected, atol=FLOAT32)
    assert "The vectors are 1.28 long" in page.evaluate("document.querySelector('#vectors .caption').textContent")
    assert page.evaluate("[...document.querySelectorAll('select.curve')].map((s) => s.value)") == ["1"] * 3
    assert len(traces(page, "heat")[0]["z"]) == 32
    assert len(traces(page, "angles")[0]["x"]) == 32


def test_play(page: Browser) -> None:
    page.click("#vectors .play")
    assert page.evaluate("document.querySelector('.play').textContent") == "Pause"
    page.wait_for("document.querySelector('#vectors output').textContent > 'position 14'")
    page.click("#vectors .play")
    assert page.evaluate("document.querySelector('.play').textContent") == "Play"
    position = shown_position(page)
    expected = expected_vectors(position, LLAMA_SPEED, [0, 13, 25, 38, 50, 63])
    np.testing.assert_allclose(drawn_vectors(page), expected, atol=FLOAT32)


def test_heat(page: Browser) -> None:
    for choice, last in ((1, 131_072), (0, 159)):
        choose(page, "#heat .range", choice)
        heat, turns = traces(page, "heat")
        assert heat["x"][-1] == last
        cos, _ = oracle.cos_sin(heat["x"][::13], [float(w) for w in LLAMA_SPEED])
        np.testing.assert_allclose(np.array(heat["z"])[:, ::13], cos.T, rtol=0, atol=0.5 / 127 + 1e-9)
        wavelengths = [2 * math.pi / float(w) for w in LLAMA_SPEED]
        shown = [pair for pair, x in enumerate(turns["x"]) if x is not None]
        assert shown == [pair for pair, w in enumerate(wavelengths) if w <= last]
        np.testing.assert_allclose([turns["x"][p] for p in shown], [wavelengths[p] for p in shown], rtol=5e-7)


def test_score(page: Browser) -> None:
    score, bound = traces(page, "score")[:2]
    some = slice(0, None, 41)
    cos, sin = oracle.cos_sin(score["x"][some], [float(w) for w in LLAMA_SPEED])
    np.testing.assert_allclose(score["y"][some], cos.mean(1), rtol=0, atol=1e-6)
    np.testing.assert_allclose(bound["y"][some], np.abs((cos + 1j * sin).cumsum(1)).mean(1), rtol=1e-6)


def test_legend(page: Browser) -> None:
    """A legend hides a rope in both figures that compare ropes, and shows it again."""
    assert [len(traces(page, figure)) for figure in ("frequencies", "score")] == [5, 6]
    page.click("#frequencies .chips button:nth-child(1)")
    assert page.evaluate("document.querySelector('#score .chips button').getAttribute('aria-pressed')") == "false"
    assert traces(page, "frequencies")[0]["name"].startswith("&lt;b>")
    assert [len(traces(page, figure)) for figure in ("frequencies", "score")] == [3, 4]
    page.click("#score .chips button:nth-child(1)")
    assert [len(traces(page, figure)) for figure in ("frequencies", "score")] == [5, 6]
    for _ in range(3):
        page.click("#frequencies .chips button[aria-pressed=true]")
    assert traces(page, "frequencies") == traces(page, "score") == []
    assert page.problems == []


@pytest.mark.parametrize(
    ("scaled", "frequencies"), [(0, oracle.inv_freq(500_000.0, 128)), (1, LLAMA_SPEED)], ids=["before", "after"]
)
def test_angles(page: Browser, scaled: int, frequencies: list[Any]) -> None:
    choose(page, "#angles .length", 2)  # 32,768 tokens
    choose(page, "#angles .scaled", scaled)
    known, unseen, spare = traces(page, "angles")
    seen, met = (
        np.minimum([float(n * w / (2 * oracle.mpmath.pi)) for w in speed], 1) * 360
        for n, speed in ((8192, oracle.inv_freq(500_000.0, 128)), (32_768, frequencies))
    )
    np.testing.assert_allclose(known["y"], np.minimum(seen, met), rtol=1e-6)
    np.testing.assert_allclose(unseen["base"], seen, rtol=1e-6)
    np.testing.assert_allclose(unseen["y"], np.maximum(met - seen, 0), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(spare["y"], np.maximum(seen - met, 0), rtol=1e-5, atol=1e-4)
    text = page.evaluate("document.querySelector('#angles .reading').textContent")
    assert text == (
        "At 32,768 tokens, every angle was seen in training."
        if scaled
        else "At 32,768 tokens, 29 of 64 pairs reach angles that were not seen in training: pairs 35–63."
    )


def test_axes(page: Browser) -> None:
    time, height, width = traces(page, "axes")
    assert [trace["name"] for trace in (time, height, width)] == ["time", "height", "width"]
    assert [trace["x"] for trace in (time, height, width)] == [
        list(range(16)),
        list(range(16, 40)),
        list(range(40, 64)),
    ]
    page.click("#axes .legend .traces:nth-child(1) .legendtoggle")  # Plotly's own legend
    page.wait_for("document.querySelector('#axes .plot').data[0].visible === 'legendonly'")
    choose(page, "#axes .tower", 1)
    rows, columns = traces(page, "axes")
    assert (rows["name"], columns["name"]) == ("height", "width")
    along = [float(w) for w in oracle.inv_freq(10_000.0, 40)]
    np.testing.assert_allclose(rows["y"] + columns["y"], [*along, *along], rtol=5e-7)
    assert rows["text"][1] == (
        f"<b>Qwen2-VL: vision tower</b><br>pair 1<br>wavelength {2 * math.pi / along[1]:.3g} patches<br>axis: height"
    )


def test_a_page_without_axes_and_without_a_trained_length(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(plots.explorer({"plain": ropewalk.Rope(8, 10_000.0, "half")}, length=1), encoding="utf-8")
    chromium.problems.clear()
    chromium.open(page)
    assert chromium.problems == []
    assert chromium.evaluate("getComputedStyle(document.querySelector('#axes')).display") == "none"
    text = chromium.evaluate("document.querySelector('#angles .reading').textContent")
    assert text.startswith("The config does not state the length")


@pytest.mark.parametrize("width", [NARROW, 760, WIDE])
def test_nothing_overflows_and_no_labels_overlap(page: Browser, width: int) -> None:
    page.resize(width)
    page.wait_for(f"document.querySelector('#angles .main-svg').getBoundingClientRect().width <= {width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for figure in FIGURES:
        boxes = page.evaluate(
            f"[...document.querySelectorAll('#{figure} .plot :is(.xtick, .ytick, .legendtext, .annotation-text)')]"
            ".map((e) => [e.textContent, e.getBoundingClientRect()])"
            ".map(([text, r]) => [text, r.left, r.top, r.right, r.bottom]).filter((box) => box[0])"
        )
        assert len(boxes) >= 4, figure
        for text, left, _, right, _ in boxes:
            assert left >= -1, (figure, text)
            assert right <= width + 1, (figure, text)
        for a, b in itertools.combinations(boxes, 2):
            apart = a[3] <= b[1] + 1 or b[3] <= a[1] + 1 or a[4] <= b[2] + 1 or b[4] <= a[2] + 1
            assert apart, (figure, a, b)
    assert page.problems == []


def luminance(colour: str) -> float:
    """Compute the luminance of `rgb(…)` or `#rrggbb`, as defined in WCAG 2.1."""
    parts = [int(p) for p in re.findall(r"\d+", colour)[:3]] if colour.startswith("rgb") else None
    parts = parts or [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_dark(page: Browser) -> None:
    """Colours follow the setting while the page is open.

    The contrast is 4.5 for text and 3 for lines, as WCAG requires.
    """
    found = {}
    for dark in (False, True):
        page.set_dark(dark)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.wait_for(
            "document.querySelector('#score .plot').layout.font.color === "
            "getComputedStyle(document.documentElement).getPropertyValue('--text').trim()"
        )
        found[dark] = background
        assert (luminance(background) < 0.05) == dark
        texts = [page.evaluate("document.querySelector('#score .plot').layout.font.color")]
        for selector in ("body", ".caption", ".controls label", "button", ".models"):
            texts.append(page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).color"))
        for colour in texts:
            assert contrast(colour, background) >= 4.5, (dark, colour)
        for trace in traces(page, "frequencies"):
            assert contrast(trace["colour"], background) >= 3, (dark, trace["colour"])
        for i in range(10):
            colour = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--c{i}').trim()")
            assert contrast(colour, background) >= 3, (dark, i)
    assert found[False] != found[True]
