"""The old names of attributes of schemes work for one release, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from ropewalk import NTK, DynamicNTK, LongRoPE, Rope, YaRN, from_config, schemes

NEW_NAMES = {
    "idle": "keys_without_effect",
    "implied": "derived_fields",
    "meant": "class_for_keys",
    "table_factor": "compute_attention_factor",
}


class Fixed(schemes.Scheme):
    """A scheme whose two frequencies are its fields."""

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        return (1.0, 0.5)


def define_with_old_names() -> type[schemes.Scheme]:
    @dataclass(frozen=True)
    class Dated(Fixed):
        rope_type: ClassVar[str] = "dated"
        idle: ClassVar[Mapping[str, str]] = {"sleeps": "is a comment"}
        factor: float = 1.0

        @classmethod
        def meant(cls, keys: Collection[str]) -> type[schemes.Scaling]:
            return super().meant(keys)

        @classmethod
        def implied(cls, stated: Mapping[str, Any], longest: int | None) -> dict[str, tuple[Any, str]]:
            return {**super().implied(stated, longest), "factor": (2.5, "max_position_embeddings")}

        def table_factor(self) -> float:
            return super().table_factor() * self.factor

    return Dated


def test_a_scheme_that_defines_old_names_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="was renamed to") as caught:
        dated = define_with_old_names()
    assert sorted(str(warning.message) for warning in caught) == [
        f"Dated: {old} was renamed to {new}. The old name will be removed in the next release."
        for old, new in NEW_NAMES.items()
    ]
    assert {warning.filename for warning in caught} == {__file__}
    config = {
        "model_type": "llama",
        "hidden_size": 4,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "dated", "sleeps": True},
    }
    schemes.register(dated)
    try:
        with pytest.warns(DeprecationWarning, match="was renamed to"):
            ropes = from_config(config)
    finally:
        schemes.unregister(dated)
    assert ropes.rope.attention_factor == 2.5
    assert any("sleeps has no effect: it is a comment." in warning for warning in ropes.warnings)


@pytest.mark.parametrize(
    ("old", "read"),
    [
        ("idle", lambda: YaRN.idle == YaRN.keys_without_effect != {}),
        ("meant", lambda: DynamicNTK.meant({"alpha"}) is NTK),
        ("implied", lambda: DynamicNTK.implied({}, 64) == {"max_position_embeddings": (64, "max_position_embeddings")}),
        ("implied", lambda: "factor" in LongRoPE.implied({"original_max_position_embeddings": 8}, 64)),
        ("table_factor", lambda: YaRN(4.0, 32, attention_factor=1.5).table_factor() == 1.5),
    ],
)
def test_old_names_can_be_read(old: str, read: Any) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{old} was renamed to {NEW_NAMES[old]}") as caught:
        assert read()
    assert caught[0].filename == __file__


def test_a_scheme_that_defines_both_names_uses_the_new_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @dataclass(frozen=True)
        class Both(Fixed):
            def table_factor(self) -> float:
                return 2.5

            def compute_attention_factor(self) -> float:
                return 1.5

    assert Rope(4, 1e4, "half", scaling=Both()).attention_factor == 1.5
