"""Keys about rotation that nothing read: how a model breaks. Found by tracking, not by a list of what may be there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ropewalk._checks import RopeError, nearest, shown
from ropewalk.configs.fields import ROPE_WORDS, Fields
from ropewalk.configs.reader import SECTIONS, TRAINED

# Parameters of schemes that have no meaning at the top of a config.
_MISPLACED = frozenset(
    {"attention_factor", "beta_fast", "beta_slow", "high_freq_factor", "long_factor", "low_freq_factor", "mscale",
     "mscale_all_dim", "rope_type", "short_factor"}
)  # fmt: skip
# Keys that other keys are misspelt into.
_LIKELY = (*SECTIONS, "rope_theta", "partial_rotary_factor", "head_dim", "max_position_embeddings", TRAINED)
# Sizes that look like misspelt ones: of heads of values, and of heads where only a part is described here.
_SIZES = frozenset({"head_dim", "v_head_dim", "qk_head_dim", "max_position_embeddings"})
# Far above any config: each key that is not known is compared with those it may be misspelt from.
_MAX_KEYS = 4096


def bounded(fields: Fields) -> None:
    """Raise where a config has more keys than any."""
    if len(fields.config) > _MAX_KEYS:
        raise fields.error("a config", f"it must have at most {_MAX_KEYS} keys", "more", "Is this a config?")


def refuse(fields: Fields, idle: Mapping[str, str], known: Collection[str]) -> list[str]:
    """Raise where a key about rotation was not read; warnings for those known to have no effect.

    Args:
        fields: the config, after all that decides rotation was read.
        idle: keys known to have no effect in the model's own code → why.
        known: keys that the model may ask for, though no layer of this config needed them.
    """
    warnings = []
    for key, value in fields.config.items():
        if key in fields.read or key in _SIZES or key in known or value is None:
            continue
        if key in idle:
            warnings.append(f"{key} has no effect: {idle[key]}.")
        elif _is_about_rotation(str(key)):
            raise _stray(fields, key, value)
    return warnings


def refuse_misspelt(fields: Fields, known: Iterable[str]) -> None:
    """Raise where an unread key looks like a misspelt one: called when reading failed, it says why more truly.

    `known` are keys that some model reads: the failure may be the reason why they were not.
    """
    spelt = {*known, *_SIZES, *_LIKELY}
    for key, value in fields.config.items():
        if (
            value is not None
            and key not in fields.read
            and key not in spelt
            and nearest(str(key), _LIKELY, likeness=0.8)
        ):
            raise _stray(fields, key, value)


def says_rope(key: str) -> bool:
    """Whether a key speaks of rotation by its name."""
    words = key.lower().split("_")
    return bool(ROPE_WORDS.intersection(words) or words[0].startswith("rope"))


def _is_about_rotation(key: str) -> bool:
    return bool(says_rope(key) or key in _MISPLACED or nearest(key, _LIKELY, likeness=0.8))


def _stray(fields: Fields, key: object, value: Any) -> RopeError:
    candidates = sorted({*(k for k in fields.read if "." not in k), *_LIKELY} - {"", str(key)})
    meant = nearest(str(key), candidates)
    name = f"{fields.path}{key}"
    cure = f"ropewalk reads no such key of it.{meant}"
    if len(name) <= 100:
        cure += (
            f" If the model's own code does not read it, pass ignore=({name!r},) to from_config, or --ignore on the "
        )
        cure += "command line."
    must = "a key about rotation must be one that this model_type reads"
    return fields.error(shown(key), must, shown(value), cure)
