"""Checks of schemes from outside ropewalk: the class, its handling of invalid values, and its return values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

import gguf_files
from each import each
from ropewalk import Rope, RopeError, from_config, schemes
from ropewalk.schemes import LengthDependent, Scheme, default


@dataclass(frozen=True)
class Careless(Scheme):
    """A scheme that does not validate its values."""

    rope_type: ClassVar[str] = "careless"
    gguf: ClassVar[dict[str, str]] = {"strength": "rope.scaling.strength"}
    strength: float = 1.0
    table: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", tuple(self.table))

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        return tuple(w / self.strength for w in default.inv_freq(base, rotary_dim))


@dataclass(frozen=True)
class Halting(LengthDependent):
    """A scheme whose __post_init__ divides by its value."""

    rope_type: ClassVar[str] = "halting"
    every: int
    more: tuple[int, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", 10 // self.every)

    def at_length(self, n: int) -> None:
        return None


CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}


@pytest.fixture
def registered() -> Iterator[None]:
    added = [schemes.register(Careless), schemes.register(Halting)]
    yield
    for scheme in added:
        schemes.unregister(scheme)


def written(path: Path, **rope: Any) -> Path:
    path.write_text(json.dumps(CONFIG | {"rope_parameters": {"rope_theta": 1e4, **rope}}))
    return path


@pytest.mark.usefixtures("registered")
def test_errors_of_a_scheme_name_the_file_the_scheme_and_the_value(tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    def refused(case: tuple[dict[str, Any], str]) -> None:
        rope, says = case
        with pytest.raises(RopeError) as raised:
            from_config(written(path, **rope))
        message = str(raised.value)
        assert message.startswith(f"{path}: ")
        assert says in message
        assert "raise a RopeError" in message

    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"rope_type": "careless", "strength": "a"},
            "the frequencies of Careless(strength='a', table=()) could not be computed: TypeError: unsupported",
        ),
        (
            {"rope_type": "careless", "strength": 0},
            "the frequencies of Careless(strength=0, table=()) could not be computed: ZeroDivisionError: ",
        ),
        (
            {"rope_type": "careless", "table": 3},
            "rope_parameters: Careless could not be built from table=3: TypeError: 'int' object is not iterable",
        ),
        (
            {"rope_type": "careless", "table": [[[1.0]]]},
            "rope_parameters: Careless could not be built from table=[[[1.0]]]: TypeError: unhashable type: 'list'",
        ),
        (
            {"rope_type": "halting", "every": 0},
            "rope_parameters: Halting could not be built from every=0: ZeroDivisionError: ",
        ),
    ]
    each(((repr(case[0]), case) for case in cases), refused)


@pytest.mark.usefixtures("registered")
def test_frequencies_that_are_not_numbers_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "careless"}}))
    config = json.loads(path.read_text())
    config["rope_parameters"]["strength"] = math.nan
    with pytest.raises(RopeError, match=r"config: .*inv_freq of Careless\(strength=nan, table=\(\)\) must be a tuple"):
        from_config(config)


@pytest.mark.usefixtures("registered")
def test_a_field_with_a_default_factory_may_be_omitted(tmp_path: Path) -> None:
    assert from_config(written(tmp_path / "config.json", rope_type="halting", every=5)).rope.scaling == Halting(5)


@pytest.mark.usefixtures("registered")
def test_a_gguf_file(tmp_path: Path) -> None:
    keys = {
        "block_count": 1,
        "embedding_length": 8,
        "attention.head_count": 1,
        "rope.freq_base": 1e4,
        "rope.scaling.type": "careless",
    }
    path = gguf_files.write(tmp_path / "a.gguf", keys | {"rope.scaling.strength": "a"})
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert str(raised.value).startswith(
        f"{path}: Rope: the frequencies of Careless(strength='a', table=()) could not be"
    )
    path = gguf_files.write(tmp_path / "b.gguf", keys | {"rope.scaling.strength": [1.0, 2.0]})
    with pytest.raises(RopeError, match=r"b.gguf: .*of Careless\(strength=\(1.0, 2.0\), table=\(\)\) .*: TypeError: "):
        from_config(path)


@dataclass(frozen=True)
class Fixed(Scheme):
    """A scheme that returns its fields as frequencies."""

    rope_type: ClassVar[str] = "fixed"
    frequencies_of_pairs: Any
    factor: Any = 1.0

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        return self.frequencies_of_pairs  # type: ignore[no-any-return]

    def compute_attention_factor(self) -> float:
        return self.factor  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Odd(Fixed):
    """A scheme whose `frequencies` returns a wrong value."""

    def frequencies(self, base: float, rotary_dim: int) -> Any:
        return self.frequencies_of_pairs


@pytest.mark.parametrize(
    "wrong", [(1.0,), None, [1.0, 0.5, 0.1, 0.01], (1.0, math.nan, 0.1, 0.01), (1.0, math.inf, 0.1, 0.0), ("a",) * 4, 3]
)
def test_frequencies_must_be_a_number_for_each_pair(wrong: Any) -> None:
    says = r"Rope: inv_freq of Fixed\(.*\) must be a tuple of rotary_dim // 2 = 4 finite numbers, got "
    with pytest.raises(RopeError, match=says):
        Rope(8, 1e4, "half", scaling=Fixed(wrong))


def test_frequencies_include_a_factor() -> None:
    with pytest.raises(RopeError, match="attention_factor must be a finite number of at least"):
        Rope(4, 1e4, "half", scaling=Fixed((1.0, 0.5), factor=math.nan))
    with pytest.raises(
        RopeError, match=r"frequencies of Odd\(.*\) must return inv_freq and the attention factor, got 3"
    ):
        Rope(4, 1e4, "half", scaling=Odd(3))
    says = r"frequencies of Odd\(.*\) must return inv_freq and the attention factor"
    with pytest.raises(RopeError, match=says):
        Rope(4, 1e4, "half", scaling=Odd(None))


def test_integers_become_floats() -> None:
    assert Rope(4, 1e4, "half", scaling=Fixed((1, 0))).inv_freq.tolist() == [1.0, 0.0]


class Plain:
    rope_type = "plain"


class NoDataclass(Fixed):
    rope_type: ClassVar[str] = "no_dataclass"


@dataclass(frozen=True, eq=False)
class ByIdentity(Fixed):
    rope_type: ClassVar[str] = "by_identity"


class Base(Scheme):
    rope_type: ClassVar[str] = "thawed"

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        return default.inv_freq(base, rotary_dim)


@dataclass
class Thawed(Base):
    pass


@dataclass(frozen=True)
class Nameless(Scheme):
    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        return default.inv_freq(base, rotary_dim)


@dataclass(frozen=True)
class TypeAsField(Base):
    rope_type: str = "annotated"  # type: ignore[misc]


@dataclass(frozen=True)
class OneAlias(Base):
    aliases: ClassVar[str] = "other"  # type: ignore[assignment]


def test_register_checks_the_class() -> None:
    def refused(case: tuple[Any, str]) -> None:
        before = dict(schemes.SCHEMES), dict(schemes.BY_NAME), dict(schemes.ALIASES)
        with pytest.raises(RopeError) as raised:
            schemes.register(case[0])
        assert str(raised.value).startswith("schemes.register: ")
        assert case[1] in str(raised.value)
        assert before == (schemes.SCHEMES, schemes.BY_NAME, schemes.ALIASES)

    a_class = "scheme must be a subclass of Scheme or LengthDependent, got "
    cases = [
        (Plain, a_class),
        (int, a_class + "<class 'int'>"),
        (3, a_class + "3"),
        (Fixed(()), a_class),
        (NoDataclass, "NoDataclass must be a frozen dataclass that is compared by value"),
        (ByIdentity, "ByIdentity must be a frozen dataclass that is compared by value"),
        (Thawed, "Thawed must be a frozen dataclass that is compared by value"),
        (
            Nameless,
            "must be a non-empty string, and aliases a tuple of such strings, got None and ()",
        ),
        (TypeAsField, "rope_type and aliases of TypeAsField must belong to the class, got fields of the dataclass"),
        (
            OneAlias,
            "rope_type of OneAlias must be a non-empty string, and aliases a tuple of such strings, got",
        ),
    ]
    each(((repr(case[0]), case) for case in cases), refused)


def test_only_a_registered_scheme_can_be_unregistered() -> None:
    for scheme in (Careless, 3):
        with pytest.raises(RopeError, match=r"schemes.unregister: scheme must be a registered class, got "):
            schemes.unregister(scheme)  # type: ignore[arg-type]
