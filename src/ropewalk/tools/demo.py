"""A short tour with the published config of Llama 3.1 8B, without a download.

It reads the config, checks angles and rotation, and draws plots. Every check measures an error, and raises if the error
exceeds a documented bound. The angles of the usual float32 code (Hugging Face's Llama) are measured for comparison.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks, plots

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

_WINDOW_STARTS, _WINDOW = (0, 8_064, 130_816), 256
_LAST_POSITIONS = (255, 8_191, 131_071, 1_048_575, 2**31 - 1)

# Documented error of cos and sin from Rope.at, plus the rounding of float64.
_TABLE_FLOOR = 2.0**-25 + 1e-15
_TABLE_PER_TOKEN = 2 * np.pi * 2.0**-65
# Error of a rotated pair, relative to its length: tables (2⁻²⁵ each), two products and a sum (2⁻²⁴ each) add up to
# 3.9 · 2⁻²⁴.
_ROTATION_BOUND = 2.0**-22


def run(folder: Path, say: Say) -> None:
    """Run the demo. It takes a few seconds on two cores and about half a GB of memory.

    Args:
        folder: folder for the plots. It is created if missing, and plots of an earlier run are overwritten.
        say: called with each line of the report, for example `print` or `click.echo`.

    Raises:
        RopeError: a check fails (the message names it), or mpmath is missing. Without matplotlib, only the plots are
            left out.
        OSError: folder cannot be created.
    """
    started = time.perf_counter()
    _import_mpmath()
    no_plots = ""
    try:
        plots.blank(height=1.0)
        folder.mkdir(parents=True, exist_ok=True)  # raises now, not after all checks
    except ropewalk.RopeError as e:
        no_plots = str(e)
    say("[1/4] Read the published config of Llama 3.1 8B")
    model = ropewalk.from_config(CONFIG)
    rope = model.rope
    say(f"  {rope}")
    say(
        f"  {len(model.layers)} equal layers, {rope.rotary_dim // 2} pairs of channels with wavelengths from "
        f"{rope.wavelength[0]:.2f} to {rope.wavelength[-1]:,.0f} tokens"
    )
    _check_angles(rope, say)
    _check_rotation(rope, say)
    say("[4/4] Plot")
    if no_plots:
        say(f"  left out: {no_plots}")
    else:
        for plot in (plots.rotated_vector, plots.pairs, plots.inv_freq, plots.decay):
            plots.save(plot(rope), folder / f"{plot.__name__}.png")
            say(f"  {folder / plot.__name__}.png")
    say(f"All checks passed in {time.perf_counter() - started:.1f} s.")


def _exact(rope: ropewalk.Rope, positions: Tensor) -> Tensor:
    """Compute cos + i sin with mpmath, taking inv_freq as exact: complex128 `[tokens, pairs]`."""
    mpmath = _import_mpmath()
    with mpmath.workdps(40):
        factors = [
            [complex(mpmath.expj(mpmath.mpf(w) * p)) for w in rope.inv_freq.tolist()] for p in positions.tolist()
        ]
    return torch.tensor(factors, dtype=torch.complex128)


def _import_mpmath() -> Any:
    """Import mpmath, which no other module of the package needs."""
    try:
        return importlib.import_module("mpmath")
    except ImportError as e:
        raise _checks.missing_package("demo", "mpmath", "demo") from e


def _check_angles(rope: ropewalk.Rope, say: Say) -> None:
    """Check cos and sin of all pairs against mpmath, for the 16 tokens up to each of several positions."""
    say("[2/4] Check cos and sin against mpmath (40 digits): largest error of the 16 tokens up to each position")
    say(f"  {'position':>13}  {'ropewalk':>9}  usual float32 code")
    for last in _LAST_POSITIONS:
        positions = torch.arange(last - 15, last + 1)
        exact, rotation = _exact(rope, positions), rope.at(positions)
        angle = positions[:, None].float() * torch.from_numpy(rope.inv_freq).float()  # as LlamaRotaryEmbedding
        ours, usual = (_largest_gap(pair, exact) for pair in ((rotation.cos, rotation.sin), (angle.cos(), angle.sin())))
        say(f"  {last:>13,}  {ours:9.1e}  {usual:.1e}")
        _require(f"cos and sin up to position {last:,}", ours, _TABLE_FLOOR + last * _TABLE_PER_TOKEN)


def _check_rotation(rope: ropewalk.Rope, say: Say) -> None:
    """Check rotated q and k of some tokens against a float64 rotation by mpmath's angles."""
    positions = torch.cat([torch.arange(start, start + _WINDOW, 32) for start in _WINDOW_STARTS])
    ranges = ", ".join(f"{start:,}-{start + _WINDOW - 1:,}" for start in _WINDOW_STARTS)
    say(f"[3/4] Rotate {len(positions)} tokens at positions {ranges}: largest error of a pair, relative to its length")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, len(positions), heads, rope.head_dim, generator=generator) for heads in (32, 8))
    factor = _exact(rope, positions).unsqueeze(1)
    for name, before, after in zip("qk", (q, k), rope.at(positions)(q, k, layout="bshd"), strict=True):
        exact, found = (torch.complex(*x.double().chunk(2, dim=-1)) for x in (before, after))
        exact *= factor
        error = ((found - exact).abs() / exact.abs()).max().item()
        say(f"  {name}: {error:.1e}")
        _require(f"rotated {name}", error, _ROTATION_BOUND)
    say(f"  CPU kernel of ropewalk: {ropewalk.backends()['cpu kernel']}")


def _require(what: str, measured: float, bound: float) -> None:
    """Raise a RopeError unless measured ≤ bound. NaN raises as well."""
    if not measured <= bound:
        must = f"the error of {what} must be at most {bound:.1e}"
        fix = "ropewalk, or PyTorch on this machine, computes wrong values. Please report this with `ropewalk doctor`."
        raise _checks.error("demo", must, f"{measured:.1e}", fix)


def _largest_gap(tables: Iterable[Tensor], exact: Tensor) -> float:
    parts = zip(tables, (exact.real, exact.imag), strict=True)
    return torch.stack([(table.double() - part).abs() for table, part in parts]).max().item()
