"""Attention of the tokens that one rank holds over those of all ranks: keys and values are gathered."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks, positions
from ropewalk.attention.attend import rotate_and_attend
from ropewalk.attention.mask_tensors import check_mask, joined
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation.api import Rotation

_WHO = "ContextParallel"

# The same function; PyTorch before 2.13 has it under its old name only.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class ContextParallel:
    """Attention over a sequence of which each rank of a group holds some tokens, in any order.

    Make one for each forward pass, on every rank of the group, and hand it to every `RotaryAttention` as its cache: it
    is an `AttendingCache`. Each rank rotates its own queries and keys. The keys and values of all ranks are gathered,
    and each token sees those that stand before it in the sequence, and itself, whatever the order. Backwards, the
    gradients of keys and values are summed over the ranks and go back to the rank that holds the token.

    It runs on every device and backend. Gathering takes memory for the keys and values of the whole sequence in each
    layer, and the mask takes a byte for each pair of a token of this rank and a token of the sequence.

    Args:
        places: where the tokens of this rank stand in the sequence, from 0: `positions.context_parallel(seq, rank,
            size, order)`, or arange(seq) cut by the call that cut the tokens. int32 or int64 `[seq]`, the same number
            of tokens on every rank, on a device of the group's backend. No two tokens of the group have the same.
        group: the ranks that share the sequence, such as `mesh["cp"].get_group()`; None: the default group.
        cu_seqlens: of the whole sequence where it consists of packed documents, as in `positions.packed`: a token sees
            those of its own document only. On the device of places.

    Attributes:
        places: int64 `[seq]`.
        key_places: where the gathered keys stand in the sequence, int64 `[keys]`, keys = ranks · seq: rank after rank.

    Raises:
        RopeError: places or cu_seqlens is no such tensor, or this process is not in such a group.

    Example:
        >>> def forward(layers, x, rope, seq, rank, size):  # x [batch, seq / size, hidden]: the tokens of this rank
        ...     places = ropewalk.positions.context_parallel(seq, rank, size, "head-tail")
        ...     rotation, context = rope.at(places), ropewalk.parallel.ContextParallel(places)
        ...     for layer in layers:
        ...         x = x + layer(x, rotation, cache=context)
        ...     return x
    """

    def __init__(
        self, places: Tensor, group: dist.ProcessGroup | None = None, *, cu_seqlens: Tensor | None = None
    ) -> None:
        if not isinstance(places, Tensor) or places.dtype not in (torch.int32, torch.int64) or places.ndim != 1:
            fix = "Pass positions.context_parallel(seq, rank, size, order), without cu_seqlens."
            must = "places must be an int32 or int64 tensor [seq]"
            raise _checks.error(_WHO, must, _checks.described(places), fix)
        self._group = _checked(group)
        self.places = places.to(torch.int64).contiguous()
        gathered = [torch.empty_like(self.places) for _ in range(self._group.size())]
        dist.all_gather(gathered, self.places, group=self._group)
        self.key_places = torch.cat(gathered)
        seen = self.places[:, None] >= self.key_places
        if cu_seqlens is not None:
            place = positions.packed(cu_seqlens, self.key_places.shape[0])
            start = torch.arange(place.shape[0], device=place.device) - place
            seen = seen & (start[self.places][:, None] == start[self.key_places])
        self._seen = seen[None, None]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | TwoPass | None = None,
        mask: Tensor | BlockMask | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Rotate this rank's queries and keys, gather keys and values, and attend. Every rank must call it.

        Args:
            q: queries of this rank's tokens, `[batch, seq, heads, head_dim]`; kv_heads divides heads.
            k, v: their keys and values, `[batch, seq, kv_heads, head_dim]`.
            rotation: of this rank's tokens, `rope.at` of their positions; None: q and k are used as they are.
            mask: bool (True: seen) or additive in the dtype of q, `[batch, heads, seq, keys]`, each axis full or 1, for
                the keys of `key_places`. It narrows what each token sees: a sliding window is
                `(places[:, None] - key_places < window)[None, None]`.
            scale: of the scores; head_dim^(−1/2) when None.

        Returns:
            `[batch, seq, heads, head_dim]`.

        Raises:
            RopeError: the number of tokens is not that of places, rotation has two passes, or mask does not fit.
        """
        seq, keys = self._seen.shape[2:]
        if q.ndim != 4 or q.shape[1] != seq:
            must = f"q must have shape [batch, seq={seq}, heads, head_dim], a token for each of places"
            raise _checks.error(_WHO, must, f"shape {tuple(q.shape)}", "Make one for the tokens of this forward pass.")
        if isinstance(rotation, TwoPass):
            fix = "Pass rope.at(positions); Self-Extend needs all tokens on one rank."
            raise _checks.error(_WHO, "rotation must have one pass", "one in two passes", fix)
        if mask is not None and not isinstance(mask, Tensor):
            fix = "Pass a dense mask, for the keys of key_places."
            raise _checks.error(_WHO, "mask must be a tensor or None", type(mask).__name__, fix)
        if mask is not None:
            check_mask(_WHO, mask, q, keys)
        return rotate_and_attend(
            q,
            k,
            v,
            rotation=rotation,
            mask=joined(mask, self._seen),
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            append=lambda k, v: (self._gathered(k), self._gathered(v)),
        )

    def _gathered(self, x: Tensor) -> Tensor:
        """`[batch, seq, kv_heads, head_dim]` of this rank → `[batch, keys, kv_heads, head_dim]`."""
        gathered: Tensor = _gather(x.contiguous(), 1, self._group)
        return gathered


def _checked(group: object) -> dist.ProcessGroup:
    """The group, or the default group for None, of which this process is a part."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        must = "group must be a process group that this process is in, or None where there is a default group"
        fix = "Call torch.distributed.init_process_group, or pass mesh['cp'].get_group()."
        raise _checks.error(_WHO, must, _checks.shown(group), fix)
    return group
