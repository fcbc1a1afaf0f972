"""diffusers.json: known queries and keys, rotated by the position class and the function of a transformer of diffusers.

The position class is built from the default arguments of its transformer, and is called for two grids with texts of
two lengths. The transformer itself is not built. Positions are computed here as the pipeline of the class computes
them. Nothing here imports ropewalk.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .rotated import golden, shortest

Rotate = Callable[[Tensor], Tensor]
Rotated = tuple[Tensor, Rotate]
"""Positions [axes, tokens], and a function that rotates [1, tokens, 1, channels]."""
_CPU = torch.device("cpu")
_GRIDS = (((3, 6, 8), 4), ((4, 5, 4), 7))  # frames, rows, columns; tokens of text
_TOKENS = {"q": (1, -2), "k": (0.5,)}  # the recorded tokens: indices, or a fraction of all tokens


@dataclass(frozen=True)
class Case:
    """A grid and a text, for which a class computes its tables.

    Attributes:
        module: the module of the class.
        embeddings: diffusers.models.embeddings.
        config: the default arguments of the class, and those of `_FILLED`.
        size: frames, rows and columns.
        text: the number of tokens of text.
        heads: the number of heads that rotate differently.
        channels: the number of channels of a head.
    """

    module: Any
    embeddings: Any
    config: dict[str, Any]
    size: tuple[int, int, int]
    text: int
    heads: int
    channels: int

    def __getattr__(self, name: str) -> Any:
        return self.config[name]

    @property
    def latents(self) -> Tensor:
        return torch.zeros(1, 1, *self.size)

    @property
    def grid(self) -> Tensor:
        """The frame, row and column of each patch, from 0."""
        return torch.cartesian_prod(*map(torch.arange, self.size)).T

    @property
    def image(self) -> Tensor:
        """The row and column of each patch of the first frame."""
        return self.grid[1:, : self.size[1] * self.size[2]]

    @property
    def centred(self) -> Tensor:
        _, rows, columns = self.size
        return self.grid - torch.tensor([0, rows - rows // 2, columns - columns // 2])[:, None]

    def count(self, start: int = 0, axes: int = 3) -> Tensor:
        """The positions of text that counts up on all axes."""
        return (torch.arange(self.text) + start).expand(axes, -1)

    def position_class(self, *endings: str) -> Any:
        endings = endings or ("RotaryPosEmbed", "PosEmbed", "EmbedND")
        return next(value for ending in endings for name, value in vars(self.module).items() if name.endswith(ending))

    def real(self, tables: Any, pairs: int = -1) -> Rotate:
        """Rotate by cos and sin [tokens, channels], with pairs along dimension -1 (interleaved) or -2 (half)."""
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in tables)
        return lambda x: self.embeddings.apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=pairs, sequence_dim=1)


def _complex(tables: Tensor) -> Rotate:
    tables = tables.reshape(1, -1, 1, tables.shape[-1])
    return lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * tables).flatten(3)


def _matrices(tables: Tensor) -> Rotate:
    """Rotate by a 2 × 2 matrix for each pair."""
    tables = tables.reshape(-1, 1, *tables.shape[-3:])
    return lambda x: (tables * x.unflatten(-1, (-1, 1, 2))).sum(-1).flatten(3)


def _zeros(c: Case, axes: int = 3) -> Tensor:
    return torch.zeros(axes, c.text, dtype=torch.long)


def _ids(c: Case) -> Rotated:
    image = torch.cat((torch.zeros(1, c.image.shape[1], dtype=torch.long), c.image))
    positions = torch.cat((_zeros(c), image), dim=1)
    axes = c.axes_dims_rope
    if len(axes) == 4:  # time, height, width, text
        text = torch.cat((_zeros(c), c.count(axes=1)))
        sides = c.grid * (0.5 if "flux3" in c.module.__name__ else 1)
        positions = torch.cat((text, torch.cat((sides, 0 * c.grid[:1]))), dim=1)
    tables = c.position_class()(theta=c.config.get("rope_theta", 10000), axes_dim=list(axes))(positions.T)
    return positions, c.real(tables)


def _zimage(c: Case) -> Rotated:
    text, longest = torch.cat((c.count(1, 1), _zeros(c, 2))), c.config.get("max_num_gist_tokens", c.text)
    positions = torch.cat((text, torch.cat((0 * c.image[:1] + longest + 1, c.image))), dim=1)
    return positions, _complex(c.module.RopeEmbedder(c.rope_theta, c.axes_dims, c.axes_lens)(positions.T))


def _lumina2(c: Case) -> Rotated:
    text = torch.cat((c.count(0, 1), _zeros(c, 2)))
    positions = torch.cat((text, torch.cat((0 * c.image[:1] + c.text, c.image))), dim=1)
    embed = c.module.Lumina2RotaryPosEmbed(10000, c.axes_dim_rope, c.axes_lens)
    return positions, _complex(embed._get_freqs_cis(positions.T[None])[0])


def _qwen(c: Case) -> Rotated:
    cls = c.position_class("EmbedRope")
    embed = cls(theta=10000, axes_dim=list(c.axes_dims_rope), scale_rope=True)
    images, text = embed([c.size], device=_CPU, max_txt_seq_len=c.text)
    positions = torch.cat((c.centred, c.count(max(c.size[1] // 2, c.size[2] // 2))), dim=1)
    apply = next(value for name, value in vars(sys.modules[cls.__module__]).items() if "apply_rotary_emb_" in name)
    return positions, lambda x: apply(x, torch.cat((images, text)), use_real=False)


def _qwen21(c: Case) -> Rotated:
    _, rows, columns = c.size
    is_image = torch.tensor([False] * c.text + [True] * rows * columns + [False] * c.text)
    tables = c.module.QwenImage21Rope(10000, list(c.axes_dims_rope))([(1, rows, columns)], is_image, _CPU)
    image = torch.cat((0 * c.image[:1] + c.text, c.centred[1:, : rows * columns]))
    positions = torch.cat((c.count(), image, c.count(c.text + max(rows, columns))), dim=1)
    return positions, lambda x: c.module.apply_rotary_emb_qwen(x, tables, use_real=False)


def _hidream(c: Case) -> Rotated:
    image = torch.cat((0 * c.image[:1], c.image))
    positions = torch.cat((image, _zeros(c)), dim=1)
    tables = c.module.HiDreamImageEmbedND(10000, c.axes_dims_rope)(positions.T[None])
    return positions, lambda x: c.module.apply_rope(x, x, tables)[0]


def _wan(c: Case) -> Rotated:
    embed = c.position_class("RotaryPosEmbed")(c.attention_head_dim, (1, 1, 1), 64)
    return c.grid, c.real(embed(c.latents))


def _wan_animate_2(c: Case) -> Rotated:
    stride, offsets = c.refer_stride + 1, (c.refer_offset_t, c.refer_offset_h, c.size[2])
    model = SimpleNamespace(rope_freqs_cache={}, config=SimpleNamespace(**c.config))
    tables = c.module.WanAnimate2Transformer3DModel._rope_freqs(model, offsets, _CPU)
    positions = c.grid * torch.tensor([stride, 1, 1])[:, None] + torch.tensor(offsets)[:, None]
    return positions, lambda x: c.module.rope_apply(x, torch.tensor([c.size]), tables, stride)


def _hunyuan(c: Case) -> Rotated:
    axes = c.rope_axes_dim
    grid = c.grid if len(axes) == 3 else c.image
    ones = {"patch_size": [1, 1]} if len(axes) == 2 else {"patch_size": 1, "patch_size_t": 1}
    embed = c.position_class("RotaryPosEmbed")(**ones, rope_dim=axes, theta=c.rope_theta)
    if "Framepack" in type(embed).__name__:
        return grid, c.real(embed(torch.arange(c.size[0]), *c.size[1:], _CPU))
    return grid, c.real(embed(torch.zeros(1, 1, *c.size[3 - len(axes) :])))


def _sana_wm(c: Case) -> Rotated:
    tables = c.module.SanaWMRotaryPosEmbed(c.linear_head_dim, (1, 1, 1), 64)(c.size)
    apply = c.module._apply_rotary_emb  # [batch, heads, channels, tokens]
    return c.grid, lambda x: apply(x.permute(0, 2, 3, 1), tables).permute(0, 3, 1, 2)


def _sana_camera(c: Case) -> Rotated:
    head = c.linear_head_dim
    tables = c.module.SanaWMRotaryPosEmbed(head, (1, 1, 1), 64)(c.size)
    tables = c.module._slice_rope_for_cam(tables, head, head // 2)
    unchanged = torch.eye(4).expand(1, c.grid.shape[1], 4, 4)
    apply = c.module._apply_ucpe_transform
    return c.grid, lambda x: apply(x.transpose(1, 2), unchanged, tables).transpose(1, 2)


def _anyflow(c: Case) -> Rotated:
    frames, *sides = c.size
    tables = c.module.AnyFlowRotaryPosEmbed(c.attention_head_dim, (1, 1, 1), 64)(
        {"total_frames": frames, "full_frame_shape": sides}, _CPU
    )["query"]
    return c.grid, lambda x: c.module.apply_rotary_emb(x.transpose(1, 2), tables).transpose(1, 2)


def _anyflow_far(c: Case) -> Rotated:
    """The first frame is compressed: each of its tokens stands for 2 × 2 patches."""
    frames, rows, columns = c.size
    small = (rows // 2, columns // 2)
    embed = c.module.AnyFlowCausalRotaryPosEmbed(c.attention_head_dim, c.patch_size, c.compressed_patch_size, 64)
    sizes = {"total_frames": frames, "full_frame_shape": (rows, columns), "compressed_frame_shape": small}
    tables = embed({**sizes, "num_compressed_frames": 1}, _CPU)["query"]
    compressed = torch.cartesian_prod(torch.zeros(1), *(torch.arange(n) * 2 + 0.5 for n in small)).T
    positions = torch.cat((compressed, c.grid[:, rows * columns :]), dim=1)
    return positions, lambda x: c.module.apply_rotary_emb(x.transpose(1, 2), tables).transpose(1, 2)


def _helios(c: Case) -> Rotated:
    first = 9
    embed = c.module.HeliosRotaryPosEmbed(c.rope_dim, c.rope_theta)
    tables = embed(torch.arange(c.size[0])[None] + first, *c.size[1:], _CPU).flatten(2).transpose(1, 2)
    positions = c.grid + torch.tensor([first, 0, 0])[:, None]
    return positions, lambda x: c.module.apply_rotary_emb_transposed(x, tables)


def _minimax_h3(c: Case) -> Rotated:
    positions = c.grid * torch.tensor([0.75, 1, 1])[:, None]
    tables = c.module.MiniMaxH3RotaryPosEmbed(c.rope_freq_dim, c.rope_theta)(positions.T)
    return positions, lambda x: c.module._apply_rotary_emb(x, *tables)


def _cogvideox(c: Case) -> Rotated:
    sides = c.size[1:]
    tables = c.embeddings.get_3d_rotary_pos_embed(c.attention_head_dim, ((0, 0), sides), sides, c.size[0])
    return c.grid, c.real(tables)


def _easyanimate(c: Case) -> Rotated:
    frames, rows, columns = c.size
    patch = c.patch_size
    embed = c.module.EasyAnimateRotaryPosEmbed(patch, c.attention_head_dim)
    tables = embed(torch.zeros(1, 1, frames, rows * patch, columns * patch))
    start, stop = embed.get_resize_crop_region_for_grid((rows, columns), 90 // patch, 60 // patch)
    return _cropped(c, start, stop), c.real(tables)


def _cropped(c: Case, start: tuple[int, int], stop: tuple[int, int]) -> Tensor:
    """Frames, and rows and columns from `start` to `stop` without the end."""
    sides = [torch.linspace(a, b * (n - 1) / n, n) for a, b, n in zip(start, stop, c.size[1:], strict=True)]
    return torch.cartesian_prod(torch.arange(c.size[0]).float(), *sides).T


def _hunyuan_dit(c: Case) -> Rotated:
    sides, crop = c.size[1:], ((2, 0), (30, 32))
    tables = c.embeddings.get_2d_rotary_pos_embed(c.attention_head_dim, crop, sides, output_type="pt")
    return _cropped(c, *crop)[1:, : sides[0] * sides[1]], c.real(tables)


def _allegro(c: Case) -> Rotated:
    frames, *sides = c.size
    scales = (c.interpolation_scale_t, c.interpolation_scale_h, c.interpolation_scale_w)
    *tables, t, h, w = c.embeddings.get_3d_rotary_pos_embed_allegro(
        c.attention_head_dim, ((0, 0), sides), sides, frames, scales
    )
    index = torch.cartesian_prod(*(grid.long() for grid in (t, h, w))).T[:, None]
    apply = c.embeddings.apply_rotary_emb_allegro
    return c.grid / torch.tensor(scales)[:, None], lambda x: apply(x.transpose(1, 2), tables, index).transpose(1, 2)


def _cogview4(c: Case) -> Rotated:
    _, rows, columns = c.size
    limits = c.rope_axes_dim
    tables = c.module.CogView4RotaryPosEmbed(c.attention_head_dim, 1, limits)(torch.zeros(1, 1, rows, columns))
    row, column = c.image
    return torch.stack((row * limits[0] // rows, column * limits[1] // columns)), c.real(tables, -2)


def _glm_image(c: Case) -> Rotated:
    embed = c.module.GlmImageRotaryPosEmbed(c.attention_head_dim, 1)
    return c.image, c.real(embed(torch.zeros(1, 1, *c.size[1:])), -2)


def _prx(c: Case) -> Rotated:
    embed = c.module.PRXEmbedND(c.hidden_size // c.num_heads, c.theta, c.axes_dim)
    tables = embed(c.module.get_image_ids(1, *c.size[1:], 1, _CPU))
    return c.image, lambda x: c.module.apply_rope(x.transpose(1, 2), tables).transpose(1, 2)


def _joy(c: Case) -> Rotated:
    model = SimpleNamespace(**c.config)
    images, text = c.module.JoyImageEditTransformer3DModel.get_rotary_pos_embed(model, c.size, c.text)
    tables = [torch.cat(pair) for pair in zip(images, text, strict=True)]
    positions = torch.cat((c.grid, c.count(int(c.grid.max()) + 1)), dim=1)
    return positions, lambda x: c.module._apply_rotary_emb(x, x, tables)[0]


def _joy_plus(c: Case) -> Rotated:
    """Two images, of which the second continues the frames of the first."""
    model = SimpleNamespace(config=SimpleNamespace(**c.config))
    tables_of = c.module.JoyImageEditPlusTransformer3DModel._get_rotary_pos_embed_for_range
    frames, rows, columns = c.size
    ranges = (((0, 0, 0), c.size), ((frames, 0, 0), (frames + 1, rows, columns)))
    tables = [torch.cat(parts)[None] for parts in zip(*(tables_of(model, *ends) for ends in ranges), strict=True)]
    second = torch.cat((0 * c.image[:1] + frames, c.image))
    return torch.cat((c.grid, second), dim=1), lambda x: c.module._apply_rotary_emb_batched(x, x, tables)[0]


def _lumina_next(c: Case) -> Rotated:
    head = c.hidden_size // c.num_attention_heads
    return c.image, _complex(c.embeddings.get_2d_rotary_pos_embed_lumina(head, *c.size[1:]))


def _kandinsky(c: Case) -> Rotated:
    scales = c.config.get("scale_factor", (1.0, 2.0, 2.0))
    embed = c.position_class("RoPE3D")(c.axes_dims)
    places = tuple(map(torch.arange, c.size))
    tables = embed((1, *c.size), places, scales) if "Kandinsky5" in type(embed).__name__ else embed(places, scales)
    return c.grid / torch.tensor(scales)[:, None], _matrices(tables)


def _kandinsky_text(c: Case) -> Rotated:
    places = torch.arange(c.text)
    return places, _matrices(c.position_class("RoPE1D")(sum(c.axes_dims))(places))


def _kandinsky_audio(c: Case) -> Rotated:
    places = torch.arange(c.text)
    embed = c.position_class("RoPE1D")(sum(c.axes_dims), freqs_scaling=c.audio_freqs_scaling)
    return places, _matrices(embed(places))


def _cosmos(c: Case) -> Rotated:
    fps = 16
    embed = c.module.CosmosRotaryPosEmbed(
        c.attention_head_dim, max_size=c.max_size, patch_size=(1, 1, 1), rope_scale=c.rope_scale
    )
    return c.grid * torch.tensor([24 / fps, 1, 1])[:, None], c.real(embed(c.latents, fps=fps), -2)


def _cosmos3(c: Case) -> Rotated:
    images = c.grid + torch.tensor([c.text + c.unified_3d_mrope_temporal_modality_margin, 0, 0])[:, None]
    positions = torch.cat((c.count(), images), dim=1)
    embed = c.module.Cosmos3VLTextRotaryEmbedding(c.head_dim, c.rope_theta, c.rope_axes_dim)
    cos, sin = (table[0][:, None] for table in embed(positions[:, None], _CPU, torch.float32))
    return positions, lambda x: x * cos + c.module._rotate_half(x) * sin


def _ideogram4(c: Case) -> Rotated:
    image = torch.cat((0 * c.image[:1], c.image)) + 65536
    positions = torch.cat((c.count(), image), dim=1)
    embed = c.module.Ideogram4MRoPE(c.attention_head_dim, c.rope_theta, c.mrope_section)
    cos, sin = (table[0][:, None] for table in embed(positions.T[None]))
    return positions, lambda x: x * cos + c.module._rotate_half(x) * sin


def _line(c: Case) -> Tensor:
    return torch.arange(c.grid.shape[1])


def _ace_step(c: Case) -> Rotated:
    tables = c.module._ace_step_rotary_freqs(len(_line(c)), c.head_dim, c.rope_theta, _CPU, torch.float32)
    return _line(c), c.real(tables, -2)


def _stable_audio(c: Case) -> Rotated:
    tables = c.embeddings.get_1d_rotary_pos_embed(
        c.attention_head_dim // 2, len(_line(c)), use_real=True, repeat_interleave_real=False
    )
    processor = importlib.import_module("diffusers.models.attention_processor").StableAudioAttnProcessor2_0()
    return _line(c), lambda x: processor.apply_partial_rotary_emb(x.transpose(1, 2), tables).transpose(1, 2)


def _stable_audio_3(c: Case) -> Rotated:
    tables = c.module.StableAudio3RotaryEmbedding(c.embed_dim // c.num_heads // 2)(len(_line(c)), _CPU)
    return _line(c), lambda x: c.module._apply_rotary_partial(x, tables)


def _longcat_audio(c: Case) -> Rotated:
    tables = c.module.AudioDiTRotaryEmbedding(c.dit_dim // c.dit_heads, 2048, base=100000.0)(_line(c)[None] * 1.0)
    return _line(c), lambda x: c.module._apply_rotary_emb(x, tables)


def _minimax_music(c: Case) -> Rotated:
    tables = c.module.MiniMaxMusic3RotaryEmbedding(c.rotary_dim)(len(_line(c)), _CPU)
    return _line(c), lambda x: c.module._apply_partial_rotary_emb(x, tables)


def _omnigen(c: Case) -> Rotated:
    """The first text is shorter than the trained length, and the second is longer."""
    places = _line(c) + (0 if c.text == 4 else c.original_max_position_embeddings)
    embed = c.module.OmniGenSuScaledRotaryEmbedding(
        c.hidden_size // c.num_attention_heads,
        c.max_position_embeddings,
        c.original_max_position_embeddings,
        c.rope_base,
        c.rope_scaling,
    )
    return places, c.real(embed(places, places[None]), -2)


def _ltx(c: Case) -> Rotated:
    """Rotate all heads, since their frequencies differ."""
    fps = 25
    frames, rows, columns = c.size
    embed = c.module.LTXVideoRotaryPosEmbed(c.attention_head_dim * c.num_attention_heads)
    tables = embed(torch.zeros(1), frames, rows, columns, (8 / fps, 32, 32))
    positions = c.grid * torch.tensor([8 / fps / 20, 32 / 2048, 32 / 2048])[:, None] * 2 - 1
    return positions, lambda x: c.module.apply_rotary_emb(x.flatten(2), tables).unflatten(2, x.shape[2:])


def _ltx2_rotate(c: Case, tables: Any) -> Rotate:
    apply = c.module.apply_split_rotary_emb if c.rope_type == "split" else c.module.apply_interleaved_rotary_emb
    return lambda x: apply(x.flatten(2), tables).unflatten(2, x.shape[2:])


def _ltx2(c: Case) -> Rotated:
    fps = 25
    embed = c.position_class("VideoRotaryPosEmbed")(
        c.attention_head_dim * c.num_attention_heads, rope_type=c.rope_type, num_attention_heads=c.num_attention_heads
    )
    tables = embed(embed.prepare_video_coords(1, *c.size, _CPU, fps=fps))
    frame, row, column = c.grid
    second = torch.where(frame > 0, 8 * frame - 3, 0.5) / fps  # the first frame is one image, the others are eight
    parts = (second / c.pos_embed_max_pos, (row + 0.5) * 32 / c.base_height, (column + 0.5) * 32 / c.base_width)
    return torch.stack(parts) * 2 - 1, _ltx2_rotate(c, tables)


def _ltx2_audio(c: Case) -> Rotated:
    return _ltx2_line(c, c.audio_pos_embed_max_pos)


def _ltx2_cross(c: Case) -> Rotated:
    return _ltx2_line(c, max(c.pos_embed_max_pos, c.audio_pos_embed_max_pos))


def _ltx2_line(c: Case, longest: int) -> Rotated:
    embed = c.position_class("VideoRotaryPosEmbed")(
        c.heads * c.channels,
        base_num_frames=longest,
        scale_factors=[c.audio_scale_factor],
        modality="audio",
        rope_type=c.rope_type,
        num_attention_heads=c.heads,
    )
    coordinates = embed.prepare_audio_coords(1, c.grid.shape[1], _CPU)
    return coordinates[0, 0].mean(-1) / longest * 2 - 1, _ltx2_rotate(c, embed(coordinates))


_CLASSES: dict[str, Callable[[Case], Rotated]] = {
    **dict.fromkeys(
        ("Flux", "Flux2", "Flux3", "Chroma", "LongCatImage", "OvisImage", "Bria", "BriaFibo", "Krea2"), _ids
    ),
    **dict.fromkeys(("Wan", "WanVACE", "WanAnimate", "ChronoEdit", "SkyReelsV2", "SanaVideo"), _wan),
    **dict.fromkeys(
        ("HunyuanVideo", "HunyuanVideoFramepack", "HunyuanVideo15", "HunyuanImage", "MotifVideo"), _hunyuan
    ),
    **dict.fromkeys(("QwenImage", "NucleusMoEImage", "QwenImageControlNetModel"), _qwen),
    **dict.fromkeys(("Kandinsky5", "Kandinsky6", "Kandinsky6SR"), _kandinsky),
    **dict.fromkeys(("Cosmos", "CosmosControlNetModel"), _cosmos),
    **dict.fromkeys(("CogVideoX", "ConsisID"), _cogvideox),
    **dict.fromkeys(("LTX2Video", "SanaWMLTX2Refiner"), _ltx2),
    "FluxControlNetModel": _ids,
    "Lumina2": _lumina2,
    "ZImage": _zimage,
    "BriaFibo2": _zimage,
    "QwenImage21": _qwen21,
    "HiDreamImage": _hidream,
    "WanAnimate2": _wan_animate_2,
    "SanaWM": _sana_wm,
    "AnyFlow": _anyflow,
    "AnyFlowFAR": _anyflow_far,
    "Helios": _helios,
    "MiniMaxH3": _minimax_h3,
    "EasyAnimate": _easyanimate,
    "HunyuanDiT2DModel": _hunyuan_dit,
    "Allegro": _allegro,
    "CogView4": _cogview4,
    "GlmImage": _glm_image,
    "PRX": _prx,
    "JoyImageEdit": _joy,
    "JoyImageEditPlus": _joy_plus,
    "LuminaNextDiT2DModel": _lumina_next,
    "Cosmos3Omni": _cosmos3,
    "Ideogram4": _ideogram4,
    "AceStep": _ace_step,
    "StableAudioDiTModel": _stable_audio,
    "StableAudio3DiTModel": _stable_audio_3,
    "LongCatAudioDiT": _longcat_audio,
    "MiniMaxMusic3": _minimax_music,
    "OmniGen": _omnigen,
    "LTXVideo": _ltx,
}
"""The name of a class without the ending Transformer2DModel or the like, and the function that records it."""

_OTHERS: dict[str, dict[str, Callable[[Case], Rotated]]] = {
    "SanaWM": {"camera": _sana_camera},
    "Kandinsky5": {"text": _kandinsky_text},
    "Kandinsky6": {"text": _kandinsky_text, "audio": _kandinsky_audio},
    **{short: {"audio": _ltx2_audio, "audio_video": _ltx2_cross} for short in ("LTX2Video", "SanaWMLTX2Refiner")},
}
"""The other ropes of a class."""

_FILLED: dict[str, dict[str, Any]] = {
    "CogVideoX": {"use_rotary_positional_embeddings": True},  # by default, it rotates nothing
    "ConsisID": {"use_rotary_positional_embeddings": True},
    "HiDreamImage": {"axes_dims_rope": [64, 32, 32]},  # those of HiDream-I1; the defaults lack one
    "EasyAnimate": {"patch_size": 2},
    "PRX": {"axes_dim": [32, 32]},
    "Cosmos3Omni": {"rope_axes_dim": [24, 20, 20]},
    "Kandinsky6": {"audio_freqs_scaling": 0.64},  # invented, since the default is 1
    "LTX2Video": {"rope_type": "split"},  # that of LTX-2; the other class has the default, interleaved
    "OmniGen": {  # invented: the defaults have none
        "rope_scaling": {
            "type": "su",
            "short_factor": [1 + i / 64 for i in range(48)],
            "long_factor": [1 + i / 2 for i in range(48)],
        }
    },
}
"""Values that differ from the defaults of the constructor."""


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row of diffusers.json.

    Raises:
        CannotRecordError: diffusers is not installed.
        KeyError: the installed version does not have the class.
    """
    name = row["class_name"]
    short = name.partition("Transformer")[0]
    try:
        package = importlib.import_module("diffusers")
        embeddings = importlib.import_module("diffusers.models.embeddings")
    except ImportError as error:
        raise CannotRecordError("diffusers is not installed") from error
    if not hasattr(package, name):
        raise KeyError(name)
    cls = getattr(package, name)
    parameters = inspect.signature(cls.__init__).parameters
    defaults = {key: p.default for key, p in parameters.items()} | _FILLED.get(short, {})
    config = {key: value for key, value in defaults.items() if isinstance(value, (int, float, str, tuple, list, dict))}
    config = json.loads(json.dumps(config))  # lists instead of tuples
    heads = config["num_attention_heads"] if "LTX" in short else 1
    sizes = (heads, _head_dim(config))
    cases = [Case(sys.modules[cls.__module__], embeddings, config, *grid, *sizes) for grid in _GRIDS]
    audio = [replace(case, channels=config.get("audio_attention_head_dim", case.channels)) for case in cases]
    others = {key: _recorded(audio, one) for key, one in _OTHERS.get(short, {}).items()}
    return {
        "class_name": name,
        "config": {"_class_name": name, **config},
        "given": sorted(_FILLED.get(short, {})),
        **_recorded(cases, _CLASSES[short]),
        **({"others": others} if others else {}),
    }


