"""Refuse config keys about rotation that were not read.

`Fields` records which keys are read, so no list of allowed keys is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ropewalk._checks import RopeError, argument, nearest, shown
from ropewalk.configs.reader import ROPE_WORDS, SECTIONS, TRAINED, Fields

# Parameters of schemes, which have no meaning at the top level of a config.
_MISPLACED = frozenset(
    {"attention_factor", "beta_fast", "beta_slow", "high_freq_factor", "long_factor", "low_freq_factor", "mscale",
     "mscale_all_dim", "rope_type", "short_factor"}
)  # fmt: skip
# Keys that are likely to be misspelt.
_LIKELY = (*SECTIONS, "rope_theta", "partial_rotary_factor", "head_dim", "max_position_embeddings", TRAINED)
# Valid keys that resemble misspelt ones: the head size of v, and that of whole heads of which a part rotates.
_SIZES = frozenset({"head_dim", "v_head_dim", "qk_head_dim", "max_position_embeddings"})
# More than any config has. The bound limits the time to compare unknown keys with likely ones.
_MAX_KEYS = 4096


def check_size(fields: Fields) -> None:
    """Raise a RopeError if a config has too many keys."""
    if len(fields.config) > _MAX_KEYS:
        raise fields.error("a config", f"must have at most {_MAX_KEYS} keys", "more", "Pass a model's config.json.")


def refuse(fields: Fields, keys_without_effect: Mapping[str, str], known: Collection[str]) -> list[str]:
    """Raise a RopeError if a key about rotation was not read.

    Args:
        fields: the config, from which everything that defines rotation has been read.
        keys_without_effect: maps keys that have no effect in the model's own code to the reason.
        known: keys that are valid for the model_type even if they were not read.

    Returns:
        A warning for each key of `keys_without_effect` in the config.
    """
    warnings = []
    for key, value in fields.config.items():
        if key in fields.read_keys or key in _SIZES or key in known or value is None:
            continue
        if key in keys_without_effect:
            warnings.append(f"{key} has no effect: {keys_without_effect[key]}.")
        elif _is_about_rotation(str(key)):
            raise _unread_key_error(fields, key, value)
    return warnings


def refuse_misspelt(fields: Fields, known: Iterable[str]) -> None:
    """Raise a RopeError if a key that was not read looks misspelt.

    This function is called after reading has failed, because a misspelt key is a likely cause.

    Args:
        fields: the config.
        known: keys that at least one model reads. They are never reported as misspelt.
    """
    valid = {*known, *_SIZES, *_LIKELY}
    for key, value in fields.config.items():
        if (
            value is not None
            and key not in fields.read_keys
            and key not in valid
            and nearest(str(key), _LIKELY, likeness=0.8)
        ):
            raise _unread_key_error(fields, key, value)


def mentions_rope(key: str) -> bool:
    """Whether the name of a key refers to rotation."""
    words = key.lower().split("_")
    return bool(ROPE_WORDS.intersection(words) or words[0].startswith("rope"))


def _is_about_rotation(key: str) -> bool:
    return bool(mentions_rope(key) or key in _MISPLACED or nearest(key, _LIKELY, likeness=0.8))


def _unread_key_error(fields: Fields, key: object, value: Any) -> RopeError:
    candidates = sorted({*(k for k in fields.read_keys if "." not in k), *_LIKELY} - {"", str(key)})
    name = f"{fields.path}{key}"
    fix = f"ropewalk knows no such key of this model.{nearest(str(key), candidates)}"
    if len(name) <= 100:
        fix += f" If the model's own code does not read it either, pass {argument('ignore', (name,))}."
    must = "is about rotation and must be a key that this model_type reads"
    e = fields.error(shown(key), must, shown(value), fix)
    e.unread_key = name
    return e
