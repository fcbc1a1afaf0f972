"""The length of the longest sequence that a comparison covers."""

from __future__ import annotations

from ropewalk import _checks
from ropewalk.configs.model_ropes import ModelRopes


def longest_of(who: str, length: int | None, *several: ModelRopes) -> int:
    """Return the length of the longest sequence to compare, in tokens.

    Args:
        who: the function that the user called, for the error message.
        length: the length that the user passed, or None for the longest of the lengths that the configs state and those
            of their scaled contexts. If frequencies change only beyond that length, it is doubled.
        several: the ropes of the configs.

    Raises:
        RopeError: no length is passed, and the configs state none.
    """
    if length is not None:
        return _checks.length(who, "length", length)
    lengths = [_doubled(longest, ropes) for ropes in several if (longest := stated_length(ropes)) is not None]
    if not lengths:
        stated = "the config does not state it" if len(several) == 1 else "neither config states it"
        must, fix = f"the length must be passed if {stated}", f"Pass {_checks.argument('length')}."
        raise _checks.error(several[0].source if len(several) == 1 else who, must, "none", fix)
    return max(lengths)


def stated_length(ropes: ModelRopes) -> int | None:
    """Return the longest length that a config states and that its ropes were made for, in tokens, or None."""
    longest, own = ropes.max_position_embeddings, ropes.trained_length
    schemes = {rope.scaling for rope in ropes.layers if rope is not None and rope.scaling is not None}
    if own is not None and not schemes and not (ropes.config or {}).get("dual_chunk_attention_config"):
        return longest if own < (longest or 0) < 1.5 * own else own  # 1.25 times in Qwen 3, 4 in nomic-embed-text
    # It is None for linear scaling, whose configs may state the length before or after it.
    scaled = [(getattr(scheme, "factor", None) or 0) * (scheme.trained_length(longest) or 0) for scheme in schemes]
    return max((round(n) for n in (longest, own, *scaled) if n), default=None)


def _doubled(longest: int, ropes: ModelRopes) -> int:
    changing = any(rope is not None and not rope.is_static for rope in ropes.layers)
    return 2 * longest if changing and ropes.trained_length == longest else longest
