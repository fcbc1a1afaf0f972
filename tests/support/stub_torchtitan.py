"""A stub of torchtitan 0.3.0 and spmd_types, with everything that the override uses.

It omits the arithmetic of the modules. tests/integrations/test_torchtitan_itself.py runs the real ones if they are
installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ropewalk.integrations

NAME = "ropewalk.integrations.torchtitan"


class Stub:
    """The modules of a new torchtitan, and the override that was imported with them."""

    module: Any

    def __init__(self) -> None:
        self.registry: dict[str, tuple[type, Any, bool]] = {}
        self.checking = False
        self.events: list[str] = []

        class RoPE(nn.Module):
            @dataclass(kw_only=True, slots=True)
            class Config:
                dim: int
                max_seq_len: int
                param_init: dict[str, Any] | None = None
                sharding_config: Any = None
                theta: float = 10000.0
                scaling: str = "none"
                scaling_factor: float = 8.0
                low_freq_factor: float = 1.0
                high_freq_factor: float = 4.0
                original_max_position_embeddings: int = 8192
                rope_factor: float = 1.0
                beta_fast: float = 32.0
                beta_slow: float = 1.0
                original_seq_len: int = 4096
                truncate: bool = True

            def __init__(self, config: Any) -> None:
                super().__init__()
                self.config = config
                self.register_buffer("cache", self._precompute_cache(), persistent=False)

            def _precompute_cache(self) -> Tensor:
                raise NotImplementedError

        class ComplexRoPE(RoPE):
            @dataclass(kw_only=True, slots=True)
            class Config(RoPE.Config):
                pass

        class CosSinRoPE(RoPE):
            @dataclass(kw_only=True, slots=True)
            class Config(RoPE.Config):
                pass

        class MRoPE(CosSinRoPE):
            @dataclass(kw_only=True, slots=True)
            class Config(CosSinRoPE.Config):
                mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])

        self.RoPE, self.ComplexRoPE, self.CosSinRoPE, self.MRoPE = RoPE, ComplexRoPE, CosSinRoPE, MRoPE

    def config(self, class_name: str, **values: Any) -> Any:
        """Create a config of the torchtitan class with this name."""
        return getattr(self, class_name).Config(**{"dim": 8, "max_seq_len": 16, **values})

    def build(self, class_name: str, **values: Any) -> Any:
        """Build the module that torchtitan builds from the config that the override returns."""
        made = self.module.rope(self.config(class_name, **values))
        return getattr(self.module, type(made).__qualname__.split(".")[0])(made)

    def modules(self) -> dict[str, ModuleType]:
        names = ("torchtitan", "torchtitan.config", "torchtitan.models", "torchtitan.models.common")
        found: dict[str, Any] = {name: ModuleType(name) for name in (*names, "torchtitan.models.common.rope")}
        found["torchtitan.config"].override, found["torchtitan.config"].derive = self.override, derive
        rope = found["torchtitan.models.common.rope"]
        rope.RoPE, rope.ComplexRoPE, rope.CosSinRoPE = self.RoPE, self.ComplexRoPE, self.CosSinRoPE
        spmd: Any = ModuleType("spmd_types")
        spmd.is_type_checking = lambda: self.checking
        spmd.no_typecheck, spmd.has_local_type = self.no_typecheck, lambda x: hasattr(x, "_local_type")
        spmd.assert_type_like = self.assert_type_like
        return {**found, "spmd_types": spmd}

    def override(self, *, target: type, description: str = "", exact: bool = False) -> Any:
        def register(factory: Any) -> Any:
            self.registry[f"{factory.__module__}.{factory.__name__}"] = (target, factory, exact)
            return factory

        return register

    @contextmanager
    def no_typecheck(self) -> Iterator[None]:
        self.checking = False
        self.events.append("unchecked")
        yield
        self.checking = True
        self.events.append("checked")

    def assert_type_like(self, x: Tensor, like: Any) -> None:
        assert self.checking
        x._local_type = like._local_type  # type: ignore[attr-defined]


def derive(source: Any, target: type) -> Any:
    return target(**{each.name: getattr(source, each.name) for each in fields(source)})


@contextmanager
def installed() -> Iterator[Stub]:
    """Import the override with the stub in place of torchtitan, and restore all modules afterwards."""
    stub = Stub()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] in ("torchtitan", "spmd_types")]:
            patch.delitem(sys.modules, name)
        patch.delitem(sys.modules, NAME, raising=False)
        patch.delattr(ropewalk.integrations, "torchtitan", raising=False)
        for name, module in stub.modules().items():
            patch.setitem(sys.modules, name, module)
        stub.module = importlib.import_module(NAME)
        try:
            yield stub
        finally:
            del sys.modules[NAME], ropewalk.integrations.torchtitan


def one_process(path: Any) -> Any:
    """Create a mesh of this process only, with gloo."""
    from torch.distributed import device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=0, world_size=1)
    return device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
