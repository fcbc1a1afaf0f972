"""engine_rules/rounding_of_TRAINER.json: in which dtypes a trainer's own code rotates bfloat16 q, on the CPU.

A row has the dtypes of cos and sin and of the arithmetic with which float32 products of positions and frequencies give
the same bits, as in `roundings`. The fused rotation of Transformer Engine needs a GPU, so it is not recorded.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import automodel_models, files, megatron_models
from .model import CannotRecordError
from .model_files import references
from .roundings import _by

_POSITIONS = torch.tensor([[0, 1, 17, 4095, 100_000]])
Rotation = Callable[[Tensor], Tensor]


def megatron(config: dict[str, Any]) -> tuple[Tensor, float, Rotation]:
    """Return the frequencies, the attention factor, and the rotation of q [1, heads, positions, channels]."""
    provider = megatron_models.bridge(config).to_megatron_provider(load_weights=False)
    table = megatron_models.rotary(provider)(int(_POSITIONS.max()) + 1)
    angles, mscale = table if isinstance(table, tuple) else (table, 1.0)
    inv_freq = angles[1, 0, 0]
    mla = bool(provider.multi_latent_attention)
    inv_freq = inv_freq[: inv_freq.numel() // 2] if not provider.rotary_interleaved else inv_freq[::2]

    def rotate(q: Tensor) -> Tensor:
        function = megatron_models.megatron().rotate
        interleaved = provider.rotary_interleaved and not mla
        rotated = function(q.permute(2, 0, 1, 3), angles[_POSITIONS[0]], interleaved, mla, mscale)
        return rotated.permute(1, 2, 0, 3)

    return inv_freq, mscale, rotate


def automodel(config: dict[str, Any]) -> tuple[Tensor, float, Rotation]:
    """Return the frequencies, the attention factor, and the rotation of q [1, heads, positions, channels]."""
    modules = automodel_models.automodel()
    model, calls = automodel_models.build(config)
    if calls:
        frequencies = modules.deepseek.precompute_freqs_cis(*calls[-1][0], **calls[-1][1]).cpu()
        table = modules.deepseek.freqs_cis_from_position_ids(_POSITIONS, frequencies)
        return frequencies, 1.0, lambda q: modules.deepseek.apply_rotary_emb(q.transpose(1, 2), table).transpose(1, 2)
    rotary = automodel_models.rotary_of(model)
    if isinstance(rotary, modules.gpt_oss.RotaryEmbedding):
        rotary.device = None
        factor, frequencies = rotary._compute_concentration_and_inv_freq()
        table = modules.gpt_oss.position_ids_to_freqs_cis(rotary, _POSITIONS, for_fused_rope=False)
        rotate = modules.gpt_oss._apply_rotary_emb_qk
        return frequencies, factor, lambda q: rotate(q.transpose(1, 2), q.transpose(1, 2), table)[0].transpose(1, 2)
    functions = importlib.import_module(f"{automodel_models.MODELS}.llama.rope_utils")
    fresh = type(rotary)(model.config)
    cos, sin = fresh(torch.zeros(1, 1, 5, 1), _POSITIONS)
    return fresh.inv_freq, fresh.attention_scaling, lambda q: functions.apply_rotary_pos_emb(q, q, cos, sin)[0]


def record(row: dict[str, Any], trainer: Callable[[dict[str, Any]], tuple[Tensor, float, Rotation]]) -> dict[str, Any]:
    """Record a row again: the model_type, and the dtypes of the table and of the rotation."""
    config = {**references(row["model_type"])[0]}
    for key in ("rope_scaling", "rope_parameters"):
        config.pop(key, None)
    inv_freq, factor, rotate = trainer({**config, "rope_theta": 10_000.0})
    torch.manual_seed(0)
    q = torch.randn(1, 2, _POSITIONS.numel(), 2 * inv_freq.numel()).to(torch.bfloat16)
    rotated = rotate(q)
    angles = _POSITIONS[0][:, None].float() * inv_freq
    cos, sin = angles.cos() * factor, angles.sin() * factor
    dtypes = ("bfloat16", "float32")
    same = [
        (table, rotation)
        for table, rotation in itertools.product(dtypes, dtypes)
        if any(torch.equal(rotated, one) for one in _by(q, cos, sin, table, rotation))
        and (table, rotation) != ("float32", "bfloat16")  # `_by` rounds this table as well
    ]
    if len(same) != 1:
        raise CannotRecordError(f"its bits are those of {same}")
    return {"model_type": row["model_type"], "table": same[0][0], "rotation": same[0][1]}


GOLDEN = [
    files.Golden(
        f"engine_rules/rounding_of_{trainer.__name__}.json",
        lambda row: str(row["model_type"]),
        lambda row, trainer=trainer: record(row, trainer),  # type: ignore[misc]
        package=package,
    )
    for trainer, package in ((megatron, "megatron-bridge"), (automodel, "nemo-automodel"))
]
