"""Context parallelism: each rank attends with its own queries over the gathered keys and values of all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks, positions
from ropewalk.attention.attend import rotate_and_attend
from ropewalk.attention.mask_tensors import check_mask, restrict
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation.api import Rotation

_WHO = "ContextParallel"

# The first name is that of PyTorch 2.13 and later, the second that of earlier versions. The function is the same.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class ContextParallel:
    """Causal attention over a sequence whose tokens are distributed over the ranks of a group, in any order.

    Create one for each forward pass on every rank of the group, and pass it to every `RotaryAttention` as its cache: it
    is an `AttendingCache`. Each rank rotates its own queries and keys. The keys and values of all ranks are gathered,
    and each token attends to itself and to the tokens before it in the sequence. In the backward pass, the gradients of
    keys and values are summed over the ranks and returned to the rank that holds the token.

    Every device and backend is supported. Gathering needs memory for the keys and values of the whole sequence in each
    layer. For each pair of a token of this rank and a token of the sequence, the mask needs one byte, and once for all
    layers a number in the dtype of q. If `attend` gets a mask, each layer may keep such a number until its backward
    pass.

    Args:
        places: indices of this rank's tokens in the whole sequence, int32 or int64 `[seq]`, on a device of the group's
            backend: the result of `positions.context_parallel`, or arange(keys) split in the same way as the tokens.
            Here seq is the number of tokens of this rank, and keys that of the whole sequence. Every rank must have the
            same number of tokens, and the ranks together must have each index from 0 to keys - 1 once. If places are on
            the CPU, every rank checks both conditions. On a CUDA device, wrong places trigger an assertion of the
            device, but the numbers of tokens are not checked, because reading them would synchronize with the device.
        group: the ranks that share the sequence, such as `mesh["cp"].get_group()`. None means the default group.
        cu_seqlens: boundaries of packed documents in the whole sequence, as in `positions.packed`, on the device of
            places. A token then attends only to its own document. None means a single document.

    Attributes:
        places: int64 `[seq]`.
        key_places: indices of the gathered keys in the sequence, rank by rank, int64 `[keys]`, keys = ranks · seq.

    Raises:
        RopeError: places or cu_seqlens has a wrong type or shape, or this process does not belong to the group. On the
            CPU also: the ranks have different numbers of tokens, or do not have each index of the sequence once; or
            cu_seqlens decreases or exceeds the sequence. Tokens after its end (padding) form a separate document.

    Examples:
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
            fix = "Pass positions.context_parallel(seq, rank, size, order) without its argument cu_seqlens."
            must = "places must be an int32 or int64 tensor [seq]"
            raise _checks.error(_WHO, must, _checks.describe(places), fix)
        self._group = _resolve_group(group)
        self.places = places.to(torch.int64).contiguous()
        if self.places.is_cpu:
            _check_counts(_gather_all(torch.tensor([self.places.shape[0]], device="cpu"), self._group))
        self.key_places = _gather_all(self.places, self._group)
        _check_places(self.key_places)
        visible = self.places[:, None] >= self.key_places
        if cu_seqlens is not None:
            place = positions.packed(cu_seqlens, self.key_places.shape[0])
            start = torch.arange(place.shape[0], device=place.device) - place
            visible = visible & (start[self.places][:, None] == start[self.key_places])
        self._visible = visible[None, None]
        self._additive: Tensor | None = None

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
        """Rotate this rank's queries and keys, gather keys and values, and attend. Every rank must call this method.

        Args:
            q: queries of this rank's tokens, `[batch, seq, heads, head_dim]`; kv_heads divides heads.
            k, v: keys and values of the same tokens, `[batch, seq, kv_heads, head_dim]`.
            rotation: rotation of this rank's tokens: `rope.at` of their positions. None leaves q and k unchanged.
            mask: tensor `[batch, heads, seq, keys]`, each axis of full size or 1, for the keys of `key_places`: bool
                (True: the query attends to the key) or additive in the dtype of q. It is combined with the causal
                mask; for a sliding window pass `(places[:, None] - key_places < window)[None, None]`.
            scale: factor of the scores. None means head_dim^(−1/2).

        Returns:
            `[batch, seq, heads, head_dim]`.

        Raises:
            RopeError: the number of tokens differs from that of places, rotation has two passes, or mask has a wrong
                type, dtype or shape.
        """
        seq, keys = self._visible.shape[2:]
        if q.ndim != 4 or q.shape[1] != seq:
            must = f"q must have shape [batch, seq={seq}, heads, head_dim], a token for each of places"
            fix = "Create a ContextParallel for the tokens of this forward pass."
            raise _checks.error(_WHO, must, f"shape {tuple(q.shape)}", fix)
        if rotation is not None and rotation.passes == 2:
            fix = "Pass rope.at(positions). Self-Extend needs all tokens on one rank."
            raise _checks.error(_WHO, "rotation must have one pass", "a rotation with two passes", fix)
        if mask is not None and not isinstance(mask, Tensor):
            fix = "Pass a dense mask for the keys of key_places."
            raise _checks.error(_WHO, "mask must be a tensor or None", type(mask).__name__, fix)
        if mask is not None:
            check_mask(_WHO, mask, q, keys)
        return rotate_and_attend(
            q,
            k,
            v,
            rotation=rotation,
            mask=self._causal_mask(q.dtype) if mask is None else restrict(mask, self._visible),
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            append=lambda k, v: (self._gather_keys(k), self._gather_keys(v)),
        )

    def _causal_mask(self, dtype: torch.dtype) -> Tensor:
        """Return the causal mask in the dtype of q, the same tensor in each layer.

        PyTorch converts a bool mask to this dtype in each call and keeps the copy until the backward pass.
        """
        if torch.compiler.is_compiling():  # layers compiled separately would need a second graph for the first of them
            return self._visible
        if self._additive is None or self._additive.dtype != dtype:
            zeros = torch.zeros_like(self._visible, dtype=dtype)
            self._additive = zeros.masked_fill_(~self._visible, -math.inf)
        return self._additive

    def _gather_keys(self, x: Tensor) -> Tensor:
        """Gather keys or values `[batch, seq, kv_heads, head_dim]` of all ranks along the axis of tokens."""
        gathered: Tensor = _gather(x.contiguous(), 1, self._group)
        return gathered


