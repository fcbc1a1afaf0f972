"""Decode steps of a small model with each cache, and the logits that they must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import ropewalk
from ropewalk.tools.bench.decode_caches import DYNAMIC, OURS, Fill, Geometry

if TYPE_CHECKING:
    from ropewalk.tools.lab.model import LanguageModel

Step = Callable[[Tensor], Tensor]
"""One decode step, from tokens `[batch, 1]` to logits `[batch, vocabulary]`."""


def build_models(size: Geometry, dtype: torch.dtype) -> tuple[LanguageModel, Any]:
    """Build ropewalk's model and transformers' Qwen 3 with the same seeded weights."""
    import transformers

    from ropewalk.tools.lab.model import Block, LanguageModel, Size  # needs the packages of the lab

    config = size.config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Not .to(dtype), which would also cast the inverse frequencies of transformers.
        auto: Any = transformers.AutoModelForCausalLM
        reference = auto.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        ours = LanguageModel(
            Size(size.vocabulary, size.hidden, size.mlp, size.layers, size.heads, size.kv_heads, tied=True)
        )
    for module in ours.modules():
        if isinstance(module, Block):  # heads of another size, with norms
            module.self_attn = ropewalk.RotaryAttention(
                size.hidden, size.heads, num_kv_heads=size.kv_heads, head_dim=size.head_dim, qk_norm=config.rms_norm_eps
            )
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = config.rms_norm_eps
    head = {"lm_head.weight": reference.lm_head.weight}
    ours.to(dtype).load_state_dict({**reference.model.state_dict(), **head}, assign=True)
    ours.lm_head.weight = ours.embed_tokens.weight
    return ours.eval(), reference


def build_steps(
    fill: Fill, names: Sequence[str], models: tuple[LanguageModel, Any], tokens: Tensor
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
            logits: Tensor = model(tokens, rotation, cache=planned)
            return logits[:, -1]

        return step

    def with_transformers(cache: Any) -> Step:
        def step(tokens: Tensor) -> Tensor:
            # By position: transformers 5.24 renamed this argument.
            logits: Tensor = reference(tokens, None, None, cache, use_cache=True).logits[:, -1]
            return logits

        return step

    one_row = Fill(fill.size, 1, fill.held, fill.room, fill.dtype).build(DYNAMIC, content)
    expected = []
    for row in tokens[:, None]:
        expected.append(with_transformers(one_row)(row))
        one_row.crop(-1)
    steps = {}
    for name in names:
        cache = fill.build(name, content)
        steps[name] = with_ropewalk(cache) if name in OURS else with_transformers(cache)
    return steps, torch.cat(expected)
