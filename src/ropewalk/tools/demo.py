"""A short tour with the published config of Llama 3.1 8B, without a download.

It reads the config, rotates q and k, checks and times the rotation, and draws plots. Every check measures an error, and
raises if the error exceeds a documented bound. For comparison, the usual float32 code
(Hugging Face's Llama, from the benchmark) runs in the same process and is timed in the same way.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks, plots
from ropewalk.tools.bench.baselines import hugging_face, hugging_face_tables
from ropewalk.tools.bench.case import rotation_error
from ropewalk.tools.bench.clocks import OnCpu
from ropewalk.tools.bench.measure import sample_alternately

Say = Callable[[str], None]

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
"""The keys about rotation in `config.json` of Llama 3.1 8B. head_dim is 4096 / 32 = 128."""

_Q_HEADS, _KV_HEADS, _LAYERS = 32, 8, 32  # as CONFIG says
_WINDOW = 256
_WINDOW_STARTS = (0, 8_192 - _WINDOW // 2, 131_072 - _WINDOW)
_LAST_POSITIONS = (255, 8_191, 131_071, 1_048_575, 2**31 - 1)
_SHIFTS = (8_192, 131_072, 1_048_576, 2**31 - 131_072)

# Documented error of cos and sin from Rope.at, plus the rounding of float64.
_TABLE_FLOOR = 2.0**-25 + 1e-15
_TABLE_PER_TOKEN = 2 * np.pi * 2.0**-65
# Error of a rotated pair, relative to its length: tables (2⁻²⁵ each), two products and a sum (2⁻²⁴ each) add up to
# 3.9 · 2⁻²⁴.
_ROTATION_BOUND = 2.0**-22
# Change of a score of unit vectors: q and k are both rotated twice, before and after the shift.
_SCORE_BOUND = 4 * _ROTATION_BOUND


def run(folder: Path, say: Say) -> None:
    """Run the demo. It takes a few seconds on two cores and about half a GB of memory.

    Args:
        folder: folder for the plots. It is created if missing, and plots of an earlier run are overwritten.
        say: called with each line of the report, for example `print` or `click.echo`.

    Raises:
        RopeError: a check fails (the message names it), folder cannot be created, or mpmath is missing. Without
            matplotlib, only the plots are left out.
    """
    started = time.perf_counter()
    _import_mpmath()
    try:
        plots.blank(height=1.0)
        no_plots = ""
    except ropewalk.RopeError as e:
        no_plots = str(e)
    if not no_plots:
        _create_folder(folder)  # raises now, not after all checks
    rope = _read_config(say)
    case = _build_case(rope)
    _check_angles(case, say)
    _check_rotation(case, say)
    _check_distance_only(case, say)
    _compare(case, say)
    say("[6/6] Plot")
    names = [] if no_plots else _draw(rope, folder)
    if no_plots:
        say(f"  left out: {no_plots}")
    passed = f"All checks passed in {time.perf_counter() - started:.1f} s."
    say(passed if no_plots else f"{passed} Plots in {folder}:")
    for name in names:
        say(f"  {name}")


@dataclass(frozen=True)
class _Case:
    """A rope and the tokens that it rotates.

    Args:
        rope: the rope.
        positions: int64 `[tokens]`.
        q, k: float32 `[1, tokens, 32, 128]` and `[1, tokens, 8, 128]`. The vector of each head has length 1.
        usual_inv_freq: inverse frequencies for the usual code, float32 `[pairs]`, in radians per token.
    """

    rope: ropewalk.Rope
    positions: Tensor
    q: Tensor
    k: Tensor
    usual_inv_freq: Tensor


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        got = f"{str(folder)!r} ({e.strerror})"
        raise _checks.error("demo", "it must be possible to create folder", got, "Pass another path.") from e


def _import_mpmath() -> Any:
    """Import mpmath, which no other module of the package needs."""
    try:
        return importlib.import_module("mpmath")
    except ImportError as e:
        raise _checks.missing_package("demo", "mpmath", "demo") from e


def _read_config(say: Say) -> ropewalk.Rope:
    say("[1/6] Read the published config of Llama 3.1 8B")
    model = ropewalk.from_config(CONFIG)
    rope = model.rope
    say(f"  {rope}")
    say(
        f"  {len(model.layers)} equal layers, {rope.rotary_dim // 2} pairs of channels with wavelengths from "
        f"{rope.wavelength[0]:.2f} to {rope.wavelength[-1]:,.0f} tokens"
    )
    return rope


def _build_case(rope: ropewalk.Rope) -> _Case:
    generator = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.arange(start, start + _WINDOW) for start in _WINDOW_STARTS])

    def unit(heads: int) -> Tensor:
        x = torch.randn(1, len(positions), heads, rope.head_dim, generator=generator, dtype=torch.float32)
        return torch.nn.functional.normalize(x, dim=-1)

    inv_freq = torch.from_numpy(rope.inv_freq).float()
    return _Case(rope, positions, unit(_Q_HEADS), unit(_KV_HEADS), inv_freq)


def _check_angles(case: _Case, say: Say) -> None:
    """Check cos and sin of all pairs against mpmath, for the 16 tokens up to each of several positions."""
    say("[2/6] Check cos and sin against mpmath (40 digits): largest error of the 16 tokens up to each position")
    say(f"  {'position':>13}  {'ropewalk':>9}  usual float32 code")
    drift = []
    for last in _LAST_POSITIONS:
        positions = torch.arange(last - 15, last + 1)
        exact = _exact_cos_sin(case.rope.inv_freq, positions)
        rotation = case.rope.at(positions)
        ours = _largest_gap((rotation.cos, rotation.sin), exact)
        cos, sin = hugging_face_tables(case.usual_inv_freq, positions[None])
        usual = _largest_gap((cos[0], sin[0]), exact)
        say(f"  {last:>13,}  {ours:9.1e}  {usual:.1e}")
        _require(f"cos and sin up to position {last:,}", ours, _TABLE_FLOOR + last * _TABLE_PER_TOKEN)
        drift.append(usual)
    if drift == sorted(drift) and drift[-1] > drift[0]:
        say("  The usual code rounds the angle to float32, so its error grows with the position.")


def _check_rotation(case: _Case, say: Say) -> None:
    """Check rotated q and k of every 32nd token against a float64 rotation by mpmath's angles."""
    say("[3/6] Rotate q (32 heads) and k (8 heads) in float32, and check against float64 with mpmath's angles")
    ranges = ", ".join(f"{s:,}-{s + _WINDOW - 1:,}" for s in _WINDOW_STARTS)
    say(f"  {len(case.positions)} tokens at positions {ranges}; every 32nd token and the last are checked")
    rotated = case.rope.at(case.positions)(case.q, case.k, layout="bshd")
    for name, error in zip("qk", _rotation_errors(case, rotated), strict=True):
        say(f"  largest error of a pair of {name}, relative to its length: {error:.1e}")
        _require(f"rotated {name}", error, _ROTATION_BOUND)