def _gather_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tensors `[n]` of all ranks into one tensor, in the order of the ranks."""
    gathered = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(gathered, x, group=group)
    return torch.cat(gathered)


def _check_counts(counts: Tensor) -> None:
    """Raise unless every rank has the same number of tokens."""
    if (counts != counts[0]).any():
        must, got = "every rank must have the same number of tokens", f"{counts.tolist()} from rank 0 on"
        raise _checks.error(_WHO, must, got, "Pad the sequence, then split it with positions.context_parallel.")


def _check_places(places: Tensor) -> None:
    """Raise unless the places of all ranks are 0 to keys - 1, each once. On CUDA, the device asserts this later."""
    keys = places.shape[0]
    is_expected = places.sort().values == torch.arange(keys, device=places.device)
    if places.is_cuda:
        torch._assert_async(is_expected.all(), f"{_WHO}: the places of all ranks must be 0 to {keys - 1}, each once")
    elif places.is_cpu and not is_expected.all():
        outside = places[(places < 0) | (places >= keys)].tolist()
        repeated = (torch.bincount(places, minlength=keys) > 1).nonzero().flatten().tolist() if not outside else []
        raise _checks.error(
            _WHO,
            f"the places of all ranks together must be 0 to {keys - 1}, each once",
            f"place {outside[0]}" if outside else f"place {repeated[0]} more than once",
            "On each rank, pass positions.context_parallel(seq, rank, size, order) with that rank's number and without "
            "cu_seqlens: positions that start again in each document are for the rotation.",
        )


def _resolve_group(group: object) -> dist.ProcessGroup:
    """Return the group, or the default group for None; raise unless this process belongs to it."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        must = "group must be a process group of this process, or None if there is a default group"
        fix = "Call torch.distributed.init_process_group, or pass mesh['cp'].get_group()."
        raise _checks.error(_WHO, must, _checks.shown(group), fix)
    return group
