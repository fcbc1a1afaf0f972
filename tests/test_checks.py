"""Messages show any value on one line of bounded length."""

from __future__ import annotations

import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk import NTK, DynamicNTK, Rope, RopeError
from ropewalk._checks import describe, nearest, printable, shown
from ropewalk.schemes import Linear, YaRN

HUGE = 10**5000


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class MyInt(int):
    pass


def nested(times: int) -> Any:
    value: Any = 1
    for _ in range(times):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "value",
    [
        HUGE, -HUGE, MyInt(HUGE), [HUGE], {HUGE: HUGE}, Mute(), [Mute()], nested(50_000), "\ud800\x1b[0m\n",
        b"\xff" * 10**7, "x" * 10**7, np.zeros((100, 100)), np.array(HUGE, dtype=object),
        [[["x" * 90] * 9] * 9] * 9,
        type("\x1b", (), {})(),
    ],
    ids=range(15),
)  # fmt: skip
def test_any_value_can_be_shown(value: Any) -> None:
    text = shown(value)
    assert text.isprintable()
    assert 0 < len(text) <= 400


def test_plain_values_are_shown_by_repr() -> None:
    assert [shown(v) for v in (None, True, 3, 0.5, "a", b"GGML", [1, {"b": 2}])] == [
        "None", "True", "3", "0.5", "'a'", "b'GGML'", "[1, {'b': 2}]"
    ]  # fmt: skip
    assert shown(HUGE) == "<an integer of 16610 bits>"


def test_messages_are_one_printable_line() -> None:
    assert str(RopeError("a\nb\x1b[31m\ud800\x7f\u202e é ☃")) == r"a\nb\x1b[31m\ud800\x7f\u202e é ☃"
    assert printable("wie üblich: 2⁻⁶⁴") == "wie üblich: 2⁻⁶⁴"
    again = pickle.loads(pickle.dumps(RopeError("a\nb")))
    assert (type(again), str(again)) == (RopeError, r"a\nb")


def test_long_words_have_no_similar_word() -> None:
    """difflib takes seconds and hundreds of megabytes for words of megabytes."""
    assert nearest("rope_tehta", ["rope_theta"]) == " Did you mean 'rope_theta'?"
    assert nearest("rope_thetaa" * 10, ["rope_thetaa" * 10]) == ""


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *[("neox", "half"), ("GPT-NeoX", "half"), ("rotate_half", "half"), ("Half", "half")],
        *[("gptj", "interleaved"), ("meta", "interleaved"), ("even/odd", "interleaved"), ("interleave", "interleaved")],
        *[("bhld", "bhsd"), ("bnsd", "bhsd"), ("blhd", "bshd"), ("BSND", "bshd"), ("tnd", "thd")],
    ],
)
def test_names_of_other_libraries_are_understood_in_messages(name: Any, ours: Any) -> None:
    is_layout = ours.endswith("hd") or ours == "bhsd"
    with pytest.raises(RopeError, match=rf"must be one of .*, got {name!r}.* Did you mean {ours!r}\?$"):
        Rope(2, 1e4, "half" if is_layout else name).at(torch.arange(1))(torch.ones(1, 1, 1, 2), layout=name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rope(HUGE, 1e4, "half"),
        lambda: Rope(64, HUGE, "half"),
        lambda: Rope(64, 1e4, HUGE),  # type: ignore[arg-type]
        lambda: Rope(64, 1e4, "half", rotary_dim=HUGE),
        lambda: Rope(64, 1e4, "half", rotary_offset=-HUGE),
        lambda: Rope(64, 1e4, "half", scaling=nested(50_000)),
        lambda: Rope(64, 1e4, "half").shift(HUGE),
        lambda: Rope(64, 1e4, "half").at_length(HUGE),
        lambda: Rope(64, 1e4, np.array(["half", "half"])),  # type: ignore[arg-type]
        lambda: Linear(HUGE),
        lambda: Linear(nested(50_000)),
        lambda: NTK(-HUGE),
        lambda: DynamicNTK(2.0, HUGE),
        lambda: YaRN(2.0, 4096, truncate=HUGE),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_any_size_are_refused(make: Any) -> None:
    with pytest.raises(RopeError) as raised:
        make()
    assert len(str(raised.value)) < 600
    assert str(raised.value).isprintable()


def test_a_tensor_is_described_by_dtype_and_shape() -> None:
    assert describe(torch.zeros(2, 3, dtype=torch.bfloat16)) == "torch.bfloat16 of shape (2, 3)"
    assert describe(torch.nn.Parameter(torch.zeros(()))) == "torch.float32 of shape ()"
    assert describe(torch.empty(7, 1, device="meta", dtype=torch.int64)) == "torch.int64 of shape (7, 1)"


@pytest.mark.parametrize("value", [None, 3, [1, 2], np.arange(3), torch.float32, "x" * 10**7, Mute()])
def test_other_values_are_described_as_by_shown(value: Any) -> None:
    assert describe(value) == shown(value)


def test_the_extra_in_a_message_has_the_package() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    source = "".join(path.read_text("utf-8") for path in (root / "src").rglob("*.py"))
    named = re.findall(r'missing_package\([^\n]*, "(\w+)", "(\w+)"\)', source)
    assert len(named) == source.count("missing_package(") - 1  # one is the definition
    for package, extra in named:
        wanted = [*extras[extra], *(extras["plots"] if "ropewalk[plots]" in extras[extra] else [])]
        assert any(requirement.startswith(package) for requirement in wanted), (package, extra)
