"""Read the rope of the indexer, a second attention in each layer of DeepSeek-V3.2 and later models."""

from __future__ import annotations

from typing import Any, cast

from ropewalk._checks import RopeError, with_context
from ropewalk.configs.reader import Reader
from ropewalk.rope.rope import Pairing, Rope


def read_indexer(c: Reader, rope: Rope, pairing: str, *, rotates_tail: bool, source: str) -> dict[str, Rope]:
    """Return the rope of the indexer, a second attention in each layer of DeepSeek-V3.2 and later models.

    Args:
        c: the reader of the config.
        rope: the rope of the layer's q and k. The indexer rotates the same number of channels at the same frequencies.
        pairing: the indexer's pairing in the model's own code. The key `indexer_rope_interleave` overrides it.
        rotates_tail: whether the last channels of the indexer's head rotate instead of the first.
        source: the model_type and the code that defines its indexer, for messages.

    Returns:
        {"indexer": rope}, or an empty dict if the config has no index_head_dim.
    """
    if not c.has("index_head_dim"):
        return {}
    width = c.channels("index_head_dim")
    c.origins["indexer"] = f"index_head_dim and model_type {source}"
    key = "indexer_rope_interleave"
    if c.has(key):
        config_pairing = "interleaved" if c.boolean(key, True) else "half"
        c.origins["indexer"] = f"index_head_dim and {key}"
        if config_pairing != pairing:
            c.warnings.append(
                f"{key} sets the pairing of the indexer to {config_pairing!r}, but it is {pairing!r} in {source}."
            )
        pairing = config_pairing
    offset = max(width - rope.rotary_dim, 0) if rotates_tail else 0
    try:
        sizes: dict[str, Any] = {"rotary_dim": rope.rotary_dim, "rotary_offset": offset}
        indexer = Rope(width, rope.base, cast(Pairing, pairing), scaling=rope.scaling, **sizes)
    except RopeError as e:
        raise with_context(f"{c.source}: index_head_dim", e) from None
    return {"indexer": indexer}
