"""The keys of a GGUF file: which are about rotation, each read once, and none left over."""

from __future__ import annotations

import re
from typing import Any

from ropewalk._checks import length as checked_length
from ropewalk._checks import nearest, shown
from ropewalk._checks import number as checked_number
from ropewalk.configs.fields import ROPE_WORDS, Fields
from ropewalk.configs.gguf.architectures import ARCHITECTURES, NOT_ALL_LAYERS, UNKNOWN
from ropewalk.configs.gguf.row import (
    BASE,
    BASE_SWA,
    DIM,
    DIM_SWA,
    HEAD_MLA,
    HEAD_SWA,
    ORIGINAL,
    ROPE_PATTERN,
    SECTIONS,
    GgufRow,
)

# Keys after the architecture that say something where they are read, and must not be given elsewhere.
_OF_SOME = {
    DIM_SWA: "Sliding-window layers that turn other channels: not supported yet.",
    HEAD_SWA: "Sliding-window layers with heads of another size: not supported yet.",
    HEAD_MLA: "Multi-head latent attention: not supported yet.",
    ROPE_PATTERN: NOT_ALL_LAYERS,
    "attention.compress_rope_freq_base": NOT_ALL_LAYERS,
    SECTIONS: "llama.cpp reads it for architectures with several axes alone, such as qwen2vl, qwen3vl, glm4 and "
    "hunyuan_vl: is general.architecture right? If it means nothing, name the key in ignore=(...) of from_config.",
}
# Values of keys that change nothing even where they are not read.
_NEUTRAL = {
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_ALWAYS_READ = (
    DIM,
    BASE,
    "rope.scaling.type",
    ORIGINAL,
    "rope.scaling.finetuned",
)
REMOVE = "remove this key with gguf-new-metadata --remove-metadata, a command of the package gguf"
_TELLING = frozenset({"attn_factor", "dimension_count", "freq_base", "original_context_length", "scale_linear"})


class Keys:
    """The keys of one file, what they meant so far, and what to warn about. Names are those after the architecture.

    `row` says what the architecture implies.
    """

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []
        self.architecture, self.row = _architecture(fields)
        self.taken = {self.key(name) for name in _ALWAYS_READ}
        self.original = self.length(ORIGINAL)
        self.longest = self.length("context_length")

    def key(self, name: str) -> str:
        """The whole name of a key."""
        return f"{self.architecture}.{name}"

    def number(self, name: str, *, above: float | None = None, at_least: float | None = None) -> float | None:
        """A key that counts from here on; None if it is not given."""
        key = self.key(name)
        self.taken.add(key)
        if not self.fields.has(key):
            return None
        return checked_number(self.fields.source, key, self.fields.get(key), above=above, at_least=at_least)

    def length(self, name: str) -> int | None:
        """A key as a number of tokens; None if it is not given."""
        key = self.key(name)
        return checked_length(self.fields.source, key, self.fields.get(key)) if self.fields.has(key) else None

    def needed(self, name: str, value: float | None, why: str) -> Any:
        """The value, if it is given."""
        if value is None:
            raise self.fields.error(self.key(name), "it must be given", "none", why)
        self.origins[name.rpartition(".")[2]] = self.key(name)
        return value

    def refuse_unsupported(self) -> None:
        """Raise if a key says something that llama.cpp does not read for this architecture."""
        reads = self.row.reads()
        self.taken |= {self.key(name) for name in reads}
        for name, why in _OF_SOME.items():
            value = self.fields.get(self.key(name))
            if name not in reads and value is not None:
                raise self.fields.error(self.key(name), "it must not be given", shown(value), why)
        local, own = self.fields.get(self.key(BASE_SWA)), self.fields.get(self.key(BASE))
        self.taken.add(self.key(BASE_SWA))
        if BASE_SWA not in reads and local not in (None, own):
            cure = f"llama.cpp does not rotate by it in {self.architecture}: read the model's config.json instead."
            raise self.fields.error(self.key(BASE_SWA), f"it must agree with {BASE}={shown(own)}", shown(local), cure)

    def refuse_untaken(self, kind: str) -> None:
        """Every key about rotation must have been read, or change nothing."""
        known = {self.key(name) for name in (*_ALWAYS_READ, *_NEUTRAL)}
        for key, value in self.fields.config.items():
            if key in self.taken:
                continue
            if key in known:
                name = key.removeprefix(f"{self.architecture}.")
                if isinstance(value, bool) or value not in _NEUTRAL[name]:
                    must = f"it must not be given for {self.architecture} with scaling {kind!r}"
                    cure = (
                        "llama.cpp ignores it there, or does what no scheme says. Read the model's config.json "
                        f"instead. If it means nothing, pass ignore=({key!r},) to from_config, or {REMOVE}."
                    )
                    raise self.fields.error(key, must, shown(value), cure)
            elif key.rpartition(".")[2] in _TELLING or ROPE_WORDS.intersection(re.split(r"[._]", key.lower())):
                must = f"a key about rotation must be one that llama.cpp reads for {self.architecture}"
                cure = (
                    f"It would have no effect.{nearest(key, known)} To read the file, pass ignore=({key!r},) to "
                    f"from_config, or {REMOVE}."
                )
                raise self.fields.error(shown(key), must, shown(value), cure)


def _architecture(fields: Fields) -> tuple[str, GgufRow]:
    """The name of the architecture, and its row."""
    name = fields.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise fields.error(
            "general.architecture",
            "it must be a string",
            shown(name),
            "Is this a model? Of a model in several files, pass the first.",
        )
    row = ARCHITECTURES.get(name, UNKNOWN)
    if row.refusal:
        raise fields.error("general.architecture", "it must be one that turns as a Rope does", repr(name), row.refusal)
    return name, row
