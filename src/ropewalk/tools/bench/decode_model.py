"""Decode steps of a small model with each cache, and the logits that they must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import ropewalk
from ropewalk.tools.bench.decode_caches import DYNAMIC, OURS, Fill, Geometry

Step = Callable[[Tensor], Tensor]
"""One decode step, from tokens `[batch, 1]` to logits `[batch, vocabulary]`."""


class Model(torch.nn.Module):
    """The Qwen 3 of transformers with ropewalk's attention instead of its own, and the same weights."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.reference, config = reference, reference.config
        heads, kv_heads, norm = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        options = {"num_kv_heads": kv_heads, "head_dim": config.head_dim, "qk_norm": norm}
        own = [ropewalk.RotaryAttention(config.hidden_size, heads, **options) for _ in reference.model.layers]
        for attention, layer in zip(own, reference.model.layers, strict=True):
            attention.load_state_dict(layer.self_attn.state_dict(), assign=True)
        self.attentions = torch.nn.ModuleList(own)

    def forward(self, tokens: Tensor, rotation: ropewalk.Rotation, *, cache: Any = None) -> Tensor:
        """Compute the logits after each token, `[batch, seq, vocabulary]`. `cache` is a step of a cache of ropewalk."""
        model = self.reference.model
        x = model.embed_tokens(tokens)
        for i, (layer, attention) in enumerate(zip(model.layers, self.attentions, strict=True)):
            x = x + attention(layer.input_layernorm(x), rotation, cache=None if cache is None else cache.layer(i))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return cast(Tensor, self.reference.lm_head(model.norm(x)))


def build_models(size: Geometry, dtype: torch.dtype) -> tuple[Model, Any]:
    """Build transformers' Qwen 3 with seeded weights, and the same model with ropewalk's attention."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Not .to(dtype), which would also cast the inverse frequencies of transformers.
        auto: Any = transformers.AutoModelForCausalLM
        reference = auto.from_config(size.config(), dtype=dtype, attn_implementation="sdpa").eval()
    return Model(reference), reference


def build_steps(
    fill: Fill, names: Sequence[str], models: tuple[Model, Any], tokens: Tensor
) -> tuple[dict[str, Step], Tensor]:
    """Build a decode step for each of the named caches.

    Returns:
        The steps, and the logits that each must give for `tokens` `[batch, 1]` at first: those of transformers with a
        DynamicCache, computed row by row.
    """
    model, reference = models
    rope = ropewalk.from_config(reference.config.to_dict()).rope
    content = fill.draw()

    def with_ropewalk(cache: Any) -> Step:
        is_first = True

        def step(tokens: Tensor) -> Tensor:
            nonlocal is_first
            planned = cache.step(1)
            # The first step is checked and not timed. It has the angles of transformers, which are less exact than
            # ropewalk's at far positions: the difference would show in the logits.
            rotation = rope.at(planned.positions, numerics="float32") if is_first else planned.rotation(rope)
            is_first = False
            return cast(Tensor, model(tokens, rotation, cache=planned)[:, -1])

        return step

    def with_transformers(cache: Any) -> Step:
        def step(tokens: Tensor) -> Tensor:
            # By position: transformers 5.24 renamed this argument.
            return cast(Tensor, reference(tokens, None, None, cache, use_cache=True).logits[:, -1])

        return step

    one_row = Fill(fill.size, 1, fill.held, fill.room, fill.dtype).build(DYNAMIC, content)
    expected = []
    for row in tokens[:, None]:
        expected.append(with_transformers(one_row)(row))
        one_row.crop(-1)
    caches = {name: fill.build(name, content) for name in names}
    steps = {name: (with_ropewalk if name in OURS else with_transformers)(cache) for name, cache in caches.items()}
    return steps, torch.cat(expected)
