"""`Keys`: a GGUF file with typed access to its keys, and errors for keys that llama.cpp does not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ropewalk._checks import argument, error, nearest, shown
from ropewalk.configs.gguf.header import FREQS, LONG, SHORT
from ropewalk.configs.gguf.row import (
    BASE,
    BASE_SWA,
    DIM,
    DIM_SWA,
    HEAD_MLA,
    HEAD_SWA,
    KV_HEADS,
    NOT_ALL_LAYERS,
    ORIGINAL,
    ROPE_PATTERN,
    SECTIONS,
    GgufRow,
)
from ropewalk.configs.reader import ROPE_WORDS, Fields
from ropewalk.configs.source import Request
from ropewalk.configs.tables.gguf import ROWS

ARCHITECTURES: dict[str, GgufRow] = {name: row for names, row in ROWS.items() for name in names.split()}
"""Maps the name of each architecture of llama.cpp to its row."""
# The row of an unknown architecture, for which the caller passes the pairing. All factor tensors are read.
UNKNOWN = GgufRow(None, freqs="read", longrope="by type")
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
_ALWAYS_READ = (DIM, BASE, "rope.scaling.type", ORIGINAL, "rope.scaling.finetuned")
_CONFIG = "Read the model's config.json instead."
REMOVE = "remove this key with gguf-new-metadata --remove-metadata, a command of the package gguf"
_ROPE_NAMES = frozenset({"attn_factor", "dimension_count", "freq_base", "original_context_length", "scale_linear"})


FACTOR, FORMER_FACTOR = "rope.scaling.factor", "rope.scale_linear"
_WHOLE_NAMES = ("general.", "split.", FREQS, SHORT, LONG)  # the names without the prefix of the architecture


class Keys(Fields):
    """A GGUF file. Names of keys are without the architecture prefix: "rope.freq_base" for "llama.rope.freq_base".

    Attributes:
        tensors: the factor tensors, by name.
        pairing: the argument `pairing` of from_config, or None.
        text_only: the argument `text_only` of from_config.
        architecture: the name of the architecture.
        row: the `GgufRow` of the architecture.
        original: rope.scaling.original_context_length, in tokens, or None.
        longest: context_length, in tokens, or None.
    """

    flag_types = (bool, int)
    flags = "booleans or counts"
    list_fix = missing_list_fix = "Convert the model again."
    further_key = "nextn_predict_layers"

    def __init__(
        self, values: Mapping[str, Any], source: str, tensors: Mapping[str, tuple[float, ...]], asked: Request
    ) -> None:
        super().__init__(values, source, base=asked.base)
        self.tensors = tensors
        self.pairing = asked.pairing
        self.text_only = asked.text_only
        self.architecture = ""
        self.architecture, self.row = self._architecture()
        self.read_keys |= {self.full(name) for name in _ALWAYS_READ}
        self.original = self.length(ORIGINAL)
        self.longest = self.length("context_length")

    def _architecture(self) -> tuple[str, GgufRow]:
        key = "general.architecture"
        name = self.get(key)
        if not isinstance(name, str) or not name:
            fix = "Pass the file of a model; if a model has several files, pass the first."
            raise self.error(key, "must be a string", shown(name), fix)
        row = ARCHITECTURES.get(name, UNKNOWN)
        if row.refusal:
            raise self.error(key, "must name a model that a Rope describes", repr(name), row.refusal)
        return name, row

    def full(self, key: str) -> str:
        """Return the name of a key with the architecture prefix, or the name of a tensor."""
        return key if key.startswith(_WHOLE_NAMES) else f"{self.architecture}.{key}"

    def _look_up(self, key: str) -> tuple[bool, Any]:
        self.read_keys.add(self.full(key))
        return self.full(key) in self.config, self.config.get(self.full(key))

    def number(self, key: str, *, above: float | None = None, at_least: float | None = None) -> float | None:
        """Return the value of the key as a number, or None if it is missing. The factor also has a former name."""
        value = super().number(key, above=above, at_least=at_least)
        former = super().number(FORMER_FACTOR, above=above, at_least=at_least) if key == FACTOR else None
        if value is not None and former is not None and value != former:
            fix = f"llama.cpp uses {FACTOR}: {REMOVE}."
            raise self.error(FORMER_FACTOR, f"must agree with {FACTOR}={value:g}", f"{former:g}", fix)
        return former if value is None else value

    def layer_list(self, key: str, count: int, longer: bool = False) -> list[Any] | None:
        """Return the value of the key as a list with one entry for each layer. The heads of k may be one number."""
        value = self.get(key)
        return [value] * count if key == KV_HEADS and type(value) is int else super().layer_list(key, count, longer)

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
            raise self.error(name, "must be given", "none", why)
        stated = FORMER_FACTOR if name == FACTOR and not self.has(FACTOR) else name
        self.origins[name.rpartition(".")[2]] = self.full(stated)
        return value

    def attention_factor(self) -> float:
        """Return rope.scaling.attn_factor, which multiplies cos and sin, or 1 if it is missing."""
        key = "rope.scaling.attn_factor"
        factor = self.number(key, above=0.0)
        if factor is not None:
            self.origins["attention_factor"] = self.full(key)
        return 1.0 if factor is None else factor

    def refuse_unsupported(self) -> None:
        """Raise a RopeError if the file has a key that llama.cpp reads only for other architectures."""
        specific_keys = self.row.specific_keys()
        self.read_keys |= {self.full(name) for name in specific_keys}
        for name, why in _SOMETIMES_READ.items():
            value = self.get(name)
            if name not in specific_keys and value is not None:
                fix = self.fix(why.format(ignore=argument("ignore", (self.full(name),))))
                raise self.error(name, "must not be given", shown(value), fix)
        local, own = self.get(BASE_SWA), self.get(BASE)
        self.read_keys.add(self.full(BASE_SWA))
        if BASE_SWA not in specific_keys and local not in (None, own):
            fix = self.fix(f"llama.cpp does not use it in {self.architecture}. {_CONFIG}")
            raise self.error(BASE_SWA, f"must agree with {BASE}={shown(own)}", shown(local), fix)

    def refuse_unused(self, kind: str) -> None:
        """Raise a RopeError if a key about rotation was not read, unless its value has no effect.

        `kind` is the type of the scaling, for the message.
        """
        known = {self.full(name) for name in (*_ALWAYS_READ, *_NEUTRAL)}
        for key, value in self.config.items():
            if key in self.read_keys:
                continue
            if key in known:
                name = key.removeprefix(f"{self.architecture}.")
                if isinstance(value, bool) or value not in _NEUTRAL[name]:
                    must = f"must not be given for {self.architecture} with scaling {kind!r}"
                    fix = (
                        f"llama.cpp ignores the key there, or uses it in a way that no scheme describes. {_CONFIG} "
                        f"If the key has no effect, pass {argument('ignore', (key,))}, or {REMOVE}."
                    )
                    raise self.error(name, must, shown(value), self.fix(fix))
            elif key.rpartition(".")[2] in _ROPE_NAMES or ROPE_WORDS.intersection(re.split(r"[._]", key.lower())):
                must = f"is about rotation and must be a key that ropewalk knows for {self.architecture}"
                fix = f"What llama.cpp does with it is not known here.{nearest(key, known)} {_CONFIG}"
                raise error(self.source, f"{shown(key)} {must}", shown(value), fix)

    def fix(self, text: str) -> str:
        """Return the fix for a key, or of an unknown architecture one that says nothing about what llama.cpp reads."""
        return text if self.row is not UNKNOWN else f"What llama.cpp does with it is not known here. {_CONFIG}"
