"""Modules for building models: `RotaryEmbedding` and `RotaryAttention`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk._layout import AXES, Layout
from ropewalk.attention.attend import AttendingCache, attend, not_a_rotation, rotate
from ropewalk.attention.mask_tensors import check_mask
from ropewalk.attention.pairs import Pairs
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.placements import local_weight
from ropewalk.rotation.qk_norm import QKNorm
from ropewalk.rotation.reference import rms_norm


class RotaryEmbedding(torch.nn.Module):
    """A module that rotates q and k at explicit positions.

    The module has no parameters, no buffers and nothing in `state_dict`. Its only state is the Rope: plain numbers that
    `.half()`, `.to()`, meta initialisation and FSDP cannot change. It computes the angles at each call. In a model with
    several layers, call `rope.at(positions)` once instead, and pass the rotation to every layer.

    Args:
        rope: the frequency of each pair.
        layout: "bshd", "bhsd", "sbhd" or "thd": the order of the axes of q and k.

    Raises:
        RopeError: rope is not a Rope, or layout is unknown.

    Examples:
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
        """Return `rope.at(positions, device=q.device)(q, k, layout=layout)`, or only the rotated q if k is None.

        Arguments and errors are those of `Rope.at` and of `Rotation.__call__`.
        """
        rotation = self.rope.at(positions, device=q.device)
        return rotation(q, layout=self.layout) if k is None else rotation(q, k, layout=self.layout)

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        return f"{self.rope!r}, layout={self.layout!r}"


class HeadNorm(torch.nn.RMSNorm):
    """RMSNorm over the channels of each head, with a mean in float64. It returns the same bits as `QKNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x `[..., head_dim]`; the result has the dtype of x."""
        return rms_norm(x, local_weight(self.weight, x), eps=cast(float, self.eps))


_any_global_hook: Any = torch.nn.modules.module._has_any_global_hook


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether calling the module must run a hook: one of its own, or one of those for all modules."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _any_global_hook()
    )


