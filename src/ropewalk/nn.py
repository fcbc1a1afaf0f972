"""Modules: thin joins of a Rope and the rotation, for those who build models from modules."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation


class RotaryEmbedding(torch.nn.Module):
    """Turn q and k at explicit positions.

    No parameters, no buffers, nothing in `state_dict`: its only state is the Rope, plain numbers that `.half()`,
    `.to()`, meta initialisation and FSDP cannot touch. In a deep model, call `rope.at(positions)` once and hand the
    rotation to every layer instead: this module makes the angles at each call.

    Args:
        rope: how fast each pair turns.
        layout: "bshd", "bhsd", "sbhd" or "thd": the order of the axes of q and k.

    Raises:
        RopeError: rope is no Rope, or layout is unknown.

    Example:
        >>> embed = RotaryEmbedding(Rope(head_dim=4, base=10_000.0, pairing="half"), layout="bshd")
        >>> q, k = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 1, 4)
        >>> q, k = embed(q, k, torch.arange(3))
        >>> q.shape, k.shape
        (torch.Size([1, 3, 2, 4]), torch.Size([1, 3, 1, 4]))
    """

    def __init__(self, rope: Rope, *, layout: str) -> None:
        super().__init__()
        if not isinstance(rope, Rope):
            raise _checks.error(
                "RotaryEmbedding",
                "rope must be a Rope",
                _checks.shown(rope),
                "Read a model's with from_config(...).rope.",
            )
        _checks.choice("RotaryEmbedding", "layout", layout, _checks.LAYOUTS)
        self.rope = rope
        self.layout = layout

    def forward(self, q: Tensor, k: Tensor | None, positions: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """`rope.at(positions)(q, k, layout=layout)` on the device of q; see there for arguments and errors.

        With k None, one tensor comes back.
        """
        rotation = self.rope.at(positions, device=q.device)
        return rotation(q, layout=self.layout) if k is None else rotation(q, k, layout=self.layout)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.rope!r}, layout={self.layout!r}"


class RotaryAttention(torch.nn.Module):
    """Causal multi-head attention as in Llama: q, k and v projected, q and k turned, attention, projected back.

    Parameters have the names of Hugging Face's Llama attention (`q_proj`, `k_proj`, `v_proj`, `o_proj`; `q_norm`,
    `k_norm` as in Qwen 3), so its weights load as they are.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.q_proj = torch.nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = torch.nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = torch.nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = torch.nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """x `[batch, seq, hidden_size]` → the same shape; rotation None: a layer that does not rotate."""
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        if rotation is not None:
            q, k = rotation(q, k, layout="bshd")
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))