def _check_distance_only(case: _Case, say: Say) -> None:
    """Check that the scores between all tokens hardly change if all positions move by the same number of tokens."""
    say("[4/6] Check that scores depend only on distance: largest change of a score when all positions move")
    say(f"  {len(case.positions)}² scores x {_Q_HEADS} heads; q and k have length 1, so scores lie between -1 and 1")
    say(f"  {'moved by':>13}  {'ropewalk':>9}  usual float32 code")
    ours_before, usual_before = _rotate(case, 0), _rotate_usual(case, 0)
    for shift in _SHIFTS:
        ours = _largest_score_change(ours_before, _rotate(case, shift))
        usual = _largest_score_change(usual_before, _rotate_usual(case, shift))
        say(f"  {shift:>13,}  {ours:9.1e}  {usual:.1e}")
        _require(f"change of scores when positions move by {shift:,}", ours, _SCORE_BOUND)


def _compare(case: _Case, say: Say) -> None:
    """Compare time and error of ropewalk and of the usual code on the same tensors, with alternating runs."""
    threads = torch.get_num_threads()
    say(
        f"[5/6] Compare with the usual float32 code: same tensors, median of 15 alternating runs, {threads} CPU threads"
    )
    rotation = case.rope.at(case.positions)
    usual = hugging_face(*_usual_tables(case, case.positions))
    calls: dict[str, Callable[[], object]] = {
        "ropewalk, angles": lambda: case.rope.at(case.positions),
        "usual float32 code, angles": lambda: _usual_tables(case, case.positions),
        "ropewalk": lambda: rotation(case.q, case.k, layout="bshd"),
        "usual float32 code": lambda: usual(case.q, case.k),
    }
    samplers = {name: OnCpu().prepare([call]).sample for name, call in calls.items()}
    samples = sample_alternately(samplers, rounds=15, seconds=math.inf)
    times = {name: 1e3 * statistics.median(taken) for name, taken in samples.items()}
    say(f"  {'':>20}  angles, once  q and k, each layer  pass of {_LAYERS} layers  error of q and k")
    passes = []
    for name, rotated in (("ropewalk", _rotate(case, 0)), ("usual float32 code", _rotate_usual(case, 0))):
        angles, layer = times[f"{name}, angles"], times[name]
        passes.append(angles + _LAYERS * layer)
        error = max(_rotation_errors(case, rotated))
        say(f"  {name:>20}  {angles:9.2f} ms  {layer:15.2f} ms  {passes[-1]:14.1f} ms  {error:.1e}")
    ratio = passes[0] / passes[1]
    say(f"  In this run, a pass with ropewalk took {ratio:.2f} times as long as with the usual code.")
    say(f"  {_which_code_ran()}")


