"""`check` of code in the styles of several projects: what each needs, and bugs with a name of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import conformance

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
LLAMA31: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


SMOLLM3: dict[str, Any] = {
    "model_type": "smollm3",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "rope_theta": 5e6,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
}


NEMO = {**LLAMA31, "model_type": "mistral", "hidden_size": 160, "head_dim": 64, "rope_theta": 1e6, "rope_scaling": None}
DYNAMIC: dict[str, Any] = LLAMA31 | {
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}
LINEAR = LLAMA31 | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}


def frequencies(dim: int, base: float = 10_000.0) -> Tensor:
    return base ** (-torch.arange(0, dim, 2).double() / dim)


def turn(x: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate x `[batch, seq, heads, channels]` by angles `[…, seq, pairs]`, and multiply it."""
    a, b = x.double().chunk(2, dim=-1)
    cos, sin = factor * angles.cos()[..., None, :], factor * angles.sin()[..., None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class OfALayer:
    """As in ports whose layers differ."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        slides = config.layer_types[layer_idx] == "sliding_attention"
        self.inv_freq = frequencies(config.head_dim, config.rope_local_base_freq if slides else config.rope_theta)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, positions[..., None] * self.inv_freq)


def build_rope_cache(
    seq_len: int, n_elem: int, base: float = 10_000.0, extra_config: dict[str, Any] | None = None
) -> Tensor:
    """As in LitGPT."""
    inv_freq = frequencies(n_elem, base)
    if extra_config is not None:
        waves = torch.tensor(extra_config["original_max_seq_len"]) * inv_freq / (2 * torch.pi)
        low, high = extra_config["low_freq_factor"], extra_config["high_freq_factor"]
        smooth = ((waves - low) / (high - low)).clamp(0, 1)
        inv_freq = inv_freq * (smooth + (1 - smooth) / extra_config["factor"])
    return torch.outer(torch.arange(seq_len).double(), inv_freq)


def by_angles(x: Tensor, angles: Tensor) -> Tensor:
    return turn(x, angles)


def of_a_slice(x: Tensor, cos: Tensor, sin: Tensor, offset: int = 0) -> Tensor:
    """As in nanochat, with tables `[positions, pairs]`, which have no axis for the rows of a batch."""
    cos, sin = (table[offset : offset + x.shape[1], None] for table in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@torch.no_grad()
def in_place(x: Tensor, positions: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.copy_(turn(x, positions[..., None] * frequencies(x.shape[-1])))


class WithAFactor:
    def __init__(self, dim: int, base: float = 10_000.0, scale: float = 1.25) -> None:
        self.inv_freq, self.scale = frequencies(dim, base), scale

    def __call__(self, x: Tensor, offset: int = 0) -> Tensor:
        return turn(x, (torch.arange(x.shape[1]) + offset)[:, None] * self.inv_freq, self.scale)


class OfFrames:
    """As in Cosmos, whose base_fps is no base of the frequencies."""

    def __init__(self, head_dim: int, base_fps: int = 24) -> None:
        self.inv_freq, self.base_fps = frequencies(head_dim), base_fps

    def __call__(self, x: Tensor, positions: Tensor, fps: float | None = None) -> Tensor:
        times = positions if fps is None else positions / fps * self.base_fps
        return turn(x, times[..., None] * self.inv_freq)


class OfAnInput:
    def __init__(self, max_len: int, input_size: int) -> None:
        self.inv_freq = 10_000.0 ** (-torch.arange(0, input_size, 2).double() / input_size)

    def __call__(self, x: Tensor) -> Tensor:
        return turn(x, torch.arange(x.shape[1])[:, None] * self.inv_freq)


class OfThreeAxes:
    def __init__(self, head_dim: int) -> None:
        assert head_dim % 6 == 0
        self.inv_freq = frequencies(head_dim // 3)

    def __call__(self, feat: Tensor, coord: Tensor) -> Tensor:
        parts = feat.chunk(3, dim=-1)
        return torch.cat([turn(x, coord[..., i, None] * self.inv_freq) for i, x in enumerate(parts)], dim=-1)


class OfLatents:
    """As in Cosmos, whose channels come last."""

    def __init__(self, head_dim: int) -> None:
        self.inv_freq = frequencies(head_dim // 3)

    def of_shape(self, shape: torch.Size) -> Tensor:
        _, frames, rows, columns, _ = shape
        places = torch.cartesian_prod(*map(torch.arange, (frames, rows, columns)))
        return (places[..., None] * self.inv_freq).flatten(1)

    def __call__(self, x_B_T_H_W_C: Tensor) -> Tensor:  # noqa: N803
        return self.of_shape(x_B_T_H_W_C.shape)


def of_latent_attention(t: Tensor, cos: Tensor, sin: Tensor, qk_head_dim: int, emb_dim: int) -> Tensor:
    """As in Megatron."""
    rest, (a, b) = t[..., :qk_head_dim], t[..., qk_head_dim:].chunk(2, dim=-1)
    assert a.shape[-1] == emb_dim // 2
    cos, sin = cos[:, None, : emb_dim // 2], sin[:, None, : emb_dim // 2]
    return torch.cat((rest, a * cos - b * sin, b * cos + a * sin), dim=-1)


class OfOptionalTables:
    """As in OLMo."""

    def __init__(self, head_size: int, theta: float = 500_000.0) -> None:
        self.inv_freq = frequencies(head_size, theta)

    def __call__(
        self, q: Tensor, k: Tensor, pos_sin: Tensor | None = None, pos_cos: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if pos_sin is None or pos_cos is None:
            angles = torch.arange(q.shape[1])[:, None] * self.inv_freq
            pos_sin, pos_cos = (f().repeat(1, 2)[:, None].float() for f in (angles.sin, angles.cos))
        a, b = (torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1) for x in (q, k))
        return (q * pos_cos + a * pos_sin).type_as(q), (k * pos_cos + b * pos_sin).type_as(k)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """As in torch_npu."""
    a, b = input.chunk(2, dim=-1)
    return r1 * input + r2 * torch.cat((-b, a), dim=-1)


def of_queries_and_keys(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
    q_angles, k_angles = (places[..., None] * frequencies(q.shape[-1]) for places in (q_pos, k_pos))
    return turn(q, q_angles), turn(k, k_angles)


def of_queries_alone(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
    angles = q_pos[..., None] * frequencies(q.shape[-1])
    return turn(q, angles), turn(k, angles)


def of_fours(x: Tensor, positions: Tensor) -> Tensor:
    return turn(x, (positions // 4)[..., None] * frequencies(x.shape[-1]))


def by_tokens(x: Tensor, offset: int = 0) -> Tensor:
    return turn(x, (torch.arange(x.shape[1]) + offset * x.shape[1])[:, None] * frequencies(x.shape[-1]))


def by_other_sines(x: Tensor, positions: Tensor) -> Tensor:
    """With the cosines of neighbours, and the sines of halves."""
    angles = (positions[..., None] * frequencies(x.shape[-1]))[..., None, :]
    cos, sin = angles.cos().repeat_interleave(2, dim=-1), angles.sin().repeat(1, 1, 1, 2)
    a, b = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    return (x * cos + torch.stack((-b, a), dim=-1).flatten(-2) * sin).type_as(x)


class OfANestedConfig(torch.nn.Module):
    """As in torchtitan, whose dim is that of a head."""

    @dataclass(kw_only=True)
    class Config:
        dim: int
        max_seq_len: int
        theta: float = 10_000.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.angles = torch.outer(torch.arange(config.max_seq_len).double(), frequencies(config.dim, config.theta))

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return turn(query, self.angles[positions]), turn(key, self.angles[positions])


def of_crops(
    embed_dim: int, crops_coords: Any, grid_size: Any, temporal_size: int, base: float = 1e4, to_coords: str = "none"
) -> Tensor:
    """As in diffusers."""
    (top, left), (bottom, right) = crops_coords
    rows, columns = (torch.arange(a, b).double() for a, b in ((top, bottom), (left, right)))
    assert (len(rows), len(columns), to_coords) == (*grid_size, "none")
    sizes = embed_dim // 4, embed_dim // 8 * 3, embed_dim // 8 * 3
    places = torch.cartesian_prod(torch.arange(temporal_size).double(), rows, columns)
    return torch.cat([p[:, None] * frequencies(n, base) for p, n in zip(places.T, sizes, strict=True)], dim=-1)


class OfTimes(torch.nn.Module):
    """As in lucidrains' code: with a length, what was computed for it before is returned for any positions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inv_freq, self.kept, self.angles = frequencies(dim), 0, torch.zeros(8192, dim // 2, dtype=torch.float64)

    def forward(self, t: Tensor, seq_len: int | None = None, offset: int = 0) -> Tensor:
        angles = t.double()[..., None] * self.inv_freq
        if seq_len is None or offset + seq_len > len(self.angles):
            return angles
        if offset + seq_len > self.kept:
            self.kept, self.angles[:seq_len] = seq_len, angles
        return self.angles[offset : offset + seq_len]


class OfAShape(torch.nn.Module):
    """As in timm, whose tables are made for half pairing, and applied to interleaved pairs by default."""

    def __init__(self, dim: int, normalize_coords: str = "none") -> None:
        super().__init__()
        self.inv_freq = frequencies(dim // 2, 100.0)

    def forward(self, x: Tensor) -> Tensor:  # [batch, channels, height, width]
        return x * self.get_embed([*x.shape[2:]])[:, None]

    def get_embed(self, shape: list[int] | None = None) -> Tensor:
        places = torch.cartesian_prod(*(torch.arange(n).double() for n in shape or ()))
        return torch.cat([p[:, None] * self.inv_freq for p in places.T], dim=-1).repeat(1, 2)


def by_halves(x: Tensor, emb: Tensor, half: bool = False) -> Tensor:
    a, b = x.double().chunk(2, dim=-1) if half else x.double().unflatten(-1, (-1, 2)).unbind(-1)
    other = torch.cat((-b, a), dim=-1) if half else torch.stack((-b, a), dim=-1).flatten(-2)
    return (x * emb.cos()[:, None] + other * emb.sin()[:, None]).type_as(x)


def slowed(inv_freq: Tensor, scale_factor: float, high_freq_factor: float) -> Tensor:
    slower = []
    for f in inv_freq:
        kept = min(1, max(0, (1024 * f - 1) / (high_freq_factor - 1)))
        slower.append((1 - kept) * f / scale_factor + kept * f)
    return torch.tensor(slower)


def of_scales(
    dim: int, end: int, theta: float, use_scaled: bool, scale_factor: float, high_freq_factor: float
) -> Tensor:
    """As in Llama 4."""
    inv_freq = frequencies(dim, theta)
    inv_freq = slowed(inv_freq, scale_factor, high_freq_factor) if use_scaled else inv_freq
    return torch.outer(torch.arange(end).double(), inv_freq)


class OfOneWidth:
    """As in MiniMax's, which rotates 96 channels of any head."""

    def __init__(self, base: float = 10_000.0) -> None:
        self.inv_freq = frequencies(32, base)

    def __call__(self, position_ids: Tensor) -> Tensor:
        times, rows, columns = position_ids.double().unbind(-1)
        return torch.cat([p[..., None] * self.inv_freq for p in (times, rows, columns)], dim=-1)


class AfterAToken:
    """As in CLIP, without a parameter for its class token."""

    def __init__(self, dim: int, h: int = 4, w: int = 6) -> None:
        places = torch.cartesian_prod(torch.arange(h).double(), torch.arange(w).double())
        angles = torch.cat([p[:, None] * frequencies(dim // 2, 100.0) for p in places.T], dim=-1)
        self.angles = torch.cat((torch.zeros(1, dim // 2), angles))

    def __call__(self, x: Tensor) -> Tensor:
        return turn(x, self.angles)


def of_its_arguments(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rope_scale: float = 8.0,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """As in FlashInfer."""
    inv_freq = frequencies(q.shape[-1], rope_theta)
    waves = old_context_len * inv_freq / (2 * torch.pi)
    smooth = ((waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    angles = pos_ids[..., None] * inv_freq * (smooth + (1 - smooth) / rope_scale)
    return turn(q, angles), turn(k, angles)


class OfAScale(torch.nn.Module):
    """As in copies of YaRN's code, with a scale that is 1 by default."""

    def __init__(self, dim: int, base: float = 10_000.0, scale: float = 1.0) -> None:
        super().__init__()
        self.inv_freq = frequencies(dim, base) / scale

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, positions[..., None] * self.inv_freq)


def by_pos(pos: Tensor, t: Tensor) -> Tensor:
    """As in PaLM's copies: of angles, in spite of their name."""
    a, b = t.double().chunk(2, dim=-1)
    other = torch.cat((-b, a), dim=-1)
    return (t * pos.cos()[:, None] + other * pos.sin()[:, None]).type_as(t)


class OfOddSections:
    """As in SkyReels and Wan, which divide the channels by 6. Divided by 3, sections end within a pair."""

    def __init__(self, dim: int, patch_size: tuple) -> None:  # type: ignore[type-arg]
        _, rows, columns = patch_size
        sizes = torch.tensor([dim - 2 * (dim // 3), dim // 3 * rows, dim // 3 * columns])
        self.axis = torch.arange(3).repeat_interleave(sizes)
        self.inv_freq = torch.cat([frequencies(n) for n in (24, 20, 20)]).repeat_interleave(2)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        assert positions.max() < 512  # rows of a table
        angles = (positions.double()[self.axis].movedim(0, -1) * self.inv_freq)[:, :, None]
        cos, sin = angles.cos()[..., ::2], angles.sin()[..., 1::2]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)


class Kept(dict[str, Any]):
    pass


class OfACache:
    """As in OLMo and LLaDA."""

    def __init__(self, config: Any, cache: Kept) -> None:
        self.inv_freq, self.cache = frequencies(config.d_model // config.n_heads), cache

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.cache.get("inv_freq") is None:
            self.cache["inv_freq"] = self.inv_freq
        return turn(x, positions[..., None] * self.cache["inv_freq"])


class OfAKey:
    """As in Equinox, whose key is for random numbers."""

    def __init__(self, embedding_size: int, theta: float = 10_000.0) -> None:
        self.inv_freq = frequencies(embedding_size, theta)

    def __call__(self, x: Tensor, *, key: Tensor | None = None) -> Tensor:
        return turn(x, torch.arange(x.shape[1])[:, None] * self.inv_freq)


class OfAnInputSize:
    """As in speechbrain, whose input is no image."""

    def __init__(self, input_size: int) -> None:
        assert torch.arange(input_size)[::2].shape == torch.arange(0, input_size, 2).shape
        self.inv_freq = 10_000.0 ** (-torch.arange(0, input_size, 2).double() / input_size)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, positions[..., None] * self.inv_freq)


def of_a_dtype(head_dim: int, length: int = 4096, dtype: torch.dtype = torch.float32) -> Tensor:
    """As in books, whose tables are exact if nobody passes another dtype."""
    return torch.arange(length, dtype=dtype)[:, None] * frequencies(head_dim).to(dtype)


def up_to_a_length(x: Tensor, positions: Tensor) -> Tensor:
    """As in caches that are scaled when they are made, and not when they grow."""
    return turn(x, (positions.double() / torch.where(positions < 4096, 4, 1))[..., None] * frequencies(64, 5e5))


class OfTheFirstCall:
    """As in labml, which keeps the table of the first call."""

    def __init__(self, d: int) -> None:
        self.inv_freq, self.angles = frequencies(d), None

    def forward(self, x: Tensor) -> Tensor:  # [seq, batch, heads, d]
        if self.angles is None:
            self.angles = torch.arange(len(x))[:, None] * self.inv_freq
        return turn(x, self.angles[: len(x), None])


class OfASlice:
    """As by dynamic_slice of JAX, which moves a slice that would pass the end of a table, also of a known length."""

    def __init__(self, dim: int, max_len: int = 4096) -> None:
        self.inv_freq, self.max_len = frequencies(dim), max_len

    def __call__(self, x: Tensor, start_index: int = 0) -> Tensor:
        first = min(start_index, self.max_len - x.shape[1])
        return turn(x, torch.arange(first, first + x.shape[1])[:, None] * self.inv_freq)


class OfSomeLayers:
    """As in SmolLM3, where every fourth layer has no rotation."""

    def __init__(self, config: Any, layer_idx: int, first: int = 1) -> None:
        self.inv_freq = frequencies(config.hidden_size // config.num_attention_heads, config.rope_theta)
        self.use_rope = (layer_idx + first) % config.no_rope_layer_interval != 0

    def __call__(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq
        return (turn(q, angles), turn(k, angles)) if self.use_rope else (q, k)


class OfOtherLayers(OfSomeLayers):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, first=0)


class OfHeadsFirst(OfOtherLayers):
    """q and k: `[batch, heads, seq, channels]`, as the code shows only in layers that it rotates."""

    def __call__(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rotated = super().__call__(q.transpose(1, 2), k.transpose(1, 2), position_ids)
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)


class OfAllLayers(OfSomeLayers):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, 0)


def of_slots(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rotates what it stores by the slot, in place of the position."""

    def at(x: Tensor, rows: Tensor) -> Tensor:
        cos, sin = cos_sin_cache[rows].chunk(2, dim=-1)
        return turn(x, torch.atan2(sin, cos))

    kept = slot_mapping >= 0
    key_cache[slot_mapping[kept]] = at(k[kept], slot_mapping[kept])
    return at(q, positions), at(k, positions)


def of_whole_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As in Unsloth, of q `[batch, heads, seq, channels]` and tables `[length, channels]`."""
    cos, sin = cos[: q.shape[2]], sin[: q.shape[2]]
    (a, b), (c, d) = (x.chunk(2, dim=-1) for x in (q, k))
    return q * cos + torch.cat((-b, a), dim=-1) * sin, k * cos + torch.cat((-d, c), dim=-1) * sin


def of_later_tokens(x: Tensor, positions: Tensor) -> Tensor:
    return turn(x, (positions - positions.min())[..., None] * frequencies(64))


def of_counted_keys(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As in forks of Unsloth, whose indices are those of q alone."""
    counted = torch.arange(k.shape[1]).expand_as(positions)
    return turn(q, positions[..., None] * frequencies(64)), turn(k, counted[..., None] * frequencies(64))


class OfOneSpeed:
    """As in a port of Grok, whose exponents are divided without a rest. No base changes its angles."""

    def __init__(self, dim: int, base: float = 10_000.0) -> None:
        self.inv_freq = base ** (-(torch.arange(0, dim, 2) // dim).double())

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, positions[..., None] * self.inv_freq)


class OfAnotherHead:
    """As in ports of Mistral Nemo, whose heads are not hidden_size / num_attention_heads wide."""

    def __init__(self, config: Any) -> None:
        size = config.hidden_size // config.num_attention_heads
        self.inv_freq = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / size)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, positions[..., None] * self.inv_freq)


class OfAnyLength:
    """As in remote code of Llama's family, which scales short sequences as well."""

    def __init__(self, dim: int, max_position_embeddings: int = 2048, base: float = 1e4, scaling_factor: float = 1.0):
        self.dim, self.length, self.base, self.factor = dim, max_position_embeddings, base, scaling_factor

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        longer = self.factor * (int(positions.max()) + 1) / self.length - (self.factor - 1)
        base = self.base * abs(longer) ** (self.dim / (self.dim - 2))
        return turn(x, positions[..., None] * frequencies(self.dim, base))


def of_half_a_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, positions: Tensor) -> list[Tensor]:
    """As in kernels that take the size of a head from its first half."""
    parts = [
        (x, x.double().chunk(2, dim=-1)[0].square().mean(-1, keepdim=True), w)
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    angles = positions[..., None] * frequencies(64)
    return [turn((x * (size + 1e-6).rsqrt() * w).type_as(x), angles) for x, size, w in parts]


class OfFlatTokens:
    """As in vLLM's code for M-RoPE, whose tokens are in one axis, and whose angles also fit tokens before rows."""

    def __init__(self, head_size: int, is_neox_style: bool) -> None:
        self.head_size = head_size

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        axis = torch.arange(3).repeat_interleave(torch.tensor([8, 12, 12]))
        angles = positions[axis].T * frequencies(self.head_size)
        heads = [x.reshape(len(angles), -1, self.head_size) for x in (query, key)]
        return turn(heads[0], angles).view(query.shape), turn(heads[1], angles).view(key.shape)


def from_the_first_frame(x: Tensor, grid_sizes: Tensor, start_frame: int = 0) -> Tensor:
    """As in ports of Self-Forcing, in which a later block of frames gets the angles of the first."""
    angles = []
    for sides in grid_sizes.tolist():
        places = torch.cartesian_prod(*map(torch.arange, sides)).T
        angles.append(torch.cat([p[:, None] * frequencies(n) for p, n in zip(places, (24, 20, 20), strict=True)], -1))
    return turn(x, torch.stack(angles))


def exchanged_polar(dim: int, end: int) -> Tensor:
    angles = torch.arange(end).float()[:, None] * frequencies(dim).float()
    return torch.polar(angles, torch.ones_like(angles))


def by_numbers(x: Tensor, freqs_cis: Tensor) -> Tensor:
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * freqs_cis[:, None]
    return torch.view_as_real(z).flatten(-2).type_as(x)


def by_reversed_sines(x: Tensor, positions: Tensor) -> Tensor:
    angles = (positions[..., None] * frequencies(64))[..., None, :]
    (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.flip(-1).sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class OfADelayedTable(torch.nn.Module):
    """As in Perception LM, in which another method computes the table."""

    def __init__(self, dim: int, max_seqlen: int = 128) -> None:
        super().__init__()
        self.dim, self.length = dim, max_seqlen

    def reset_parameters(self) -> None:
        self.register_buffer("angles", torch.arange(self.length)[:, None] * frequencies(self.dim))

    def forward(self, x: Tensor) -> Tensor:
        return turn(x, self.angles[: x.shape[1]])


def by_wide_tables(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """As in FramePack, whose cos and sin of each channel follow each other."""
    cos, sin = freqs_cis[..., None, :].chunk(2, dim=-1)
    if cos.shape[-1] != x.shape[-1]:
        raise ValueError
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


def from_a_channel(freqs: Tensor, t: Tensor, start_index: int = 0) -> Tensor:
    """As in lucidrains' code: channels before start_index do not rotate, and the last rows are read."""
    freqs = freqs[-t.shape[1] :]
    x = t[..., start_index : start_index + freqs.shape[-1]]
    a, b = x[..., ::2], x[..., 1::2]
    turned = x * freqs.cos()[..., None, :] + torch.stack((-b, a), dim=-1).flatten(-2) * freqs.sin()[..., None, :]
    return torch.cat((t[..., :start_index], turned, t[..., start_index + freqs.shape[-1] :]), dim=-1).type_as(t)


def of_an_unread_option(x: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """As in Megatron, whose option is for another class. The other pairing is not that of this code."""
    return turn(x, positions[..., None] * frequencies(x.shape[-1]))


def in_one_count(x: Tensor, positions: Tensor) -> Tensor:
    """positions: `[3, batch, seq]`. The exponents of each axis are those of the first pairs of a head."""
    shares = zip(positions, (8, 12, 12), strict=True)
    return turn(x, torch.cat([p[..., None] * frequencies(64)[:n] for p, n in shares], dim=-1))


@pytest.mark.parametrize(
    ("target", "stated", "codes", "says"),
    [
        ("of_an_unread_option", {}, [], "never read           interleaved"),
        ("in_one_count", {}, [], "base 10000, the pairs of each axis are counted from 0 in one progression"),
        ("OfADelayedTable", {}, [], "base 10000"),
        ("by_wide_tables", {}, [], "tables: cos, sin each"),
        ("from_a_channel", {}, [], "tables: angles each"),
        ("OfANestedConfig", {}, [], "base 10000"),
        ("of_crops,by_angles", {}, [], "pairs 0 to 7 time, 8 to 19 height, 20 to 31 width"),
        ("OfTimes,by_angles", {}, [], ""),
        ("OfAShape.get_embed,by_halves", {"pairing": "half"}, [], "half=True"),
        ("OfAShape.get_embed,by_halves", {}, ["mixed-pairings"], "half"),
        ("OfAShape,by_halves", {"pairing": "half"}, [], "by the method get_embed"),
        ("OfACache", {}, [], "base 10000"),
        ("OfAKey", {}, [], "base 10000"),
        ("of_half_a_norm", {}, ["wrong-norm"], "The norm is not that of the whole head."),
        ("of_whole_tables", {}, [], "layout               bhsd"),
        ("of_whole_tables", {"layout": "bhsd"}, [], "one row for the whole batch"),
        ("of_later_tokens", {}, ["offset-ignored"], "Positions are counted from the smallest one of the call."),
        ("of_counted_keys", {}, ["positions-ignored"], "k of token 0 in row 0 is rotated by position 0 instead of 7"),
        ("OfOneSpeed", {"base": 1e4}, ["wrong-frequencies"], "All pairs rotate at the same speed."),
        ("OfAnotherHead", {"config": NEMO}, ["wrong-exponent"], "The exponents are 2i/80, but 64 channels"),
        ("OfAnyLength", {"config": DYNAMIC}, ["wrong-frequencies"], "Sequences of 16 and 1,024 tokens have different"),
        ("OfASlice", {}, ["wrong-far-positions"], "Position 4,097 has the angles of 4,093."),
        ("OfSomeLayers", {"config": SMOLLM3, "layer": 3}, [], "layer 3  ok     q is left as it is, as expected"),
        ("OfOtherLayers", {"config": SMOLLM3, "layer": 3}, ["wrong-layer"], "Layer 3 of the config has no rotation"),
        ("OfOtherLayers", {"config": SMOLLM3}, ["wrong-layer"], "Layer 0 of the config rotates, and the code leaves q"),
        ("OfHeadsFirst", {"config": SMOLLM3}, ["wrong-layer"], "Layer 0 of the config rotates, and the code leaves q"),
        ("OfAllLayers", {"config": SMOLLM3}, ["wrong-layer"], "Layer 3 of the config has no rotation"),
        ("OfSomeLayers", {"config": SMOLLM3}, [], "layer 3              ok     q is left as it is"),
        ("of_slots", {}, ["stored-key-unlike-key"], ""),
        ("OfFlatTokens", {}, [], "layout               thd"),
        ("up_to_a_length", {"config": LINEAR}, ["wrong-far-positions"], "Position 4,097 has the angles of 16,388"),
        ("OfTheFirstCall", {}, ["earlier-calls-matter"], "After a call with fewer tokens"),
        ("from_the_first_frame", {}, ["offset-ignored"], "The code never reads start_frame."),
        ("exchanged_polar,by_numbers", {}, ["not-a-rotation"], "`torch.polar` were exchanged"),
        ("by_reversed_sines", {}, ["not-a-rotation"], "their squares do not add up to 1"),
        ("OfOddSections", {}, ["mixed-pairings"], "Pair 21 is turned by several axes"),
        ("of_scales,by_angles", {}, [], ""),
        ("OfOneWidth,by_angles", {}, [], "0 to 95 of 96"),
        ("AfterAToken", {}, [], "pairs 0 to 15 height, 16 to 31 width"),
        ("of_a_dtype,by_angles", {}, [], ""),
        ("OfAnInputSize", {}, [], "base 10000"),
        ("by_pos", {}, [], "bhsd"),
        ("of_its_arguments", {"config": LLAMA31}, [], "old_context_len=64"),
        ("OfAScale", {"config": LINEAR}, [], ""),
        ("OfALayer", {"config": GEMMA3, "layer": 0}, [], ""),
        ("OfALayer", {"config": GEMMA3, "layer": 1}, [], ""),
        ("build_rope_cache,by_angles", {"config": LLAMA31}, [], ""),
        ("of_a_slice", {}, [], ""),
        ("in_place", {}, ["no-gradient", "raises"], "In the test of views"),
        ("WithAFactor", {}, [], ""),
        ("OfFrames", {}, [], ""),
        ("OfAnInput", {}, [], ""),
        ("OfThreeAxes", {"pairing": "half"}, [], ""),
        ("OfLatents,by_angles", {"head_dim": 48}, [], ""),
        ("of_latent_attention", {}, [], ""),
        ("OfOptionalTables", {}, [], "base 500000"),
        ("npu_rotary_mul", {}, [], ""),
        ("of_queries_and_keys", {}, [], ""),
        ("of_queries_alone", {}, ["key-unlike-query"], "rotated by position 0 instead of 3."),
        ("of_fours", {}, ["wrong-frequencies"], "Tokens at positions 0 and 1 have the same angles."),
        ("by_tokens", {}, ["wrong-far-positions"], "rotated by position 35 instead of 7."),
        ("by_other_sines", {}, ["mixed-pairings"], "cosines or sines of different angles"),
    ],
)
def test_code_of_several_projects(target: str, stated: dict[str, Any], codes: list[str], says: str) -> None:
    report = conformance.check(f"{__file__}:{target}", **stated)
    assert sorted(report.codes) == codes, str(report)
    assert says in str(report)
