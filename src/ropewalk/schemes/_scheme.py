"""Base classes of schemes. A scheme holds plain numbers, the rule that applies them to frequencies, and metadata.

Config readers, config writers, `explain` and plots use only the methods of these classes, so they need no code for
particular schemes.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from ropewalk import _checks
from ropewalk.schemes import default


class GgufFile(Protocol):
    """What `Scaling.from_gguf` needs of a GGUF file. Names of keys are without the prefix of the architecture.

    Attributes:
        row: what the architecture implies, a `GgufRow`.
        tensors: the factor tensors of the file, by name.
        original: the trained length, in tokens, or None.
        origins: maps the name of a field to the key that its value came from.
        warnings: sentences for the user.
    """

    row: Any
    tensors: Mapping[str, tuple[float, ...]]
    original: int | None
    origins: dict[str, str]
    warnings: list[str]

    def get(self, key: str) -> Any:
        """Return the value of a key, or None if it is missing."""

    def number(self, key: str, *, above: float | None = None, at_least: float | None = None) -> float | None:
        """Return the value of a key as a number within the bounds, or None if it is missing."""

    def full(self, key: str) -> str:
        """Return the whole name of a key."""

    def require(self, key: str, value: Any, why: str) -> Any:
        """Return the value of a key and record its origin. Raise a RopeError with the reason `why` if it is None."""

    def fix(self, text: str) -> str:
        """Return the fix for a key, or of an unknown architecture one that says nothing about what llama.cpp reads."""

    def attention_factor(self) -> float:
        """Return the factor of cos and sin that the file states, or 1."""

    def error(self, key: str, must: str, got: str, fix: str) -> _checks.RopeError:
        """Return an error about a key."""


_FIX = "Check the value. A scheme must validate its values in __post_init__ and raise a RopeError."


def build(scheme: type[Scaling], values: Mapping[str, Any]) -> Scaling:
    """Build a scheme from the values of a file.

    Args:
        scheme: the class.
        values: maps each field to its value.

    Raises:
        RopeError: the error that the scheme raises; or, if it raises another exception or is not hashable, an error
            with the name and values of the scheme.
    """
    try:
        instance = scheme(**values)
        hash(instance)  # a rope is hashable, so everything in it must be
    except _checks.RopeError:
        raise
    except Exception as e:  # a scheme from outside may raise anything
        arguments = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items()) or "no values"
        raise _checks.error_from(f"{scheme.__name__} could not be built from {arguments}", e, _FIX) from e
    return instance


class Scaling(ABC):
    """The type of `Rope.scaling`: a frozen dataclass of plain numbers whose fields are keys of a config.

    To write a scheme, subclass `Scheme`, or `LengthDependent` if the frequencies depend on the length of the sequence.
    Pass the class to `ropewalk.schemes.register` so that `from_config` finds it.

    A scheme validates its values in `__post_init__`. It raises a `RopeError` for invalid values and converts lists to
    tuples, because a Rope must be hashable.

    Attributes:
        rope_type: the scheme's name in a Hugging Face config (`rope_parameters["rope_type"]`).
        aliases: other names of the scheme in configs.
        in_configs: whether a config may contain `rope_type`. False for schemes that only code creates.
        keys_without_effect: maps each key that occurs in configs of this scheme but has no effect to the
            reason, as a phrase that follows "it", such as "records that the weights were fine-tuned".
        gguf: maps a field to its key in a GGUF file (without the architecture prefix) or to the name of its tensor. A
            scheme with an empty dict cannot occur as `rope.scaling.type` of a GGUF file. `from_gguf` reads them.
        whole_head: whether a field of the scheme sets how many channels of the head rotate. `Rope.rotary_dim` is then
            the whole head.
        per_axis: whether the scheme also applies to the frequencies of each axis (`Axes.axial`), where `rotary_dim` is
            the number of channels of one axis. The attention factor of the scheme must not depend on this number.
    """

    rope_type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    in_configs: ClassVar[bool] = True
    keys_without_effect: ClassVar[Mapping[str, str]] = {}
    gguf: ClassVar[Mapping[str, str]] = {}
    whole_head: ClassVar[bool] = False
    per_axis: ClassVar[bool] = False

    @abstractmethod
    def frequencies(self, base: float, rotary_dim: int) -> tuple[tuple[float, ...], float] | None:
        """Return inv_freq and the attention factor of a rope, or None if they depend on the length.

        Raises:
            RopeError: the scheme does not fit a rope with `rotary_dim` rotated channels.
        """

    @abstractmethod
    def at_length(self, n: int) -> Scaling | None:
        """Return the scheme for sequences of up to n tokens; None means no scaling."""

    @classmethod
    def class_for_keys(cls, keys: Collection[str]) -> type[Scaling]:
        """Return the class of the scheme that a config with this rope_type and these keys describes.

        A scheme overrides this if its rope_type has a second meaning: "dynamic" with the key alpha is `NTK`.

        Args:
            keys: the keys about rotation in the config.
        """
        return cls

    @classmethod
    def derived_fields(cls, stated: Mapping[str, Any], longest: int | None) -> dict[str, tuple[Any, str]]:
        """Return the fields that the config omits and that the deployed code derives from other keys.

        Args:
            stated: the fields that the config states, and their values.
            longest: max_position_embeddings of the config, in tokens, or None.

        Returns:
            A dict from each derived field to its value and to the key from which it is derived.
        """
        return {}

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Scaling | None:
        """Return the scheme that a GGUF file describes, or None if it describes no scaling.

        The file has the type `rope_type`. If `in_configs` is False, it has no type instead.
        """
        values: dict[str, Any] = {}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            name = cls.gguf.get(f.name)
            value = None if name is None else file.get(name)
            optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
            if name is not None and (value is not None or not optional):
                values[f.name] = file.require(name, value, f"{cls.__name__} needs it.")
                file.origins[f.name] = file.full(name)
        return build(cls, values)

    def to_hf(self) -> dict[str, Any]:
        """Return `rope_type` and the parameters for `rope_parameters` of a Hugging Face config, with tuples as lists.

        Raises:
            RopeError: a config cannot express this scheme.
        """
        if not self.in_configs:
            fix = "No config can express this scheme. Build the Rope in code."
            raise _checks.error(type(self).__name__, "a scheme must have a rope_type to be written", "none", fix)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        stated = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
        return {"rope_type": self.rope_type, **{key: value for key, value in stated.items() if value is not None}}

    def facts(self) -> dict[str, Any]:
        """Return `rope_type` and every field for `explain`. All values are valid JSON, which has no infinity."""
        return {"rope_type": self.rope_type, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @property
    def label(self) -> str:
        """The name of the scheme in plots and messages."""
        return type(self).__name__

    def trained_length(self, longest: int | None) -> int | None:
        """Return the length in tokens that the model was trained on before scaling, or None if it is not known.

        Args:
            longest: the model's length in tokens that the file states, or None.
        """
        return longest

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        """Return the warnings that a reader of the model's file should see, as sentences.

        Args:
            longest: the model's length in tokens that the file states, or None.
            named: the key of the file that states `longest`.
            trained: the length before scaling, in tokens, if the file states it outside the scheme.
        """
        return []

    def _set_number(self, field: str, *, optional: bool = False, **bounds: Any) -> None:
        """Replace a field by a float within the bounds of `_checks.number`. With `optional`, None remains None."""
        value = getattr(self, field)
        if value is not None or not optional:
            object.__setattr__(self, field, _checks.number(type(self).__name__, field, value, **bounds))

    def _set_length(self, field: str, *, at_least: int = 1) -> None:
        """Replace a field by a number of tokens."""
        length = _checks.length(type(self).__name__, field, getattr(self, field), at_least=at_least)
        object.__setattr__(self, field, length)

    def of_axes(self, count: int) -> Sequence[Scaling | None]:
        """Return the scheme of each axis."""
        return [self] * count

    @property
    def softmax_factor(self) -> float:
        """The factor by which DeepSeek's attention multiplies its softmax scale, dimensionless."""
        return 1.0

    def as_base(self, base: float, rotary_dim: int) -> float | None:
        """Return the base that gives the same frequencies without the scheme, or None if there is no such base.

        Config writers use this base if the config format cannot express the scheme.
        """
        return None

    def known_bugs(self, base: float, rotary_dim: int) -> Iterator[tuple[str, str, Sequence[float]]]:
        """Yield what wrong implementations of this scheme compute, by which `ropewalk check` names their bugs.

        Yields:
            The code of the bug in the report of `check`, a description in one sentence, and the wrong frequencies in
            radians per position, in which NaN stands for any frequency.
        """
        yield from ()


