"""Modules: thin joins of a Rope and the rotation, for those who build models from modules."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk._dtensor import local_weight
from ropewalk._layout import AXES, Layout
from ropewalk.attention import attend as attention
from ropewalk.attention import masks
from ropewalk.attention.attend import AttendingCache
from ropewalk.attention.heads import split_heads
from ropewalk.attention.layer_cache import LayerCache
from ropewalk.attention.mask_tensors import causal as causal_mask
from ropewalk.attention.mask_tensors import check_mask, joined
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm
from ropewalk.rotation.reference import rms_norm


class RotaryEmbedding(torch.nn.Module):
    """Rotate q and k at explicit positions.

    No parameters, no buffers, nothing in `state_dict`: its only state is the Rope, plain numbers that `.half()`,
    `.to()`, meta initialisation and FSDP cannot touch. In a deep model, call `rope.at(positions)` once and hand the
    rotation to every layer instead: this module makes the angles at each call.

    Args:
        rope: how fast each pair rotates.
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

    def __init__(self, rope: Rope, *, layout: Layout) -> None:
        super().__init__()
        if not isinstance(rope, Rope):
            raise _checks.error(
                "RotaryEmbedding",
                "rope must be a Rope",
                _checks.shown(rope),
                "Read a model's with from_config(...).rope.",
            )
        _checks.choice("RotaryEmbedding", "layout", layout, AXES)
        self.rope = rope
        self.layout = layout

    def forward(self, q: Tensor, k: Tensor | None, positions: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """`rope.at(positions)(q, k, layout=layout)` on the device of q; see there for arguments and errors.

        positions have a row for each axis where the rope has `axes`. With k None, one tensor comes back.
        """
        rotation = self.rope.at(positions, device=q.device)
        return rotation(q, layout=self.layout) if k is None else rotation(q, k, layout=self.layout)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.rope!r}, layout={self.layout!r}"


class HeadNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over the channels of each head, with the bits of `QKNorm`: its mean is made in float64."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., head_dim]`, normed, in the dtype of x."""
        return rms_norm(x, local_weight(self.weight, x), eps=cast(float, self.eps))


_any_global_hook: Any = torch.nn.modules.module._has_any_global_hook


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether somebody wants to see it called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _any_global_hook()
    )


