"""Test that plots show the results of independent calculations, that files are valid, and that errors state a fix."""

from __future__ import annotations

import cmath
import math
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ropewalk
from ropewalk import plots, schemes
from ropewalk.tools.plots import vectors
from ropewalk.tools.plots.figure import colours

LLAMA3 = schemes.Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LLAMA = ropewalk.Rope(head_dim=128, base=500_000.0, pairing="half", scaling=LLAMA3)
PLAIN = ropewalk.Rope(head_dim=128, base=10_000.0, pairing="half")
YARN = ropewalk.Rope(
    head_dim=8,
    base=10_000.0,
    pairing="interleaved",
    scaling=schemes.YaRN(factor=16.0, original_max_position_embeddings=4096),
)
FUNCTIONS = (plots.inv_freq, plots.rotated_vector, plots.pairs, plots.decay)


@dataclass(frozen=True)
class Idle(schemes.Scheme):
    """A scheme in which the second half of the pairs does not rotate."""

    rope_type = "idle"

    def inv_freq(self, base, rotary_dim):
        n = rotary_dim // 2
        return tuple(base ** (-i / n) if i < n // 2 else 0.0 for i in range(n))


IDLE = ropewalk.Rope(head_dim=16, base=10_000.0, pairing="half", scaling=Idle())


def speeds(base, pairs=64):
    return [base ** (-i / pairs) for i in range(pairs)]


def llama3_speeds():
    """Compute the frequencies as in the Llama 3.1 release, not with ropewalk."""
    result = []
    for w in speeds(500_000.0):
        wavelength = 2 * math.pi / w
        if wavelength < 8192 / 4:
            result.append(w)
        elif wavelength > 8192:
            result.append(w / 8)
        else:
            smooth = (8192 / wavelength - 1) / 3
            result.append((1 - smooth) * w / 8 + smooth * w)
    return result


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def line(axes, start):
    (found,) = (each for label, each in lines(axes).items() if label.startswith(start))
    return found


def arrows(figure):
    """Return the end of each arrow, in the order of positions."""
    axes = figure.axes[0]
    return [(a.U[0], a.V[0]) for a in axes.collections if str(a.get_label()).startswith("position")]


def bound_of(distance, speed):
    """Compute the paper's mean |S_j| term by term."""
    partial, total = 0j, 0.0
    for w in speed:
        partial += cmath.exp(1j * distance * w)
        total += abs(partial)
    return total / len(speed)


# --- inv_freq ---------------------------------------------------------------------------------------------------------


def test_inv_freq_shows_before_after_and_the_trained_length():
    axes = plots.inv_freq(LLAMA).axes[0]
    np.testing.assert_allclose(line(axes, "before").get_ydata(), speeds(500_000.0), rtol=1e-12)
    np.testing.assert_allclose(line(axes, "after").get_ydata(), llama3_speeds(), rtol=1e-12)
    np.testing.assert_array_equal(line(axes, "after").get_xdata(), np.arange(64))
    trained = line(axes, "one turn")
    assert set(trained.get_ydata()) == {2 * math.pi / 8192}
    assert "8,192 tokens" in trained.get_label()
    assert axes.get_yscale() == "log"


def test_inv_freq_of_an_unscaled_rope_has_one_line():
    axes = plots.inv_freq(PLAIN).axes[0]
    assert list(lines(axes)) == ["no scaling"]
    np.testing.assert_allclose(line(axes, "no").get_ydata(), speeds(10_000.0), rtol=1e-12)


def test_inv_freq_without_a_trained_length_marks_none():
    axes = plots.inv_freq(ropewalk.Rope(8, 10_000.0, "half", scaling=schemes.Linear(factor=2.0))).axes[0]
    assert list(lines(axes)) == ["before scaling", "after scaling: Linear"]


def test_inv_freq_has_the_wavelength_on_the_right():
    figure = plots.inv_freq(LLAMA)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    (right,) = axes.child_axes
    for tokens in (10.0, 8192.0, 1e6):
        pixel = right.transData.transform((0.0, tokens))[1]
        assert pixel == pytest.approx(axes.transData.transform((0.0, 2 * math.pi / tokens))[1])
    assert "tokens" in right.get_ylabel()


def test_axes_have_a_colour_each():
    rope = ropewalk.Rope(16, 1e4, "half", axes=ropewalk.Axes.interleaved((4, 2, 2)))
    axes = plots.inv_freq(rope).axes[0]
    drawn = [line(axes, f"axis {a}") for a in range(3)]
    assert [list(one.get_xdata()) for one in drawn] == [[0, 3, 6, 7], [1, 4], [2, 5]]
    for one in drawn:
        np.testing.assert_allclose(one.get_ydata(), 1e4 ** (-np.array(one.get_xdata()) / 8))
    assert len({str(one.get_color()) for one in drawn}) == 3
    assert not [label for label in lines(plots.inv_freq(LLAMA).axes[0]) if str(label).startswith("axis")]


def test_a_rope_with_axes_is_drawn_as_text():
    rope = ropewalk.Rope(16, 1e4, "half", axes=ropewalk.Axes.axial((8, 8)))
    one = ropewalk.Rope(8, 1e4, "half")
    for pair in range(8):
        several, wanted = (vectors._rotated_unit_vector(*given, tokens=5) for given in ((rope, pair), (one, pair % 4)))
        np.testing.assert_allclose(several, wanted)


def test_idle_pairs_are_left_out(tmp_path):
    drawn = line(plots.inv_freq(IDLE).axes[0], "after").get_ydata()
    np.testing.assert_array_equal(np.isnan(drawn), [False] * 4 + [True] * 4)
    plots.save(plots.inv_freq(IDLE), tmp_path / "idle.png")
    plots.save(plots.pairs(IDLE), tmp_path / "pairs.png")


# --- rotated_vector ---------------------------------------------------------------------------------------------------


def test_rotated_vector_rotates_by_one_radian_per_position():
    np.testing.assert_allclose(
        arrows(plots.rotated_vector(LLAMA)), [(math.cos(p), math.sin(p)) for p in range(6)], atol=1e-15
    )


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotated_vector_takes_the_pair_asked_for(pairing):
    rope = ropewalk.Rope(head_dim=24, base=10_000.0, pairing=pairing, rotary_dim=16, rotary_offset=4)
    w = 10_000.0 ** (-3 / 8)
    np.testing.assert_allclose(
        arrows(plots.rotated_vector(rope, pair=3, tokens=4)),
        [(math.cos(p * w), math.sin(p * w)) for p in range(4)],
        atol=1e-15,
    )


def test_rotated_vector_shows_the_attention_factor():
    figure = plots.rotated_vector(YARN)
    np.testing.assert_allclose(np.hypot(*np.transpose(arrows(figure))), 0.1 * math.log(16) + 1)
    assert "attention factor 1.277" in figure.axes[0].get_title()
    assert figure.axes[0].get_xlim()[1] > 1.28


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_pairs_shows_the_cosine_of_every_pair_and_position():
    axes = plots.pairs(LLAMA, tokens=40).axes[0]
    expected = [[math.cos(p * w) for p in range(40)] for w in llama3_speeds()]
    np.testing.assert_allclose(axes.images[0].get_array(), expected, atol=1e-12)
    assert axes.images[0].get_clim() == (-1, 1)


def test_pairs_marks_the_first_full_turn():
    axes = plots.pairs(LLAMA, tokens=256).axes[0]
    wavelengths = np.array([2 * math.pi / w for w in llama3_speeds()])
    slow = wavelengths >= 256
    expected = np.where(slow, np.nan, wavelengths)
    np.testing.assert_allclose(line(axes, "first full turn").get_xdata(), expected, rtol=1e-12)
    assert f"{slow.sum()} make less than one full turn" in axes.get_title()


def test_pairs_names_wavelengths_on_the_right():
    (right,) = plots.pairs(LLAMA).axes[0].child_axes
    named = {round(at): text.get_text() for at, text in zip(right.get_yticks(), right.get_yticklabels(), strict=True)}
    wavelengths = [2 * math.pi / w for w in llama3_speeds()]
    assert named[0] == "6.3"
    assert named[63] == f"{wavelengths[63]:,.0f}" == "20,473,564"


# --- decay ------------------------------------------------------------------------------------------------------------


def test_decay_shows_the_bound_of_the_paper():
    upper, _ = plots.decay(PLAIN, longest=4096).axes
    bound = line(upper, "upper bound")
    drawn = dict(zip(bound.get_xdata(), bound.get_ydata(), strict=True))
    # Su et al. 2021, figure 2, recalculated (research notes, section 1.1).
    for distance, value in ((0, 32.5), (1, 31.54), (5, 20.85), (20, 15.24), (100, 10.23), (250, 6.55), (4096, 4.88)):
        assert drawn[distance] == pytest.approx(value, abs=0.006)
    for distance in list(drawn)[::50]:
        assert drawn[distance] == pytest.approx(bound_of(float(distance), speeds(10_000.0)), rel=1e-9)


def test_decay_shows_an_actual_score_below_the_bound():
    upper, lower = plots.decay(LLAMA, longest=131_072).axes
    bound, score = line(upper, "upper bound"), line(lower, "score")
    assert [label for label in lines(upper) if "score" in label] == []  # it would look flat there
    assert (np.abs(score.get_ydata()) <= bound.get_ydata()).all()
    assert score.get_xdata()[0] == 0
    assert score.get_xdata()[-1] == 131_072
    assert score.get_ydata()[0] == 1.0
    w = llama3_speeds()
    for distance, value in list(zip(score.get_xdata(), score.get_ydata(), strict=True))[::50]:
        assert value == pytest.approx(math.fsum(math.cos(float(distance) * each) for each in w) / 64, abs=1e-8)


def test_decay_marks_the_largest_rise():
    for axes, name in zip(plots.decay(PLAIN, longest=300).axes, ("upper bound", "score"), strict=True):
        curve, dots = line(axes, name), line(axes, "largest rise")
        x, y = curve.get_xdata(), curve.get_ydata()
        rise, low, high = max((y[j] - y[i], i, j) for j in range(len(y)) for i in range(j))
        np.testing.assert_array_equal(dots.get_xdata(), x[[low, high]])
        np.testing.assert_array_equal(dots.get_ydata(), y[[low, high]])
        assert rise > 0
        assert f"{y[low]:.2f} at {x[low]:,}" in dots.get_label()
        assert f"{y[high]:.2f} at {x[high]:,}" in dots.get_label()


def test_decay_marks_nothing_where_nothing_rises():
    for axes in plots.decay(PLAIN, longest=2).axes:
        assert not [label for label in lines(axes) if label.startswith("largest rise")]


# --- angle_field ------------------------------------------------------------------------------------------------------

AXIAL = ropewalk.Rope(16, 100.0, "half", axes=ropewalk.Axes.axial((8, 8)))  # four pairs for each axis: 100^(-i/4)
MROPE = ropewalk.Rope(16, 1e4, "half", axes=ropewalk.Axes.interleaved((4, 2, 2)))


def panels(figure):
    """Return the panel of each pair by its index, in the order of drawing."""
    titled = {re.match(r"pair (\d+): axis (\d)", axes.get_title()): axes for axes in figure.axes}
    return {int(found[1]): (int(found[2]), axes) for found, axes in titled.items() if found}


def cosines(figure, pair):
    (image,) = panels(figure)[pair][1].images
    assert image.get_clim() == (-1, 1)
    return np.asarray(image.get_array())


def test_angle_field_shows_the_cosine_of_each_patch():
    figure = plots.angle_field(AXIAL, 3, 5)
    assert {pair: axis for pair, (axis, _) in panels(figure).items()} == {i: i // 4 for i in range(8)}
    for pair in range(8):
        w = 100.0 ** (-(pair % 4) / 4)
        expected = [[math.cos((row if pair < 4 else column) * w) for column in range(5)] for row in range(3)]
        np.testing.assert_allclose(cosines(figure, pair), expected, atol=1e-12)
    assert "wavelength 6.3" in panels(figure)[4][1].get_title()
    assert "wavelength 199" in panels(figure)[3][1].get_title()


def test_angle_field_is_what_the_rope_rotates_by():
    from ropewalk import positions

    figure = plots.angle_field(MROPE, 4, 3, pairs=range(8))
    cos = MROPE.at(positions.grid(4, 3, order="0hw")).cos.double()
    for pair in range(8):
        np.testing.assert_allclose(cosines(figure, pair).ravel(), cos[:, pair], atol=1e-6)


def test_angle_field_takes_positions():
    import torch

    from ropewalk import positions

    centres = 2 * math.pi * positions.mesh(positions.axis(2), positions.axis(3))
    for given in (centres, centres.numpy(), centres.tolist()):
        figure = plots.angle_field(AXIAL, 2, 3, pairs=[1, 6], positions=given)
        for pair, places in ((1, [[-0.5] * 3, [0.5] * 3]), (6, [[-2 / 3, 0, 2 / 3]] * 2)):
            w = 100.0 ** (-(pair % 4) / 4)
            expected = np.cos(2 * math.pi * w * np.array(places))
            np.testing.assert_allclose(cosines(figure, pair), expected, atol=1e-6)
    flux2 = ropewalk.Rope(16, 2000.0, "interleaved", axes=ropewalk.Axes.axial((4, 4, 4, 4)))
    figure = plots.angle_field(flux2, 2, 3, positions=torch.ones(4, 6, dtype=torch.int64))
    assert [axis for axis, _ in panels(figure).values()] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_angle_field_chooses_the_fastest_pairs_of_each_axis():
    wide = ropewalk.Rope(128, 1e4, "half", axes=ropewalk.Axes.time_last((20, 22, 22)))
    assert list(panels(plots.angle_field(wide, 2, 2))) == [44, 45, 0, 2, 1, 3]
    unused = ropewalk.Rope(8, 1e4, "half", axes=ropewalk.Axes([1, 1, 2, 1]))
    assert list(panels(plots.angle_field(unused, 2, 2))) == [0, 1, 2]
    rising = ropewalk.Rope(
        16, 1e4, "half", axes=ropewalk.Axes([0, 0, 0, 0, 0, 1, 1, 1], [7, 6, 5, 4, 3, 2, 1, 0], [8, 8])
    )
    assert list(panels(plots.angle_field(rising, 2, 2))) == [4, 3, 2, 1, 7, 6, 5]


def test_angle_field_frames_have_the_colours_of_inv_freq():
    strip = plots.inv_freq(MROPE).axes[0]
    for axis, panel in panels(plots.angle_field(MROPE, 2, 2, pairs=range(8))).values():
        assert panel.spines["left"].get_edgecolor() == tuple(line(strip, f"axis {axis}").get_color())


def test_angle_field_has_title_and_units(tmp_path):
    figure = plots.angle_field(MROPE, 14, 14, pairs=[1, 2, 3, 4, 5])
    assert figure.get_suptitle() == "Angles of 5 of 8 pairs over 14 × 14 patches"
    assert figure.get_supxlabel() == "column (patches)"
    assert figure.get_supylabel() == "row (patches)"
    assert any("cos(angle), dimensionless" in axes.get_ylabel() for axes in figure.axes)
    plots.save(figure, tmp_path / "field.png")
    assert struct.unpack(">I", (tmp_path / "field.png").read_bytes()[16:20]) == (1000,)


def test_angle_field_of_learned_frequencies():
    """Compare with the sum over both axes, written out in float64."""
    import torch

    from ropewalk import positions

    torch.manual_seed(0)
    mixed = ropewalk.LearnedRope.mixed(head_dim=16, heads=3, pairing="interleaved")
    speed = mixed.inv_freq.tolist()
    figure = plots.angle_field(mixed, 3, 5, head=2, pairs=range(8), positions=positions.grid(3, 5, order="wh"))
    for pair, panel in enumerate(figure.axes[:8]):
        x, y = (axis[2][pair] for axis in speed)
        expected = [[math.cos(column * x + row * y) for column in range(5)] for row in range(3)]
        np.testing.assert_allclose(np.asarray(panel.images[0].get_array()), expected, atol=1e-12)
        assert panel.get_title().startswith(
            f"pair {pair}: {x:.3g}, {y:.3g}\nwavelength {2 * math.pi / math.hypot(x, y):,.1f}"
        )
    shared = ropewalk.LearnedRope(mixed.inv_freq[:, 0].detach(), pairing="half")
    fastest = plots.angle_field(shared, 2, 2, positions=positions.grid(2, 2, order="wh")).axes[:8]
    assert [panel.get_title().split(":")[0] for panel in fastest] == [f"pair {i}" for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    still = ropewalk.LearnedRope.projected(16, 3, pairing="interleaved", axes=2)
    title = plots.angle_field(still, 2, 2, head=0, pairs=[0], positions=positions.grid(2, 2)).axes[0].get_title()
    assert title == "pair 0: 0, 0\nwavelength inf"


def test_pictures_name_the_axes():
    names = ("time", "row", "column")
    axes = plots.inv_freq(MROPE, axis_names=names).axes[0]
    assert [label for label in lines(axes) if label != "no scaling"] == list(names)
    assert axes.get_ylabel() == "inverse frequency (radians per position)"
    assert axes.child_axes[0].get_ylabel() == "wavelength (positions per full turn)"
    assert plots.inv_freq(PLAIN).axes[0].child_axes[0].get_ylabel() == "wavelength (tokens per full turn)"
    figure = plots.angle_field(AXIAL, 2, 2, pairs=[0, 4], axis_names=("row", "column"))
    assert [panel.get_title().split("\n")[0] for panel in figure.axes[:2]] == ["pair 0: row", "pair 4: column"]
    for rope, wrong in ((MROPE, ("row", "column")), (PLAIN, ("row",)), (MROPE, "row")):
        with pytest.raises(ropewalk.RopeError, match=r"plots\.inv_freq: axis_names must have a name for each of the"):
            plots.inv_freq(rope, axis_names=wrong)


LEARNED = ropewalk.LearnedRope.projected(head_dim=16, heads=3, pairing="interleaved", axes=2)


@pytest.mark.parametrize(
    ("rope", "given", "message"),
    [
        (LEARNED, {"head": 0}, "positions must be passed for a LearnedRope"),
        (LEARNED, {}, "head must be an index if each head has its own frequencies"),
        (LEARNED, {"head": 3, "positions": np.zeros((2, 6))}, "head must be an integer from 0 to 2, got 3"),
        (LEARNED, {"head": 0, "axis_names": ("x", "y")}, "axis_names must be empty for a LearnedRope"),
        (ropewalk.LearnedRope.from_rope(PLAIN), {}, "rope must have axes, got a LearnedRope with one axis"),
        (AXIAL, {"head": 0}, "head must be None for a Rope"),
        (AXIAL, {"axis_names": ("x",)}, "axis_names must have a name for each of the 2 axes"),
        (None, {}, "rope must be a Rope with axes or a LearnedRope, got None"),
        (PLAIN, {}, "rope must have axes, got a rope with one axis"),
        (AXIAL, {"height": 0}, "height must be an integer from 1 to 512, got 0"),
        (AXIAL, {"width": 513}, "width must be an integer from 1 to 512, got 513"),
        (AXIAL, {"pairs": [8]}, "pairs must be an integer from 0 to 7, got 8"),
        (AXIAL, {"pairs": [-1]}, "pairs must be an integer from 0 to 7, got -1"),
        (AXIAL, {"pairs": []}, r"pairs must be a list of 1 to 16 pairs, got \[\]"),
        (AXIAL, {"pairs": [0] * 17}, "pairs must be a list of 1 to 16 pairs"),
        (AXIAL, {"pairs": 3}, "pairs must be a list of 1 to 16 pairs, got 3"),
        (AXIAL, {"positions": np.zeros((3, 6))}, r"positions must have shape \[2, 6\], .*, got shape \(3, 6\)"),
        (AXIAL, {"positions": np.full((2, 6), np.nan)}, "positions must be finite"),
        (AXIAL, {"positions": "rows"}, "positions must be numbers, got"),
        (
            ropewalk.Rope(16, 1e4, "half", axes=ropewalk.Axes.axial((4, 4, 4, 4))),
            {},
            "rope must have two or three axes if positions is None, got 4",
        ),
    ],
)
def test_angle_field_refuses(rope, given, message):
    with pytest.raises(ropewalk.RopeError, match=rf"plots\.angle_field: {message}"):
        plots.angle_field(rope, **{"height": 2, "width": 3, **given})


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "across", "up"),
    [
        (plots.inv_freq, "pair index", "(radians per token)"),
        (plots.rotated_vector, "(dimensionless)", "(dimensionless)"),
        (plots.pairs, "(tokens)", "pair index"),
        (plots.decay, "(tokens;", "(dimensionless)"),
    ],
)
def test_every_figure_has_title_legend_and_units(function, across, up):
    figure = function(LLAMA)
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert figure.get_suptitle() or panels[0].get_title()
    assert across in panels[-1].get_xlabel()
    for axes in panels:
        assert up in axes.get_ylabel()
        assert axes.get_legend().get_texts()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_other_figure_is_of_a_rope(function):
    with pytest.raises(
        ropewalk.RopeError, match=rf"plots\.{function.__name__}: rope must be a Rope, got .*angle_field"
    ):
        function(LEARNED)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_figure_is_a_png_of_1000_pixels(function, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    path = tmp_path / "picture.png"
    plots.save(function(LLAMA), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1000
    assert 500 <= height <= 800


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_save_writes_what_the_suffix_says(suffix, start, tmp_path):
    path = tmp_path / f"picture.{suffix}"
    plots.save(plots.inv_freq(YARN), str(path))
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["picture.txt", "picture", "picture.raw", ".png"])
def test_save_refuses_other_suffixes(name, tmp_path):
    with pytest.raises(ropewalk.RopeError, match=r"plots\.save: path must end in one of \.png, \.svg, \.pdf, got"):
        plots.save(plots.inv_freq(YARN), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_save_refuses_a_missing_folder(tmp_path):
    with pytest.raises(ropewalk.RopeError, match=r"plots\.save: the folder of path must exist, got .*missing"):
        plots.save(plots.inv_freq(YARN), tmp_path / "missing" / "picture.png")


def test_save_says_when_the_file_cannot_be_written(tmp_path):
    (tmp_path / "picture.png").mkdir()
    with pytest.raises(ropewalk.RopeError, match=r"plots\.save: path must be writable, got .*picture\.png"):
        plots.save(plots.inv_freq(YARN), tmp_path / "picture.png")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_matplotlib_the_error_says_what_to_install(function, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ropewalk.RopeError, match=r'pip install "\.\[plots\]"'):
        function(LLAMA)


def test_a_backend_that_matplotlib_does_not_know():
    code = (
        "import ropewalk; from ropewalk import plots\n"
        "try: plots.inv_freq(ropewalk.Rope(8, 1e4, 'half'))\n"
        "except ropewalk.RopeError as e: print(e)"
    )
    environment = {**os.environ, "MPLBACKEND": "bogus"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert ran.stdout.startswith("plots: matplotlib must accept MPLBACKEND, got"), ran.stderr
    assert "Unset MPLBACKEND." in ran.stdout


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (plots.rotated_vector, {"pair": 64}),
        (plots.rotated_vector, {"pair": -1}),
        (plots.rotated_vector, {"tokens": 0}),
        (plots.rotated_vector, {"tokens": 17}),
        (plots.pairs, {"tokens": 1}),
        (plots.pairs, {"tokens": 4097}),
        (plots.pairs, {"tokens": 16.0}),
        (plots.decay, {"longest": 0}),
        (plots.decay, {"longest": 2**31}),
        (plots.decay, {"longest": True}),
    ],
)
def test_numbers_out_of_range_are_refused(function, arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(
        ropewalk.RopeError, match=rf"plots\.{function.__name__}: {name} must be an integer from .*{value}"
    ):
        function(LLAMA, **arguments)


def test_colours_can_be_read_on_white_and_inverted_as_the_site_does_in_dark_mode() -> None:
    """The contrast that WCAG 2 asks of text, with the matrices that CSS defines for invert and hue-rotate."""

    def luminance(colour: np.ndarray) -> np.ndarray:
        linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
        return np.asarray(linear @ np.array([0.2126, 0.7152, 0.0722]))

    turned = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
    css = (Path(__file__).parents[1] / "docs" / "assets" / "site.css").read_text("utf-8")
    assert "filter: invert(0.9) hue-rotate(180deg);" in css
    shown, white = colours(16)[:, :3], np.ones(3)
    for on_page, page in ((shown, white), ((0.9 - 0.8 * shown) @ turned.T, (0.9 - 0.8 * white) @ turned.T)):
        light, dark = luminance(np.clip(on_page, 0, 1)), luminance(np.clip(page, 0, 1))
        assert ((np.maximum(light, dark) + 0.05) / (np.minimum(light, dark) + 0.05)).min() >= 4.5