def reversed_ramp(code: str, plain: Sequence[float], factor: float) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Yield the bug, as in `known_bugs`, of a ramp that divides the fastest of the frequencies, and not the slowest."""
    if factor > 1.01:
        wrong = (plain[0] / factor, *[math.nan] * (len(plain) - 2), plain[-1])
        yield code, "Fast pairs are divided by the factor, and slow ones are not.", wrong


class Scheme(Scaling):
    """A scheme that scales the frequencies of a rope in the same way for sequences of every length."""

    @abstractmethod
    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the scaled frequencies: a tuple of rotary_dim // 2 finite numbers in radians per position."""

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies that deployed code computes in float32, rounding after each operation.

        `Rope.at` uses them unless its `numerics` is "exact". This default, for schemes without deployed code, rounds
        `inv_freq` once. A scheme whose deployed code works in float32 overrides this method. If a subclass of such a
        scheme overrides `inv_freq`, it must override this method as well.
        """
        numbers: list[float] = np.array(self.inv_freq(base, rotary_dim), dtype=np.float64).astype(np.float32).tolist()
        return tuple(numbers)

    def compute_attention_factor(self) -> float:
        """Return the factor that multiplies cos and sin, dimensionless. It is 1.0 unless a scheme overrides this."""
        return 1.0

    def frequencies(self, base: float, rotary_dim: int) -> tuple[tuple[float, ...], float]:
        """Return inv_freq and the attention factor."""
        return self.inv_freq(base, rotary_dim), self.compute_attention_factor()

    def at_length(self, n: int) -> Scheme:
        """Return this scheme, which is the same at every length."""
        return self


class OnTop(Scheme):
    """A scheme that changes the frequencies of another one, or the default ones, and keeps everything else of it.

    A subclass declares the field `scaling`: the other scheme, which is the same at every length; None for the default.
    """

    scaling: Scheme | None

    def __post_init__(self) -> None:
        if self.scaling is not None and not isinstance(self.scaling, Scheme):
            must = "scaling must be a scheme that is the same at every length, or None"
            raise _checks.error(type(self).__name__, must, _checks.shown(self.scaling), "Pass e.g. YaRN(...).")

    @property
    def before(self) -> Any:
        """What has the methods `inv_freq` and `inv_freq_float32` of the frequencies that this scheme changes."""
        return default if self.scaling is None else self.scaling

    def compute_attention_factor(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.compute_attention_factor()

    @property
    def softmax_factor(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.softmax_factor

    def trained_length(self, longest: int | None) -> int | None:
        return longest if self.scaling is None else self.scaling.trained_length(longest)

    def facts(self) -> dict[str, Any]:
        own = super().facts()
        own.pop("scaling")
        inner = {} if self.scaling is None else self.scaling.facts()
        return {**own, "on": inner.pop("rope_type", "default"), **inner}


class LengthDependent(Scaling):
    """A scheme whose frequencies depend on the sequence length. `at_length` returns the `Scheme` for a length."""

    @abstractmethod
    def at_length(self, n: int) -> Scheme | None:
        """Return the scheme for sequences of up to n tokens, or None for the default frequencies."""

    def frequencies(self, base: float, rotary_dim: int) -> None:
        """Run `check`, then return None because the frequencies depend on a length that is not known here."""
        self.check(rotary_dim)

    def check(self, rotary_dim: int) -> None:
        """Raise a RopeError if the scheme does not fit a rope with `rotary_dim` rotated channels."""


def check_scaling(who: str, value: object) -> None:
    """Raise a RopeError unless `value` is a scheme or None."""
    if value is not None and not isinstance(value, Scaling):
        raise _checks.error(
            who,
            "scaling must be a scheme of ropewalk.schemes or None",
            _checks.shown(value),
            "Pass one, e.g. Llama3(...), or read a config with from_config.",
        )


def frequencies(scheme: Scaling, base: float, rotary_dim: int) -> tuple[tuple[float, ...], float] | None:
    """Return the checked inv_freq and attention factor of a scheme, or None if they depend on the length.

    Raises:
        RopeError: the scheme raises a RopeError or another exception, or returns an invalid value.
    """
    name = _checks.shown(scheme)
    try:
        result = scheme.frequencies(base, rotary_dim)
    except _checks.RopeError:
        raise
    except Exception as e:  # a scheme from outside may raise anything
        raise _checks.error_from(f"Rope: the frequencies of {name} could not be computed", e, _FIX) from e
    if result is None and isinstance(scheme, LengthDependent):
        return None
    if not isinstance(result, tuple) or len(result) != 2:
        must = f"frequencies of {name} must return inv_freq and the attention factor"
        raise _checks.error("Rope", must, _checks.shown(result), "Subclass Scheme and override inv_freq.")
    inv_freq, factor = result
    pairs = rotary_dim // 2
    is_list = isinstance(inv_freq, tuple) and len(inv_freq) == pairs
    try:
        inv_freq = tuple(_checks.number("Rope", "inv_freq", w) for w in (inv_freq if is_list else (None,)))
    except _checks.RopeError:
        must = f"inv_freq of {name} must be a tuple of rotary_dim // 2 = {pairs} finite numbers"
        fix = "Return the frequency of each pair in radians per position, and 0.0 for a pair that does not rotate."
        raise _checks.error("Rope", must, _checks.shown(inv_freq), fix) from None
    return inv_freq, _checks.attention_factor("Rope", factor)


def check_class(scheme: object) -> None:
    """Raise a RopeError unless `schemes.register` can accept the class: a frozen dataclass with a rope_type."""
    who = "schemes.register"
    if not isinstance(scheme, type) or not issubclass(scheme, (Scheme, LengthDependent)):
        must, fix = "scheme must be a subclass of Scheme or LengthDependent", "Pass the class, not an instance."
        raise _checks.error(who, must, _checks.shown(scheme), fix)
    name, options = scheme.__name__, vars(scheme).get("__dataclass_params__")
    if options is None or not (options.frozen and options.eq):
        must = f"{name} must be a frozen dataclass that is compared by value"
        got = "a class without @dataclass" if options is None else f"{options!r:.80}"
        raise _checks.error(who, must, got, "Decorate it with @dataclass(frozen=True).")
    rope_type, aliases = getattr(scheme, "rope_type", None), scheme.aliases
    names = (rope_type, *aliases) if isinstance(aliases, tuple) else (None,)
    if not all(isinstance(word, str) and word for word in names):
        must = f"rope_type of {name} must be a non-empty string, and aliases a tuple of such strings"
        fix = 'Set rope_type = "..." in the class: it is the name of the scheme in configs.'
        raise _checks.error(who, must, f"{_checks.shown(rope_type)} and {_checks.shown(aliases)}", fix)
    of_dataclass: Any = scheme
    if any(field.name in ("rope_type", "aliases") for field in dataclasses.fields(of_dataclass)):
        must, fix = f"rope_type and aliases of {name} must belong to the class", "Write them without an annotation."
        raise _checks.error(who, must, "fields of the dataclass", fix)
