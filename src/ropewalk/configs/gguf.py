"""GGUF (llama.cpp): keys and tensors of one file, read as llama.cpp reads them.

Source of what keys mean: llama.cpp as vendored in llama-cpp-python 0.3.36: src/llama-model.cpp (load_hparams,
get_rope_factors), src/llama-context.cpp (the attention factor of YaRN), src/models/*.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ropewalk._checks import MAX_HEAD_DIM, RopeError, check_pairing, nearest, number, shown
from ropewalk.configs import gguf_header
from ropewalk.configs.fields import Fields
from ropewalk.configs.gguf_architectures import HALF, INTERLEAVED, SOURCE, WHOLE_HEAD
from ropewalk.configs.gguf_keys import Keys
from ropewalk.configs.gguf_scheme import SchemeReader, warn
from ropewalk.configs.model_ropes import ModelRopes, QueryScale
from ropewalk.rope import Pairing, Rope
from ropewalk.schemes import Linear, PerPair, Scheme


def read(path: Path, *, pairing: str | None, base: float | None) -> ModelRopes:
    """The ropes of a GGUF file; see `from_config` for arguments and errors."""
    try:
        values, tensors = gguf_header.read(path)
    except RopeError:
        raise
    except (OSError, ValueError) as e:
        raise RopeError(f"{path}: cannot be read: {e}.") from e
    return _Reader(Keys(Fields(values, str(path))), tensors, pairing, base).read()


class _Reader:
    """One file being read."""

    def __init__(
        self, keys: Keys, tensors: Mapping[str, tuple[float, ...]], pairing: str | None, base: float | None
    ) -> None:
        self.keys = keys
        self.tensors = tensors
        self.passed_pairing = pairing
        self.passed_base = None if base is None else number("from_config", "base", base, above=1.0)

    def read(self) -> ModelRopes:
        keys = self.keys
        pairing = self._pairing()
        keys.refuse_unsupported()
        layers = keys.fields.layers((keys.key("block_count"),))
        keys.origins["layers"] = keys.key("block_count")
        head_dim = self._head_dim()
        rotary_dim, base = self._rotary_dim(head_dim), self._base()
        query_scale = self._query_scale()
        with keys.fields.named():
            scheme = SchemeReader(keys, self.tensors).read()
            rope = Rope(head_dim, base, pairing, rotary_dim=rotary_dim, scaling=scheme)
        warn(keys, scheme)
        return ModelRopes(
            layers=(rope,) * layers,
            model_type=keys.architecture,
            source=keys.fields.source,
            trained_length=self._trained_length(scheme),
            max_position_embeddings=keys.longest,
            query_scale=query_scale,
            origins=keys.origins,
            warnings=tuple(keys.warnings),
        )

    def _pairing(self) -> Pairing:
        if self.passed_pairing is not None:
            check_pairing("from_config", self.passed_pairing)
        if not self.keys.is_known:
            if self.passed_pairing is None:
                raise self.keys.fields.error(
                    "general.architecture",
                    "it must be one that ropewalk knows",
                    shown(self.keys.architecture),
                    f"The file does not say how it rotates.{nearest(self.keys.architecture, INTERLEAVED | HALF)} If "
                    'all layers rotate alike, pass pairing="half" (NEOX in llama.cpp) or pairing="interleaved" (NORM).',
                )
            self.keys.origins["pairing"] = "passed by the caller"
            return cast(Pairing, self.passed_pairing)
        pairing: Pairing = "interleaved" if self.keys.architecture in INTERLEAVED else "half"
        if self.passed_pairing not in (None, pairing):
            raise self.keys.fields.error(
                "general.architecture",
                f"{self.keys.architecture} has pairing {pairing!r} ({SOURCE})",
                f"pairing={self.passed_pairing!r}",
                "For weights permuted to another pairing, use dataclasses.replace(rope, pairing=...).",
            )
        name = "NORM" if pairing == "interleaved" else "NEOX"
        self.keys.origins["pairing"] = f"general.architecture {self.keys.architecture}: {name} ({SOURCE})"
        return pairing

    def _head_dim(self) -> int:
        own, width, heads = (
            self.keys.key(n) for n in ("attention.key_length", "embedding_length", "attention.head_count")
        )
        if self.keys.fields.has(own):
            self.keys.origins["head_dim"] = own
            return self.keys.fields.size(own, at_most=MAX_HEAD_DIM)
        cure = f"It is needed where {own} is not given."
        self.keys.origins["head_dim"] = f"{width} / {heads}"
        return self.keys.fields.head_width((width,), (heads,), own, cure=cure)

    def _rotary_dim(self, head_dim: int) -> int:
        key = self.keys.key("rope.dimension_count")
        if not self.keys.fields.has(key):
            self.keys.origins["rotary_dim"] = "the whole head"
            return head_dim
        self.keys.origins["rotary_dim"] = key
        rotary_dim = self.keys.fields.size(key)
        if self.keys.architecture in WHOLE_HEAD and rotary_dim != head_dim:
            raise self.keys.fields.error(
                key,
                f"{self.keys.architecture} turns the whole head of {head_dim}",
                str(rotary_dim),
                "llama.cpp refuses it.",
            )
        return rotary_dim

    def _base(self) -> float:
        key = self.keys.key("rope.freq_base")
        if self.keys.fields.has(key):
            self.keys.origins["base"] = key
            return self.keys.fields.base(key, self.keys.fields.get(key), self.passed_base)
        if self.passed_base is not None:
            self.keys.origins["base"] = "passed by the caller"
            return self.passed_base
        if self.keys.architecture != "llama":
            cure = "llama.cpp would take 10000, which may not be the model's: pass base=... to from_config."
            raise self.keys.fields.error(key, "the base must be given", "none", cure)
        self.keys.origins["base"] = "implied: files of Llama 1 and 2 have no rope.freq_base"
        self.keys.warnings.append(
            f"the file states no {key}; llama.cpp takes 10000. In a newer model than Llama 2 it was lost."
        )
        return 10_000.0

    def _trained_length(self, scheme: Scheme | None) -> int | None:
        if self.keys.original is not None:
            return self.keys.original
        # What these were trained on before is not in the file: context_length may be the length after scaling.
        return None if isinstance(scheme, Linear | PerPair) else self.keys.longest

    def _query_scale(self) -> QueryScale | None:
        """attention.temperature_scale of Ministral 3: q grows with the position."""
        if self.keys.architecture != "mistral3":
            return None
        beta = self.keys.number("attention.temperature_scale", at_least=0.0)
        if not beta:
            return None
        length = self.keys.original or self.keys.longest
        length = self.keys.needed(
            "rope.scaling.original_context_length", length, "attention.temperature_scale needs it."
        )
        self.keys.origins["query_scale"] = self.keys.key("attention.temperature_scale")
        return QueryScale(beta=beta, original_max_position_embeddings=cast(int, length))
