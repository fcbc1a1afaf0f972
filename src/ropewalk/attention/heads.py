"""Split the outputs of q_proj, k_proj and v_proj into heads, for a whole model or one rank of tensor parallelism."""

from __future__ import annotations

from torch import Tensor

from ropewalk import _checks


def split_heads(
    who: str, q: Tensor, k: Tensor, v: Tensor, head_dim: int, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape q, k and v from `[batch, seq, heads · head_dim]` to `[batch, seq, heads, head_dim]`.

    The number of heads is computed from the width. Under tensor parallelism it is thus the number on this rank.

    Args:
        who: the caller, for error messages.
        num_heads, num_kv_heads: numbers of heads of the whole model.

    Raises:
        RopeError: a width is not a multiple of head_dim, k and v have different widths, or the ratio of query heads to
            key heads differs from that of the model.
    """
    fix = "Shard whole heads, e.g. with ropewalk.parallel.HeadwiseParallel."
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.shape[-1] or x.shape[-1] % head_dim:
            must = f"{name}_proj must return whole heads, a multiple of head_dim={head_dim} channels"
            raise _checks.error(who, must, str(x.shape[-1]), fix)
    heads, kv_heads = q.shape[-1] // head_dim, k.shape[-1] // head_dim
    if v.shape[-1] != k.shape[-1]:
        must = "k_proj and v_proj must return the same number of heads"
        raise _checks.error(who, must, f"{kv_heads} and {v.shape[-1] // head_dim}", fix)
    group = num_heads // num_kv_heads
    # Ranks may share one key head. A rank with several key heads needs all query heads of each of them; otherwise
    # attention would pair query heads with the wrong key heads.
    if heads != group * kv_heads and not (kv_heads == 1 and heads < group):
        must = f"q_proj and k_proj must return matching heads, {group} query heads for each key head"
        raise _checks.error(who, must, f"{heads} query heads and {kv_heads} key heads", fix)
    shape = (-1, head_dim)
    return q.unflatten(-1, shape), k.unflatten(-1, shape), v.unflatten(-1, shape)  # type: ignore[no-untyped-call]
