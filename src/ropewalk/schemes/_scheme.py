"""What every scheme is: plain numbers, the rule by which they change the frequencies, and all that is known about it.

A config reader, `explain`, a plot and a writer ask the scheme. None of them knows which schemes there are.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ropewalk import _checks


class Scaling(ABC):
    """What `Rope.scaling` may be: a frozen dataclass of plain numbers whose fields are keys of a config.

    Subclass `Scheme` where the frequencies are known, and `LengthDependent` where they depend on the length of the
    sequence. `ropewalk.schemes.register` makes configs find it.

    A scheme checks its values in `__post_init__`: it raises a `RopeError` for what cannot be, and makes tuples of
    lists, since a Rope is hashable.

    Attributes:
        rope_type: the name in a config of Hugging Face (`rope_parameters["rope_type"]`).
        aliases: other names of it in configs.
        in_configs: whether `rope_type` may stand in a config; False where only code makes it.
        idle: keys without effect that files of this scheme hold beside its fields → what they are.
        gguf: field → its key in a GGUF file, without the architecture before it; or the tensor, for those of llama.cpp
            that have one. Where it says something, `rope.scaling.type` may be `rope_type`.
        whole_head: whether the share of the head that rotates is a field of the scheme, so that `Rope.rotary_dim` is
            the whole head.
        per_axis: whether it is meant for frequencies of each axis too (`Axes.axial`), where `rotary_dim` is the number
            of channels of one axis. Its attention factor is then the same for any number.
    """

    rope_type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    in_configs: ClassVar[bool] = True
    idle: ClassVar[Mapping[str, str]] = {}
    gguf: ClassVar[Mapping[str, str]] = {}
    whole_head: ClassVar[bool] = False
    per_axis: ClassVar[bool] = False

    @abstractmethod
    def frequencies(self, base: float, rotary_dim: int) -> tuple[tuple[float, ...], float] | None:
        """inv_freq and attention factor of a rope; None where they depend on the length.

        Raises:
            RopeError: the scheme cannot be that of a rope with so many rotated channels.
        """

    @abstractmethod
    def at_length(self, n: int) -> Scaling | None:
        """What holds for sequences of up to n tokens; None is no scaling."""

    @classmethod
    def meant(cls, keys: Collection[str]) -> type[Scaling]:
        """The scheme that a config means by this rope_type, given its keys: this one, but for "dynamic" with alpha."""
        return cls

    @classmethod
    def implied(cls, given: Mapping[str, Any], longest: int | None) -> dict[str, tuple[Any, str]]:
        """Fields that a config may leave out, since the deployed code takes them from elsewhere: value, and where from.

        Args:
            given: the fields that the config states.
            longest: its max_position_embeddings, in tokens, or None.
        """
        return {}

    def to_hf(self) -> dict[str, Any]:
        """`rope_type` and parameters for `rope_parameters` of a config of Hugging Face; lists for tuples.

        Raises:
            RopeError: no config can say it.
        """
        if not self.in_configs:
            cure = "Build the Rope in code: no config can say it."
            raise _checks.error(type(self).__name__, "a scheme must have a rope_type to be written", "none", cure)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        stated = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
        return {"rope_type": self.rope_type, **{key: value for key, value in stated.items() if value is not None}}

    def facts(self) -> dict[str, Any]:
        """`rope_type` and every field, as `explain` gives them: ready for JSON, which has no infinity."""
        return {"rope_type": self.rope_type, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @property
    def label(self) -> str:
        """What pictures and messages call it."""
        return type(self).__name__

    def trained_length(self, longest: int | None) -> int | None:
        """Tokens the model was trained on before scaling, given the longest of its file; None where nothing says it."""
        return longest

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        """What a reader of a model's file should know, in words.

        Args:
            longest: the model's length in tokens as the file says, or None.
            named: the key that says so.
            trained: the length before scaling, in tokens, where the file states it beside the scheme.
        """
        return []

    @property
    def softmax_factor(self) -> float:
        """What DeepSeek's attention multiplies its softmax scale by, dimensionless."""
        return 1.0

    def as_base(self, base: float, rotary_dim: int) -> float | None:
        """The base that alone gives the same rope, or None: for configs that cannot say the scheme."""
        return None


class Scheme(Scaling):
    """A rule that changes the frequencies of a rope in the same way for sequences of every length."""

    @abstractmethod
    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair, scaling applied: a tuple of rotary_dim // 2 finite numbers."""

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """The same as deployed code makes them, each operation rounded to float32; for `numerics` of `Rope.at`.

        Here, for a scheme that nobody has deployed: those of `inv_freq`, rounded once. A scheme whose deployed code
        works in float32 says so in its own file; a subclass of one that changes `inv_freq` changes this too.
        """
        numbers: list[float] = np.array(self.inv_freq(base, rotary_dim), dtype=np.float64).astype(np.float32).tolist()
        return tuple(numbers)

    def table_factor(self) -> float:
        """What multiplies cos and sin, dimensionless; 1.0 unless a scheme says otherwise."""
        return 1.0

    def frequencies(self, base: float, rotary_dim: int) -> tuple[tuple[float, ...], float]:
        """inv_freq and attention factor."""
        return self.inv_freq(base, rotary_dim), self.table_factor()

    def at_length(self, n: int) -> Scheme:
        """This scheme: it is the same at every length."""
        return self


class LengthDependent(Scaling):
    """A rule whose frequencies are known only for a length: `Rope.at_length` replaces it by a `Scheme`."""

    @abstractmethod
    def at_length(self, n: int) -> Scheme | None:
        """The scheme for sequences of up to n tokens, or None for the default frequencies."""

    def frequencies(self, base: float, rotary_dim: int) -> None:
        """None, after `check`."""
        self.check(rotary_dim)

    def check(self, rotary_dim: int) -> None:
        """Raise if this cannot be the scheme of a rope with so many rotated channels."""


def check_scaling(who: str, value: object) -> None:
    """Raise unless `value` is a scheme or None."""
    if value is not None and not isinstance(value, Scaling):
        raise _checks.error(
            who,
            "scaling must be a scheme of ropewalk.schemes or None",
            _checks.shown(value),
            "Build one, e.g. Llama3(...), or read a config with from_config.",
        )
