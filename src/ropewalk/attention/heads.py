"""The heads that the projections of an attention layer yield: all of the model, or those of one rank."""

from __future__ import annotations

from torch import Tensor

from ropewalk import _checks


def split_heads(
    who: str, q: Tensor, k: Tensor, v: Tensor, head_dim: int, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `[batch, seq, heads · head_dim]` → `[batch, seq, heads, head_dim]`.

    The widths give the numbers of heads, so that under tensor parallelism they are those of this rank.

    Args:
        who: the caller, for messages.
        num_heads, num_kv_heads: of the whole model.

    Raises:
        RopeError: a width is no multiple of head_dim, k and v have different widths, or query heads and key heads do
            not belong together.
    """
    fix = "Shard whole heads, e.g. with ropewalk.parallel.HeadwiseParallel."
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.shape[-1] or x.shape[-1] % head_dim:
            must = f"{name}_proj must yield whole heads, a multiple of head_dim={head_dim} channels"
            raise _checks.error(who, must, str(x.shape[-1]), fix)
    heads, kv_heads = q.shape[-1] // head_dim, k.shape[-1] // head_dim
    if v.shape[-1] != k.shape[-1]:
        must = "k_proj and v_proj must yield the same number of heads"
        raise _checks.error(who, must, f"{kv_heads} and {v.shape[-1] // head_dim}", fix)
    group = num_heads // num_kv_heads
    # Ranks may share a key head. Ranks with several have all queries of each: others would meet a wrong key head.
    if heads != group * kv_heads and not (kv_heads == 1 and heads < group):
        must = f"q_proj and k_proj must yield heads that belong together, {group} query heads for each key head"
        raise _checks.error(who, must, f"{heads} query heads and {kv_heads} key heads", fix)
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))  # type: ignore[no-untyped-call]
    return q, k, v
