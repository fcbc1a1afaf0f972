"""`model_types`: everything that `from_config` knows by name, in groups, with one line about each."""

from __future__ import annotations

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.axes_rules import AxesRule
from ropewalk.configs.gguf.keys import ARCHITECTURES as GGUF
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.tables.denoisers import CLASSES
from ropewalk.configs.tables.denoisers import REFUSED as REFUSED_CLASSES
from ropewalk.configs.tables.gguf import UNROTATED
from ropewalk.configs.tables.towers import TOWERS
from ropewalk.configs.tables.wrappers import WRAPPERS


def model_types() -> dict[str, dict[str, str]]:
    """Return the model types that `from_config` reads or refuses with a reason: group → name → a few words about it."""
    rows = {name: row for name, row in ARCHITECTURES.items() if not row.refusal}
    rotating = {name: row for name, row in rows.items() if any(row.kinds.values())}
    groups = {
        "Text models": {
            name: _words(row) for name, row in rotating.items() if row.axes is None and row.in_transformers
        },
        "Text models whose code is not in transformers": {
            name: f"{_words(row)}; {row.source}" for name, row in rotating.items() if not row.in_transformers
        },
        "Models whose tokens have several positions (M-RoPE)": {
            name: f"{_words(row)}; {_names(row.axes)}" for name, row in rotating.items() if row.axes is not None
        },
        "Models that contain a text model": {name: f"read from {key}" for name, key in WRAPPERS.items()},
        "Vision towers": {name: ", ".join(row.axis_names) for name, row in TOWERS.items()},
        "Diffusion transformers of diffusers, by _class_name": {
            name: f"{row.pairing}; {', '.join(row.axis_names)}" for name, row in CLASSES.items()
        },
        "Architectures of llama.cpp, in GGUF files": {
            name: "no rotation" if row.layers == UNROTATED else str(row.pairing)
            for name, row in GGUF.items()
            if not row.refusal
        },
        "Models in which no layer rotates": {name: row.source for name, row in rows.items() if name not in rotating},
        "Models that are refused, and why": {
            **{name: _reason(name, row.refusal) for name, row in ARCHITECTURES.items() if row.refusal},
            **REFUSED_CLASSES,
            **{f"{name} (GGUF)": row.refusal for name, row in GGUF.items() if row.refusal},
        },
    }
    return {group: dict(sorted(members.items())) for group, members in groups.items()}


def _words(row: Architecture) -> str:
    pairing = "half or interleaved, by the config" if callable(row.pairing) else row.pairing
    return f"{pairing}; layers differ" if len(row.kinds) > 1 else pairing


def _names(axes: AxesRule | None) -> str:
    return "" if axes is None else ", ".join(axes.names)


def _reason(name: str, refusal: str) -> str:
    return refusal.removeprefix(f"{name} has no rotary positions: it has ")
