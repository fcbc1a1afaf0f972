"""Replacements for torchtitan's rotary modules that rotate q and k through ropewalk.

Enable them with a flag of torchtitan:

    torchrun ... -m torchtitan.train ... --override.imports ropewalk.integrations.torchtitan.rope

torchtitan imports this file only if the flag names it, so the file can import torchtitan at the top. The supported
configs have the fields that `torchtitan/models/common/rope.py` defines in torchtitan 0.3.0, which passes batches of
sequences, and at commit b5bcd76, which passes flattened tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

from ropewalk import schemes
from ropewalk._checks import choice, error
from ropewalk._layout import Layout, Pairing
from ropewalk.rope.rope import Rope

__all__ = ["RopewalkComplexRoPE", "RopewalkCosSinRoPE", "rope"]
__dir__ = __all__.copy

_WHO = "ropewalk in torchtitan"
_READ = frozenset(
    {
        *("dim", "theta", "scaling"),
        *("scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        *("rope_factor", "beta_fast", "beta_slow", "original_seq_len", "truncate"),
    }
)
# Fields that do not affect the angles: the length of torchtitan's table, under both of its names, and the fields of
# every module's config.
_NO_EFFECT = frozenset({"max_seq_len", "max_context_length", "param_init", "sharding_config"})


class _Ropewalk:
    """The base class of both replacements. It comes before torchtitan's class in the method resolution order.

    Each call computes the angles of its tokens. Nothing is cached between calls, so no rotation can be out of date.

    Attributes:
        rope: the `Rope` of the config.
        cache: torchtitan's buffer for its table. It is empty, so that code that reads angles from it fails instead of
            using angles that differ from those of ropewalk.
    """

    pairing: Pairing

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.rope = rope_of(config, self.pairing)

    def _precompute_cache(self) -> Tensor:
        return torch.empty(0)

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate q and k into new tensors, as torchtitan's modules do.

        Args:
            query: `[tokens, heads, dim]`, or `[batch, seq, heads, dim]`; plain or DTensor.
            key: as query, but it may have another number of heads.
            positions: int32 or int64, `[tokens]`, `[batch, seq]` or `[1, seq]`; plain or DTensor. Any values are
                allowed. If query is a DTensor, plain positions are those of the tokens of all ranks. None means
                0, 1, 2, ...

        Returns:
            Rotated query and key, with the shapes, dtypes, placements and SPMD types of the arguments.

        Raises:
            RopeError: a shape or dtype is none of these.
        """
        if not spmd.is_type_checking():
            return self._rotate(query, key, positions)
        # The type checker does not know the kernels. A rotation keeps every SPMD type, because it mixes channels only,
        # which are never sharded.
        with spmd.no_typecheck():
            rotated = self._rotate(query, key, positions)
        for tensor, like in zip(rotated, (query, key), strict=True):
            if spmd.has_local_type(like):
                spmd.assert_type_like(tensor, like)
        return rotated

    def _rotate(self, query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(query.shape[-3], device=query.device)
        layout: Layout = "thd" if query.ndim == 3 else "bshd"
        return self.rope.at(positions, device=query.device)(query, key, layout=layout)

    def extra_repr(self) -> str:
        """Return the rope as text."""
        return repr(self.rope)


class RopewalkComplexRoPE(_Ropewalk, ComplexRoPE):  # type: ignore[misc]
    """The replacement for torchtitan's `ComplexRoPE`, which pairs neighbouring channels (Llama, DeepSeek)."""

    pairing: Pairing = "interleaved"

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):  # type: ignore[misc]
        """The config of the replacement, with the fields of `ComplexRoPE.Config`."""


class RopewalkCosSinRoPE(_Ropewalk, CosSinRoPE):  # type: ignore[misc]
    """The replacement for torchtitan's `CosSinRoPE`, which pairs channels half a head apart (Qwen 3, gpt-oss)."""

    pairing: Pairing = "half"

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        """The config of the replacement, with the fields of `CosSinRoPE.Config`."""


_MODULES: dict[type, Any] = {ComplexRoPE.Config: RopewalkComplexRoPE, CosSinRoPE.Config: RopewalkCosSinRoPE}


@override(target=RoPE.Config, description="rotary embeddings by ropewalk")  # type: ignore[untyped-decorator]
def rope(config: Any) -> Any:
    """Replace the config of a rotary module. torchtitan calls this for every rotary module before it builds the model.

    Args:
        config: a `ComplexRoPE.Config` or a `CosSinRoPE.Config`.

    Returns:
        The config of the replacement, with the same values.

    Raises:
        RopeError: the config is of any other class, such as the `MRoPE` of Qwen 3.5, it has an unknown field or lacks
            one, or no `Rope` supports one of its values.
    """
    module = _MODULES.get(type(config))
    if module is None:
        names = " or ".join(cls.__qualname__ for cls in _MODULES)
        fix = "Train this model without the override."
        raise error(_WHO, f"a rotary module must be configured by {names}", type(config).__qualname__, fix)
    rope_of(config, module.pairing)
    return derive(config, module.Config)


def rope_of(config: Any, pairing: Pairing) -> Rope:
    """Build the rope of a config of torchtitan.

    Its attention factor is 1, because models of torchtitan scale their scores instead.

    Args:
        config: a `RoPE.Config`.
        pairing: the pairing of the module: "interleaved" for `ComplexRoPE`, "half" for `CosSinRoPE`.

    Raises:
        RopeError: a field is unknown or missing, or no `Rope` supports a value.
    """
    names = {field.name for field in fields(config)} - _NO_EFFECT
    if names != _READ:
        differing = [*(f"also {name}" for name in sorted(names - _READ)), *(f"no {n}" for n in sorted(_READ - names))]
        fix = "This version of torchtitan is not supported. Train this model without the override."
        raise error(_WHO, f"the fields of {type(config).__qualname__} must be known", ", ".join(differing), fix)
    return Rope(head_dim=config.dim, base=config.theta, pairing=pairing, scaling=_scaling(config))


def _scaling(config: Any) -> schemes.Scaling | None:
    choice(_WHO, "scaling", config.scaling, ("none", "llama", "yarn"))
    if config.scaling == "llama":
        return schemes.Llama3(
            factor=config.scaling_factor,
            low_freq_factor=config.low_freq_factor,
            high_freq_factor=config.high_freq_factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
        )
    if config.scaling == "yarn" and config.rope_factor > 1.0:  # a factor up to 1 changes nothing in torchtitan
        return schemes.YaRN(
            factor=config.rope_factor,
            original_max_position_embeddings=config.original_seq_len,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            truncate=config.truncate,
            attention_factor=1.0,
        )
    return None
