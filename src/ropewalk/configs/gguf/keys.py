"""`Keys`: typed access to the keys of a GGUF file, and errors for keys about rotation that llama.cpp does not read."""

from __future__ import annotations

import re
from typing import Any

from ropewalk._checks import argument, nearest, shown
from ropewalk._checks import length as checked_length
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

# Keys that llama.cpp reads only for some architectures: maps them to the fix in the error for other architectures.
_SOMETIMES_READ = {
    DIM_SWA: "Sliding-window layers that rotate other channels are not supported yet.",
    HEAD_SWA: "Sliding-window layers with another head size are not supported yet.",
    HEAD_MLA: "Multi-head latent attention is not supported yet for this architecture.",
    ROPE_PATTERN: NOT_ALL_LAYERS,
    "attention.compress_rope_freq_base": NOT_ALL_LAYERS,
    SECTIONS: "llama.cpp reads it only for architectures with several axes, such as qwen2vl, qwen3vl, glm4 and "
    "hunyuan_vl. Check general.architecture. If the key has no effect, pass {ignore}.",
}
# Maps keys to the values that have no effect, which are accepted even if llama.cpp does not read the key.
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
_ROPE_NAMES = frozenset({"attn_factor", "dimension_count", "freq_base", "original_context_length", "scale_linear"})


class Keys:
    """The keys of one file. The methods take key names without the architecture prefix, e.g. "rope.freq_base".

    Attributes:
        fields: the keys and values, with full names, e.g. "llama.rope.freq_base".
        origins: maps the name of a value, such as "base", to the key that it came from.
        warnings: sentences for the user.
        architecture: the name of the architecture.
        row: the `GgufRow` of the architecture.
        used: the full names of the keys that have been read.
        original: rope.scaling.original_context_length, in tokens, or None.
        longest: context_length, in tokens, or None.
    """

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []
        self.architecture, self.row = _architecture(fields)
        self.used = {self.key(name) for name in _ALWAYS_READ}
        self.original = self.length(ORIGINAL)
        self.longest = self.length("context_length")

    def key(self, name: str) -> str:
        """Return the full name of a key, with the architecture prefix."""
        return f"{self.architecture}.{name}"

    def number(self, name: str, *, above: float | None = None, at_least: float | None = None) -> float | None:
        """Return the value of a key as a number, or None if it is missing. Mark the key as used."""
        key = self.key(name)
        self.used.add(key)
        if not self.fields.has(key):
            return None
        return checked_number(self.fields.source, key, self.fields.get(key), above=above, at_least=at_least)

    def length(self, name: str) -> int | None:
        """Return the value of a key as a number of tokens, or None if it is missing."""
        key = self.key(name)
        return checked_length(self.fields.source, key, self.fields.get(key)) if self.fields.has(key) else None

    def require(self, name: str, value: float | None, why: str) -> Any:
        """Return the value of a key and record the key as its origin.

        Args:
            name: the key.
            value: its value, or None if it is missing.
            why: why it is required, for the message.

        Raises:
            RopeError: the value is None.
        """
        if value is None:
            raise self.fields.error(self.key(name), "must be given", "none", why)
        self.origins[name.rpartition(".")[2]] = self.key(name)
        return value

    def refuse_unsupported(self) -> None:
        """Raise a RopeError if the file has a key that llama.cpp reads only for other architectures."""
        specific_keys = self.row.specific_keys()
        self.used |= {self.key(name) for name in specific_keys}
        for name, why in _SOMETIMES_READ.items():
            value = self.fields.get(self.key(name))
            if name not in specific_keys and value is not None:
                fix = why.format(ignore=argument("ignore", (self.key(name),)))
                raise self.fields.error(self.key(name), "must not be given", shown(value), fix)
        local, own = self.fields.get(self.key(BASE_SWA)), self.fields.get(self.key(BASE))
        self.used.add(self.key(BASE_SWA))
        if BASE_SWA not in specific_keys and local not in (None, own):
            fix = f"llama.cpp does not use it in {self.architecture}. Read the model's config.json instead."
            raise self.fields.error(self.key(BASE_SWA), f"must agree with {BASE}={shown(own)}", shown(local), fix)

    def refuse_unused(self, kind: str) -> None:
        """Raise a RopeError if a key about rotation was not read, unless its value has no effect.

        `kind` is the type of the scaling, for the message.
        """
        known = {self.key(name) for name in (*_ALWAYS_READ, *_NEUTRAL)}
        for key, value in self.fields.config.items():
            if key in self.used:
                continue
            if key in known:
                name = key.removeprefix(f"{self.architecture}.")
                if isinstance(value, bool) or value not in _NEUTRAL[name]:
                    must = f"must not be given for {self.architecture} with scaling {kind!r}"
                    fix = (
                        "llama.cpp ignores the key there, or uses it in a way that no scheme describes. Read the "
                        "model's config.json instead. If the key has no effect, pass "
                        f"{argument('ignore', (key,))}, or {REMOVE}."
                    )
                    raise self.fields.error(key, must, shown(value), fix)
            elif key.rpartition(".")[2] in _ROPE_NAMES or ROPE_WORDS.intersection(re.split(r"[._]", key.lower())):
                must = f"is about rotation and must be a key that llama.cpp reads for {self.architecture}"
                fix = (
                    f"It would have no effect.{nearest(key, known)} To read the file, pass "
                    f"{argument('ignore', (key,))}, or {REMOVE}."
                )
                raise self.fields.error(shown(key), must, shown(value), fix)


def _architecture(fields: Fields) -> tuple[str, GgufRow]:
    """Return the name of the architecture and its `GgufRow`."""
    name = fields.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise fields.error(
            "general.architecture",
            "must be a string",
            shown(name),
            "Pass the file of a model; if a model has several files, pass the first.",
        )
    row = ARCHITECTURES.get(name, UNKNOWN)
    if row.refusal:
        raise fields.error("general.architecture", "must name a model that a Rope describes", repr(name), row.refusal)
    return name, row