def _head_dim(config: dict[str, Any]) -> int:
    """Return the number of channels of a head."""
    for key in ("attention_head_dim", "head_dim", "linear_head_dim"):
        if key in config:
            return int(config[key])
    widths, counts = (
        ("hidden_size", "embed_dim", "dit_dim", "dim"),
        ("num_attention_heads", "num_heads", "n_heads", "dit_heads"),
    )
    if any(key in config for key in counts):
        width, count = (next(config[key] for key in keys if key in config) for keys in (widths, counts))
        return int(width // count)
    return sum(config["axes_dims"])


def _recorded(cases: list[Case], rotated: Callable[[Case], Rotated]) -> dict[str, Any]:
    """Record q in the first grid and k in the second, at a few tokens, of the first and the last head."""
    heads, channels = cases[0].heads, cases[0].channels
    result: dict[str, Any] = {"heads": heads, "head_dim": channels}
    for (name, indices), case in zip(_TOKENS.items(), cases, strict=True):
        positions, rotate = rotated(case)
        tokens = positions.shape[-1]
        chosen = [int(i * tokens) if isinstance(i, float) else i % tokens for i in indices]
        x = torch.zeros(1, tokens, heads, channels)
        x[:, chosen] = golden(name, [1, heads, len(chosen), channels]).transpose(1, 2)
        result[f"{name}_positions"] = positions[..., chosen].tolist()
        result[f"{name}_rot"] = shortest(rotate(x)[0, chosen][:, sorted({0, heads - 1})].transpose(0, 1))
    return result


def name(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    return str(row["class_name"])


GOLDEN = files.Golden("diffusers.json", name, record, package="diffusers")