def _which_code_ran() -> str:
    """Return a line that names the code that rotated float32 tensors, and the reason if the CPU kernel did not."""
    state = ropewalk.backends()["cpu kernel"]
    if state.startswith("not usable") or "ROPEWALK_BACKEND" in state:
        return f"Code: plain PyTorch for both. The CPU kernel is {state}."
    level = state.removeprefix("usable: ")
    return f"Code: the compiled CPU kernel ({level}) for ropewalk, plain PyTorch for the usual code."


def _draw(rope: ropewalk.Rope, folder: Path) -> list[str]:
    figures = {
        "rotated_vector.png": plots.rotated_vector(rope),
        "pairs.png": plots.pairs(rope),
        "inv_freq.png": plots.inv_freq(rope),
        "decay.png": plots.decay(rope),
    }
    for name, figure in figures.items():
        plots.save(figure, folder / name)
    return list(figures)


def _require(what: str, measured: float, bound: float) -> None:
    """Raise a RopeError unless measured ≤ bound. NaN raises as well."""
    if not measured <= bound:
        must, fix = (
            f"the error of {what} must be at most {bound:.1e}",
            "Please report this with the output of `ropewalk doctor`.",
        )
        raise _checks.error(
            "demo", must, f"{measured:.1e}", f"ropewalk, or PyTorch on this machine, computes wrong values. {fix}"
        )


def _exact_cos_sin(inv_freq: np.ndarray, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of position · inv_freq, taking inv_freq as exact. Both are float64 `[tokens, pairs]`."""
    mpmath = _import_mpmath()
    with mpmath.workdps(40):
        factors = [[mpmath.expj(mpmath.mpf(w) * p) for w in inv_freq.tolist()] for p in positions.tolist()]
        exact = torch.tensor([[complex(factor) for factor in row] for row in factors], dtype=torch.complex128)
    return exact.real, exact.imag


def _largest_gap(tables: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> float:
    pairs = exact[0].shape[-1]
    return max((t[..., :pairs].double() - e).abs().max().item() for t, e in zip(tables, exact, strict=True))


def _rotation_errors(case: _Case, rotated: tuple[Tensor, Tensor]) -> list[float]:
    """Return the largest error of a rotated pair in q, and in k, over every 32nd token and the last token.

    The errors are relative to the length of the pair.
    """
    rows = torch.cat((torch.arange(0, len(case.positions), 32), torch.tensor([len(case.positions) - 1])))
    factor = torch.complex(*_exact_cos_sin(case.rope.inv_freq, case.positions[rows])).unsqueeze(1)
    return [
        rotation_error(before[0, rows], after[0, rows], factor, case.rope.pairing).item()
        for before, after in zip((case.q, case.k), rotated, strict=True)
    ]


def _rotate(case: _Case, shift: int) -> tuple[Tensor, Tensor]:
    return case.rope.at(case.positions + shift)(case.q, case.k, layout="bshd")


def _largest_score_change(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> float:
    """Return the largest absolute difference between scores before and after, computed in float64."""
    return max((_scores(*before, head) - _scores(*after, head)).abs().max().item() for head in range(_KV_HEADS))


def _scores(q: Tensor, k: Tensor, head: int) -> Tensor:
    """Compute the scores q·k of k head `head` with the four q heads that share it: float64 `[4 · tokens, tokens]`."""
    group = _Q_HEADS // _KV_HEADS
    queries = q[0, :, head * group : (head + 1) * group].double().flatten(0, 1)
    return queries @ k[0, :, head].double().T


def _usual_tables(case: _Case, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos and sin as the usual code does: float32 `[seq, 1, 128]`, which broadcast over heads."""
    cos, sin = hugging_face_tables(case.usual_inv_freq, positions[None])
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def _rotate_usual(case: _Case, shift: int) -> tuple[Tensor, Tensor]:
    return hugging_face(*_usual_tables(case, case.positions + shift))(case.q, case.k)
