"""A stub of vLLM with everything that the plugin uses: registry, rotary layers, forward context, config, workers.

The names and the order of calls are those of vLLM 0.32. The arithmetic is PyTorch's. tests/engines runs vLLM itself.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Stub:
    """The modules of a new vLLM."""

    def __init__(self, max_model_len: int) -> None:
        self.registry: dict[str, type] = {}
        self.context: Any = None
        registry = self.registry

        class CustomOp(nn.Module):
            name = "rotary_embedding"

            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return super().__new__(registry.get(cls.__name__, cls))

            def forward(self, *args: Any) -> Any:
                return self.forward_native(*args)  # type: ignore[operator]

        class RotaryEmbedding(CustomOp):
            def __init__(
                self, head_size: int, rotary_dim: int, rows: int, base: float, is_neox_style: bool, dtype: torch.dtype
            ) -> None:
                super().__init__()
                self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
                self.max_position_embeddings, self.is_neox_style = rows, is_neox_style
                self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache().to(dtype), persistent=False)

            def _inv_freq(self) -> Tensor:
                return 1.0 / self.base ** (torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim)

            def _compute_cos_sin_cache(self) -> Tensor:
                angles = torch.outer(torch.arange(self.max_position_embeddings).float(), self._inv_freq())
                return torch.cat((angles.cos(), angles.sin()), dim=-1)

            def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
                return "by vLLM"

            def extra_repr(self) -> str:
                return f"head_size={self.head_size}"

        class LinearScalingRotaryEmbedding(RotaryEmbedding):
            def __init__(self, *args: Any, scaling_factors: list[float]) -> None:
                self.scaling_factors = scaling_factors
                super().__init__(*args)

            def _inv_freq(self) -> Tensor:
                return super()._inv_freq() / self.scaling_factors[0]

        class DeepseekScalingRotaryEmbedding(RotaryEmbedding):
            scaling_factor, beta_fast, beta_slow, mscale = 1.0, 32, 1, 1.0

        class NTKScalingRotaryEmbedding(RotaryEmbedding):
            """A layer whose table does not agree with its attributes."""

            scaling_factor, mixed_b = 4.0, None

        class Phi3LongRoPEScaledRotaryEmbedding(nn.Module):
            """A layer that is not a CustomOp, so only its name can be replaced."""

        class MRotaryEmbedding(RotaryEmbedding):
            """A layer whose positions have three axes, and whose table has four times the requested rows."""

            mscale, beta_fast, beta_slow, truncate = 1.138629436111989, 32, 1, True

            def __init__(self, *args: Any, mrope_section: list[int], interleaved: bool, factor: float | None = None):
                head, rotary_dim, rows, *others = args
                self.scaling_factor = factor
                super().__init__(head, rotary_dim, 4 * rows, *others)
                self.mrope_section, self.mrope_interleaved = mrope_section, interleaved

        class FourierRotaryEmbedding(RotaryEmbedding):
            """A layer that is not supported."""

        package = ModuleType("rotary_embedding")
        for cls in (
            RotaryEmbedding,
            LinearScalingRotaryEmbedding,
            DeepseekScalingRotaryEmbedding,
            NTKScalingRotaryEmbedding,
            Phi3LongRoPEScaledRotaryEmbedding,
            MRotaryEmbedding,
            FourierRotaryEmbedding,
        ):
            cls.__module__ = "vllm.model_executor.layers.rotary_embedding"
            setattr(package, cls.__name__, cls)
        for name in ("DynamicNTKScaling", "DynamicNTKAlpha", "Llama3", "YaRNScaling", "Gemma4"):
            members = {"__module__": RotaryEmbedding.__module__}
            setattr(package, f"{name}RotaryEmbedding", type(f"{name}RotaryEmbedding", (RotaryEmbedding,), members))
        package._ROPE_DICT = {}  # type: ignore[attr-defined]
        self.package: Any = package
        self.worker = type("WorkerBase", (), {})
        self.config = config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len), additional_config={}
        )
        self.modules = {
            "vllm": SimpleNamespace(forward_context=self._forward_context()),
            "vllm.config": SimpleNamespace(get_current_vllm_config=lambda: config),
            "vllm.forward_context": self._forward_context(),
            "vllm.model_executor.custom_op": SimpleNamespace(op_registry_oot=registry, CustomOp=CustomOp),
            "vllm.model_executor.layers.rotary_embedding": package,
            "vllm.v1.worker.worker_base": SimpleNamespace(WorkerBase=self.worker),
        }

    def _forward_context(self) -> Any:
        return SimpleNamespace(
            is_forward_context_available=lambda: self.context is not None, get_forward_context=lambda: self.context
        )

    @contextmanager
    def forward_pass(self) -> Any:
        """Start a new forward context, as vLLM does in each pass."""
        self.context = SimpleNamespace(additional_kwargs={})
        try:
            yield
        finally:
            self.context = None


def install(monkeypatch: pytest.MonkeyPatch, *, max_model_len: int = 128) -> Stub:
    """Create a stub that `import vllm` finds."""
    stub = Stub(max_model_len)
    for name, module in stub.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return stub