class RotaryAttention(torch.nn.Module):
    """Multi-head attention as in Llama: project to q, k and v, rotate q and k, attend, project back.

    Parameters have the names of Hugging Face's Llama attention (`q_proj`, `k_proj`, `v_proj`, `o_proj`; `q_norm`,
    `k_norm` as in Qwen 3), so weights of these models load without renaming. The rope is not part of the module.
    Compute one rotation for each forward pass, and pass it to all layers.

    Args:
        hidden_size: channels of the model.
        num_heads: number of query heads of the whole model, also under tensor parallelism.
        num_kv_heads: number of heads of keys and values of the whole model. It divides num_heads (GQA; 1 is MQA).
            None means num_heads.
        head_dim: channels of a head. None means hidden_size / num_heads.
        bias: whether the projections of q, k and v have a bias (Qwen 2).
        o_bias: whether the output projection has a bias. Hugging Face's Llama with `attention_bias` has both biases.
        qk_norm: ε of the RMSNorm that is applied to each head of q and k before rotation (Qwen 3). None disables it.
        softmax_factor: factor of the softmax scale head_dim^(−1/2), dimensionless, from `ModelRopes.softmax_factor`.
        causal: whether a token attends only to itself and the tokens before it. False (for encoders) excludes a cache.
        window: each token attends to itself and the window − 1 tokens before it, and with causal=False also to the
            window − 1 after it. None means no limit. Older tokens that a `KVCache` keeps are masked.
        dropout: probability of setting an attention weight to 0 in training mode, 0 ≤ dropout ≤ 1.

    Raises:
        RopeError: a number is out of range, num_kv_heads does not divide num_heads, or head_dim is None and num_heads
            does not divide hidden_size.

    Examples:
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
                "num_kv_heads must divide num_heads, since each key head serves the same number of query heads",
                f"{self.num_kv_heads} for {self.num_heads}",
                "Pass a divisor.",
            )
        if head_dim is None and self.hidden_size % self.num_heads:
            raise _checks.error(
                who,
                "num_heads must divide hidden_size, unless head_dim is given",
                f"{self.num_heads} for {self.hidden_size}",
                "Pass the head_dim of the model.",
            )
        self.head_dim = (
            self.hidden_size // self.num_heads
            if head_dim is None
            else _checks.integer(who, "head_dim", head_dim, at_least=1, at_most=_checks.MAX_HEAD_DIM)
        )
        self.softmax_factor = _checks.number(who, "softmax_factor", softmax_factor, above=0.0)
        self.causal = _checks.boolean(who, "causal", causal)
        self.window = None if window is None else _checks.length(who, "window", window)
        self.dropout = _checks.number(who, "dropout", dropout, at_least=0.0, at_most=1.0)
        kv_width = self.num_kv_heads * self.head_dim
        self.q_proj = torch.nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = torch.nn.Linear(hidden_size, kv_width, bias=bias)
        self.v_proj = torch.nn.Linear(hidden_size, kv_width, bias=bias)
        self.o_proj = torch.nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=o_bias)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            eps = _checks.number(who, "qk_norm", qk_norm, above=0.0, fix="Pass the ε of the norm, e.g. 1e-6.")
            self.q_norm, self.k_norm = HeadNorm(self.head_dim, eps=eps), HeadNorm(self.head_dim, eps=eps)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | TwoPass | None,
        *,
        mask: Tensor | BlockMask | None = None,
        cache: AttendingCache | None = None,
    ) -> Tensor:
        """Attend from each token to itself and the tokens before it, or to all tokens if causal is False.

        Args:
            x: `[batch, seq, hidden_size]`.
            rotation: the rotation of exactly the tokens of x: `rope.at(positions)`, `step.rotation(rope)` with a cache,
                or `SelfExtend.at(...)`. None means that this layer does not rotate. With a cache, compute the rotation
                again for each step, from the positions `[batch, seq]` of that step.
            mask: restricts attention further, in addition to causality. A tensor `[batch, heads, seq, keys]`, each axis
                of full size or 1, is a bool mask (True means attend), or is added to the scores and has the dtype of x
                (under autocast any floating-point dtype). Fewer axes would be ambiguous and raise an error. See `masks`
                for packed documents, sliding windows and padding. A `BlockMask` for FlexAttention, such as
                `masks.packed_blocks`, must itself include causality and the window.
            cache: `step.layer(i)` of a `KVCache`, for the tokens of x, in the dtype of x or of autocast. The keys of
                mask are then those of `step.key_positions`, and mask must be a tensor. Any other `AttendingCache` does
                its own rotation, storage and attention.

        Returns:
            A tensor of the shape of x, in the dtype of x or of autocast.

        Raises:
            RopeError: an argument has a wrong type or shape, the rotation does not fit the cache's step, a BlockMask is
                combined with a KVCache or a rotation in two passes, or a cache returns a wrong shape or dtype.
        """
        self._check(x, rotation, mask, cache)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = _split_heads(q, k, v, self.head_dim, self.num_heads // self.num_kv_heads)
        norm = None if self.q_norm is None else self._fusable_norm(q, k, v, cache)
        if norm is None and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # under autocast some norms return float32
        if isinstance(mask, Tensor) and mask.is_floating_point() and torch.is_autocast_enabled(q.device.type):
            mask = mask.to(q.dtype)
        scale = self.head_dim**-0.5 * self.softmax_factor
        if cache is None:
            pairs, dropout = self._own_pairs(q, k, mask), self.dropout if self.training else 0.0
            q, k = rotate(q, k, rotation, norm)
            options: dict[str, Any] = {"scale": scale, "causal": self.causal, "dropout": dropout, "pairs": pairs}
            attended = attend(q, k, v, rotation=rotation, mask=mask, **options)
        else:
            more: dict[str, Any] = {} if norm is None else {"norm": norm}
            if self.window is not None and getattr(cache, "takes_window", False):
                more["window"] = self.window
            attended = cache.attend(q, k, v, rotation=rotation, mask=mask, scale=scale, **more)
            if not isinstance(attended, Tensor) or attended.shape != q.shape or attended.dtype != v.dtype:
                shape = f"[batch, seq, heads, head_dim] = {list(q.shape)}"
                must = f"attend of {type(cache).__name__} must return {shape} in {v.dtype}"
                fix = "Implement ropewalk.AttendingCache as its docstring says."
                raise _checks.error("RotaryAttention", must, _checks.describe(attended), fix)
        projected: Tensor = self.o_proj(attended.flatten(2))
        return projected

    def _fusable_norm(self, q: Tensor, k: Tensor, v: Tensor, cache: AttendingCache | None) -> QKNorm | None:
        """Return the norms of q and k if one kernel can apply them and rotate, or None if their modules must run.

        The modules must run if they were replaced, if they have hooks (tensor parallel plans, FSDP, code that records
        activations), if their ε or the dtypes of q, k and v differ, or if the cache does not take norms.
        """
        q_norm, k_norm = self.q_norm, self.k_norm
        if type(q_norm) is not HeadNorm or type(k_norm) is not HeadNorm or q_norm.eps is None:
            return None
        if _has_hooks(q_norm) or _has_hooks(k_norm) or not q.dtype == k.dtype == v.dtype or q_norm.eps != k_norm.eps:
            return None
        if cache is not None and not getattr(cache, "takes_norm", False):
            return None
        return QKNorm(local_weight(q_norm.weight, q), local_weight(k_norm.weight, k), q_norm.eps)

    def _own_pairs(self, q: Tensor, k: Tensor, mask: Tensor | BlockMask | None) -> Pairs | None:
        """Return the keys that each query attends to without a cache, or None if causality or mask says it all."""
        if isinstance(mask, BlockMask):
            return None
        seq = q.shape[1]
        if mask is not None:
            check_mask("RotaryAttention", mask, q, k.shape[1])
        if self.window is not None and (isinstance(seq, torch.SymInt) or seq > self.window):
            after = 0 if self.causal else self.window - 1
            return Pairs.aligned(seq, seq, q.device, window=self.window, after=after)
        return Pairs.aligned(seq, seq, q.device) if mask is not None and self.causal else None

    def _check(self, x: Tensor, rotation: object, mask: object, cache: object) -> None:
        who = "RotaryAttention"
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            must = f"x must have shape [batch, seq, hidden_size={self.hidden_size}]"
            raise _checks.error(who, must, f"shape {tuple(x.shape)}", "Pass hidden states.")
        if rotation is not None and not isinstance(rotation, (Rotation, TwoPass)):
            raise not_a_rotation(who, rotation)
        if cache is not None and not callable(getattr(cache, "attend", None)):
            raise _checks.error(
                who,
                "cache must be one layer of a step of a KVCache, another object with such a method attend, or None",
                _checks.shown(cache),
                "Call step = cache.step(seq) once for each forward pass, and pass step.layer(i).",
            )
        takes_window = cache is None or getattr(cache, "takes_window", False)
        if self.window is not None and not takes_window and not isinstance(mask, BlockMask):
            raise _checks.error(
                who,
                "window must be None with a cache of your own, which applies its window itself",
                f"window={self.window} and a {type(cache).__name__}",
                "Build the layer without a window, or use a KVCache.",
            )
        if cache is not None and (not self.causal or (self.training and self.dropout)):
            raise _checks.error(
                who,
                "with a cache, attention must be causal and without dropout",
                "causal=False" if not self.causal else f"dropout={self.dropout} in training mode",
                "A cache is for generation: build the layer with causal=True, and call eval() before it.",
            )
        if mask is not None and not isinstance(mask, (Tensor, BlockMask)):
            raise _checks.error(
                who,
                "mask must be a tensor, a BlockMask or None",
                _checks.shown(mask),
                "Plain causality needs no mask; ropewalk.masks builds masks for documents, windows and padding.",
            )

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def _split_heads(q: Tensor, k: Tensor, v: Tensor, head_dim: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape q, k and v from `[batch, seq, heads · head_dim]` to `[batch, seq, heads, head_dim]`.

    The number of heads is computed from the width. Under tensor parallelism it is thus the number on this rank. `group`
    is the number of query heads for each key head.
    """
    fix = "Shard whole heads, e.g. with ropewalk.parallel.HeadwiseParallel."
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.shape[-1] or x.shape[-1] % head_dim:
            must = f"{name}_proj must return whole heads, a multiple of head_dim={head_dim} channels"
            raise _checks.error("RotaryAttention", must, str(x.shape[-1]), fix)
    heads, kv_heads = q.shape[-1] // head_dim, k.shape[-1] // head_dim
    if v.shape[-1] != k.shape[-1]:
        must = "k_proj and v_proj must return the same number of heads"
        raise _checks.error("RotaryAttention", must, f"{kv_heads} and {v.shape[-1] // head_dim}", fix)
    # Ranks may share one key head. A rank with several key heads needs all query heads of each of them; otherwise
    # attention would pair query heads with the wrong key heads.
    if heads != group * kv_heads and not (kv_heads == 1 and heads < group):
        must = f"q_proj and k_proj must return matching heads, {group} query heads for each key head"
        raise _checks.error("RotaryAttention", must, f"{heads} query heads and {kv_heads} key heads", fix)
    shape = (-1, head_dim)
    return q.unflatten(-1, shape), k.unflatten(-1, shape), v.unflatten(-1, shape)  # type: ignore[no-untyped-call]