class RotaryAttention(torch.nn.Module):
    """Multi-head attention as in Llama: q, k and v projected, q and k rotated, attention, projected back.

    Parameters have the names of Hugging Face's Llama attention (`q_proj`, `k_proj`, `v_proj`, `o_proj`; `q_norm`,
    `k_norm` as in Qwen 3), so its weights load as they are. The rope is not part of it: whoever runs the layers makes
    one rotation for each forward pass and hands it to all of them.

    Args:
        hidden_size: channels of the model.
        num_heads: heads of queries, in the whole model: tensor parallelism does not change it.
        num_kv_heads: heads of keys and values, likewise; a divisor of num_heads (GQA; 1 is MQA); num_heads when None.
        head_dim: channels of a head; hidden_size / num_heads when None.
        bias: whether the projections of q, k and v have one (Qwen 2).
        o_bias: whether the projection of the output has one (with bias: `attention_bias` of Hugging Face's Llama).
        qk_norm: ε of an RMSNorm over the channels of each head of q and k, before rotation (Qwen 3); None: none.
        softmax_factor: multiplies the softmax scale head_dim^(−1/2), dimensionless: `ModelRopes.softmax_factor`.
        causal: whether a token sees only the tokens before it and itself. False for encoders, which have no cache.
        window: a token sees itself and the window − 1 tokens before it, and with causal False also the window − 1 after
            it; None: all. With a `KVCache` that keeps more tokens, those that are too old are masked.
        dropout: probability with which each attention weight is set to 0 in training mode, 0 ≤ dropout ≤ 1.

    Raises:
        RopeError: a number is impossible, or heads do not divide.

    Example:
        >>> attention = RotaryAttention(hidden_size=8, num_heads=2, num_kv_heads=1)
        >>> rotation = Rope(head_dim=4, base=10_000.0, pairing="half").at(torch.arange(3))
        >>> attention(torch.ones(1, 3, 8), rotation).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        o_bias: bool = False,
        qk_norm: float | None = None,
        softmax_factor: float = 1.0,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        who = "RotaryAttention"
        self.hidden_size = _checks.integer(who, "hidden_size", hidden_size, at_least=1)
        self.num_heads = _checks.integer(who, "num_heads", num_heads, at_least=1)
        self.num_kv_heads = (
            self.num_heads if num_kv_heads is None else _checks.integer(who, "num_kv_heads", num_kv_heads, at_least=1)
        )
        if self.num_heads % self.num_kv_heads:
            raise _checks.error(
                who,
                "num_kv_heads must divide num_heads, since each of them serves as many query heads",
                f"{self.num_kv_heads} for {self.num_heads}",
                "Pass a divisor.",
            )
        if head_dim is None and self.hidden_size % self.num_heads:
            raise _checks.error(
                who,
                "num_heads must divide hidden_size, or head_dim be given",
                f"{self.num_heads} for {self.hidden_size}",
                "Pass head_dim as the model has it.",
            )
        self.head_dim = (
            self.hidden_size // self.num_heads
            if head_dim is None
            else _checks.integer(who, "head_dim", head_dim, at_least=1, at_most=_checks.MAX_HEAD_DIM)
        )
        self.softmax_factor = _checks.number(who, "softmax_factor", softmax_factor, above=0.0)
        if not isinstance(causal, bool):
            raise _checks.error(who, "causal must be True or False", _checks.shown(causal), "Pass one of them.")
        self.causal = causal
        self.window = None if window is None else _checks.length(who, "window", window)
        self.dropout = _checks.number(who, "dropout", dropout, at_least=0.0, at_most=1.0)
        kv_width = self.num_kv_heads * self.head_dim
        self.q_proj = torch.nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = torch.nn.Linear(hidden_size, kv_width, bias=bias)
        self.v_proj = torch.nn.Linear(hidden_size, kv_width, bias=bias)
        self.o_proj = torch.nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=o_bias)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            eps = _checks.number(who, "qk_norm", qk_norm, above=0.0, cure="Pass the ε of the norm, e.g. 1e-6.")
            self.q_norm, self.k_norm = HeadNorm(self.head_dim, eps=eps), HeadNorm(self.head_dim, eps=eps)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | TwoPass | None,
        *,
        mask: Tensor | BlockMask | None = None,
        cache: AttendingCache | None = None,
    ) -> Tensor:
        """Attention of each token to those that it sees: those before it and itself, unless causal is False.

        Args:
            x: `[batch, seq, hidden_size]`.
            rotation: of exactly these tokens: `rope.at(positions)`, `step.rotation(rope)` with a cache, or
                `SelfExtend.at(...)`. None: this layer does not rotate. With a cache, it must be made for the positions
                `[batch, seq]` of that step, and anew for each step.
            mask: narrows causality: bool (True: seen) or additive in the dtype of x (any under autocast, which casts
                it), four axes `[batch, heads, seq, keys]`, each of full size or 1; fewer axes could be read in more
                than one way and are refused. See `masks` for packed documents, sliding windows and padding. Or a
                `BlockMask` for FlexAttention, used as it is, which says causality and window itself, such as
                `masks.packed_blocks`.
            cache: `step.layer(i)` of a `KVCache`, for the tokens of x, in the dtype of x or of autocast. The keys of
                mask are then those of `step.key_positions`, and mask is a tensor. Or any other `AttendingCache`, which
                rotates, stores and attends as it likes.

        Returns:
            Shape of x, and its dtype or that of autocast.

        Raises:
            RopeError: an argument is none of these, a shape does not fit, the rotation cannot be that of the cache's
                step, a BlockMask comes with a KVCache or with a rotation in two passes, or another cache returns
                something else than it must.
        """
        self._check(x, rotation, mask, cache)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = split_heads("RotaryAttention", q, k, v, self.head_dim, self.num_heads, self.num_kv_heads)
        norm = self._norm(q, k, v, cache)
        if norm is None and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # autocast makes some norms float32
        if isinstance(mask, Tensor) and mask.is_floating_point() and torch.is_autocast_enabled(q.device.type):
            mask = mask.to(q.dtype)
        scale = self.head_dim**-0.5 * self.softmax_factor
        fused: dict[str, Any] = {} if norm is None else {"norm": norm}
        if cache is None:
            attended = self._attend(q, k, v, rotation=rotation, mask=mask, scale=scale, norm=norm)
        else:
            mask = self._within(cache, mask)
            attended = cache.attend(q, k, v, rotation=rotation, mask=mask, scale=scale, **fused)
            attention.check_attended("RotaryAttention", cache, attended, q, v)
        projected: Tensor = self.o_proj(attended.flatten(2))
        return projected

    def _norm(self, q: Tensor, k: Tensor, v: Tensor, cache: AttendingCache | None) -> QKNorm | None:
        """The norms of q and k as what rotates can take over; None where they are modules to call, or there are none.

        They are called where something was put in their place or hooked on them (tensor parallel plans, FSDP, who looks
        at activations), and before a cache that knows of no norms.
        """
        of_q, of_k = self.q_norm, self.k_norm
        if type(of_q) is not HeadNorm or type(of_k) is not HeadNorm or of_q.eps != of_k.eps or of_q.eps is None:
            return None
        if _is_watched(of_q) or _is_watched(of_k) or not q.dtype == k.dtype == v.dtype:
            return None
        if cache is not None and not getattr(cache, "takes_norm", False):
            return None
        return QKNorm(local_weight(of_q.weight, q), local_weight(of_k.weight, k), of_q.eps)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | TwoPass | None,
        mask: Tensor | BlockMask | None,
        scale: float,
        norm: QKNorm | None = None,
    ) -> Tensor:
        """Without a cache: over the keys of these tokens. Where plain causality is all, no mask says it."""
        if isinstance(mask, Tensor):
            check_mask("RotaryAttention", mask, q, k.shape[1])
        if not isinstance(mask, BlockMask):
            seen = self._seen(q.shape[1], q.device, dense=mask is not None or isinstance(rotation, TwoPass))
            mask = mask if seen is None else joined(mask, seen)
        return attention.rotate_and_attend(
            q,
            k,
            v,
            rotation=rotation,
            mask=mask,
            scale=scale,
            causal=self.causal,
            dropout=self.dropout if self.training else 0.0,
            norm=norm,
        )

    def _seen(self, seq: int, device: torch.device, *, dense: bool) -> Tensor | None:
        """bool `[1, 1, seq, seq]`: what causality and the window leave; None where plain causality, or nothing, is all.

        Args:
            seq: tokens.
            device: where.
            dense: whether causality has to be part of a mask.
        """
        if self.window is not None and (isinstance(seq, torch.SymInt) or seq > self.window):
            window = masks.sliding_window(seq, self.window, device=device)
            return window if self.causal else window | window.mT
        if not self.causal:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if dense else None
        return causal_mask(seq, seq, device) if dense else None

    def _within(self, cache: AttendingCache, mask: Tensor | BlockMask | None) -> Tensor | BlockMask | None:
        """The user's mask, joined with the window of this layer where the cache keeps more."""
        if self.window is None or isinstance(mask, BlockMask):
            return mask
        if not isinstance(cache, LayerCache):
            raise _checks.error(
                "RotaryAttention",
                "a cache of your own applies its window itself, so that window must be None",
                f"window={self.window} and a {type(cache).__name__}",
                "Build the layer without a window, or use a KVCache.",
            )
        within = cache.step.within(self.window)
        return mask if within is None else joined(mask, within)

    def _check(self, x: Tensor, rotation: object, mask: object, cache: object) -> None:
        who = "RotaryAttention"
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            must = f"x must have shape [batch, seq, hidden_size={self.hidden_size}]"
            raise _checks.error(who, must, f"shape {tuple(x.shape)}", "Pass hidden states.")
        if rotation is not None:
            attention.check_rotation(who, rotation)
        if cache is not None and not callable(getattr(cache, "attend", None)):
            raise _checks.error(
                who,
                "cache must be one layer of a step of a KVCache, another cache with such a method attend, or None",
                _checks.shown(cache),
                "Call step = cache.step(seq) once for each forward pass, and pass step.layer(i).",
            )
        if cache is not None and (not self.causal or (self.training and self.dropout)):
            raise _checks.error(
                who,
                "with a cache, attention must be causal and without dropout",
                "causal=False" if not self.causal else f"dropout={self.dropout} in training mode",
                "A cache is for generation: build the layer with causal=True, and call eval() before it.",
            )
        if mask is None or isinstance(mask, Tensor):
            return
        if not isinstance(mask, BlockMask):
            raise _checks.error(
                who,
                "mask must be a tensor, a BlockMask or None",
                _checks.shown(mask),
                "Plain causality needs no mask; ropewalk.masks makes those for documents, windows and padding.",
            )
        if isinstance(rotation, TwoPass):
            raise _checks.error(
                who,
                "in two passes, mask must be a tensor",
                "a BlockMask",
                "Pass a dense mask, e.g. masks.packed(cu_seqlens, total).",
            )

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
