"""`read`: the rope that a trainer has built in for the model of a config. Such a trainer reads no config.json.

Users choose one of its models by name. Each has a shape and the numbers of its rope in code or in a file of its own.
The model with the shape of a config stands for what a user trains. Each trainer has a JSON file beside it with its
models. tests/golden/trainers has the recordings from which `tools/recording/tables.py` writes these files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._model_files import Evidence, ModelFile, Reading
from ropewalk.rope.rope import Rope
from ropewalk.schemes import SCHEMES


@dataclass(frozen=True, eq=False)
class Model:
    """A model of a trainer.

    Args:
        name: the name in the trainer.
        models: the model_types of text models that it stands for.
        file: the file with its numbers.
        hidden_size, layers, heads, vocab_size: its shape.
        ropes: maps each kind of layer, or "all", to its rope: head_dim, rotary_dim (by default head_dim), base, the
            pairing of the weights that the trainer's converter reads, and the scaling as an object of a config.
        evidence: "run", or "read" if the arguments of the rotary modules were only read in the code of the model.
    """

    name: str
    models: tuple[str, ...]
    file: str
    hidden_size: int
    layers: int
    heads: int
    vocab_size: int
    ropes: Mapping[str, Mapping[str, Any]]
    evidence: Evidence = "run"

    def fits(self, config: ConfigRope) -> bool:
        """Return whether a config of the same model_type has the shape of this model.

        Vocabularies may differ by 5 %, because some are padded and fine-tunes add tokens.
        """
        values, rope = config.values, self.rope(config)
        shape = (values.get("hidden_size"), config.layers, values.get("num_attention_heads"), config.rope.head_dim)
        same = rope is not None and shape == (self.hidden_size, self.layers, self.heads, rope["head_dim"])
        return same and self.vocabulary_difference(config) <= 0.05 * self.vocab_size

    def vocabulary_difference(self, config: ConfigRope) -> float:
        """Return by how many tokens the vocabularies of a config and of this model differ."""
        return abs((to_finite(config.values.get("vocab_size"), self.vocab_size) or 0.0) - self.vocab_size)

    def rope(self, config: ConfigRope) -> Mapping[str, Any] | None:
        """Return the rope of the kind of layer that a rope of a config has, or None if this model has none."""
        return self.ropes.get(config.kind, self.ropes.get("all"))

    def build(self, config: ConfigRope) -> Rope:
        """Return the rope of a config with the numbers of this model."""
        found: Mapping[str, Any] = self.rope(config) or {}
        scaling = dict(found.get("scaling", {}))
        scheme = SCHEMES[scaling.pop("rope_type")](**scaling) if scaling else None
        rotary_dim = found.get("rotary_dim", found["head_dim"])
        # Axes divide the channels of the config's rope.
        axes = config.rope.axes if rotary_dim == config.rope.rotary_dim else None
        numbers = {"base": found["base"], "scaling": scheme, "rotary_dim": rotary_dim, "pairing": found["pairing"]}
        return replace(config.rope, axes=axes, **numbers)


@functools.cache
def _models(table: str) -> tuple[Model, ...]:
    rows = json.loads((Path(__file__).parent / f"{table}.json").read_text(encoding="utf-8"))["models"]
    return tuple(Model(name, **{**values, "models": tuple(values["models"])}) for name, values in rows.items())


def read(table: str, config: ConfigRope) -> Reading:
    """Return the rope of the trainer's model that has the shape of a config, in place of a rope of the config.

    If several models have it, those with the nearest vocabulary count, and of these the one with the config's numbers.

    Args:
        table: the name of the trainer's table.
        config: the rope of the config.
    """
    known = [model for model in _models(table) if config.model_type in model.models]
    fitting = [model for model in known if model.fits(config)]
    if not fitting:
        names = ", ".join(model.name for model in known)
        of_shape = f" of this shape, only {names}" if known else ""
        return Reading(None, stop=f"has no model {config.model_type}{of_shape}", why="absent")
    nearest = min(model.vocabulary_difference(config) for model in fitting)
    fitting = [model for model in fitting if model.vocabulary_difference(config) == nearest]
    ropes = {model: model.build(config) for model in fitting}
    chosen = next((model for model in fitting if _same(ropes[model], config.rope)), fitting[0])
    rope = ropes[chosen]
    notes = [f"It reads no config.json. The rope is the one built into its model {chosen.name}."]
    if not _same(rope, config.rope):
        words = [_words(one, channels=rope.rotary_dim != config.rope.rotary_dim) for one in (rope, config.rope)]
        notes.append(f"That model has {words[0]}, and the config has {words[1]}.")
    if others := [model.name for model in fitting if not _same(ropes[model], rope)]:
        notes.append(f"Of the same shape, but with other numbers: {', '.join(others)}.")
    section = (chosen.rope(config) or {}).get("scaling", {})
    return Reading(replace(config, rope=rope, section=section), ModelFile(chosen.file, chosen.evidence), tuple(notes))


def _same(first: Rope, second: Rope) -> bool:
    """Return whether two ropes rotate alike at every length."""
    if not (first.is_static and second.is_static):
        return first == second
    numbers = (first.rotary_dim, first.pairing, round(first.attention_factor, 6))
    return numbers == (second.rotary_dim, second.pairing, round(second.attention_factor, 6)) and np.allclose(
        first.inv_freq, second.inv_freq, rtol=1e-5, atol=0
    )


def _words(rope: Rope, *, channels: bool) -> str:
    """Return the base and the scaling of a rope, and its `channels`, in a few words."""
    factor = getattr(rope.scaling, "factor", None)
    scaled = "no scaling" if rope.scaling is None else rope.scaling.rope_type
    first = f"{rope.rotary_dim} rotated channels, the base" if channels else "the base"
    return f"{first} {rope.base:g} and {scaled}{'' if factor is None else f' with factor {factor:g}'}"
