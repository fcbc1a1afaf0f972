"""Invented schemes that are registered from outside: readers, writers, `explain` and plots support them."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import gguf_files
import ropewalk
from config_mutations import outcome
from ropewalk import RopeError, from_config, plots, schemes
from ropewalk.schemes import LengthDependent, Scheme, default

BASE, DIM = 500_000.0, 64


@dataclass(frozen=True)
class Sloth(Scheme):
    """A scheme that slows every other pair."""

    rope_type: ClassVar[str] = "sloth"
    aliases: ClassVar[tuple[str, ...]] = ("slow_loris",)
    keys_without_effect: ClassVar[dict[str, str]] = {"sleeps": "is a habit"}
    gguf: ClassVar[dict[str, str]] = {
        "slowness": "rope.scaling.slowness",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
    }
    slowness: float
    original_max_position_embeddings: int
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.slowness, float) or not 1 <= self.slowness < 1e6:
            raise RopeError("Sloth: slowness must be from 1 to 1e6.")
        if type(self.original_max_position_embeddings) is not int:
            raise RopeError("Sloth: original_max_position_embeddings must be an integer.")
        if not isinstance(self.weights, (list, tuple)) or not all(type(w) is float and w < 1e6 for w in self.weights):
            raise RopeError("Sloth: weights must be a list of floats.")
        object.__setattr__(self, "weights", tuple(self.weights))

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        return tuple(w / self.slowness if i % 2 else w for i, w in enumerate(default.inv_freq(base, rotary_dim)))

    def compute_attention_factor(self) -> float:
        return 1.5

    def trained_length(self, longest: int | None) -> int:
        return self.original_max_position_embeddings

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        return [f"sloths are slow, {named} or not."]


@dataclass(frozen=True)
class Owl(LengthDependent):
    """A scheme that becomes a `Sloth` beyond a length."""

    rope_type: ClassVar[str] = "owl"
    night: int

    def __post_init__(self) -> None:
        if type(self.night) is not int:
            raise RopeError("Owl: night must be an integer.")

    def at_length(self, n: int) -> Scheme | None:
        return Sloth(2.0, 5) if n > self.night else None


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "sloth",
        "rope_theta": BASE,
        "slowness": 4.0,
        "original_max_position_embeddings": 512,
        "weights": [1.0, 2.0],
    },
}
OWL = {**CONFIG, "rope_parameters": {"rope_type": "owl", "rope_theta": BASE, "night": 600}}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    added = [schemes.register(Sloth), schemes.register(Owl)]
    yield
    for scheme in added:
        schemes.unregister(scheme)


def slowed(by: float) -> np.ndarray:
    return np.array([BASE ** (-2 * i / DIM) / (by if i % 2 else 1) for i in range(DIM // 2)])


def changed(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "rope_parameters": {**CONFIG["rope_parameters"], **changes}}


GGUF: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 256,
    "attention.head_count": 4,
    "context_length": 4096,
    "rope.freq_base": BASE,
    "rope.scaling.type": "sloth",
    "rope.scaling.slowness": 4.0,
    "rope.scaling.original_context_length": 512,
}


def test_from_a_gguf_file(tmp_path: Path) -> None:
    read = from_config(gguf_files.write(tmp_path / "a.gguf", GGUF))
    np.testing.assert_allclose(read.rope.inv_freq, slowed(4.0), rtol=1e-15)
    assert read.trained_length == 512
    assert "sloths are slow, context_length or not." in read.warnings
    assert read.origins["slowness"] == "llama.rope.scaling.slowness"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope.scaling.slowness": None}, r"llama.rope.scaling.slowness must be given, got none. Sloth needs it"),
        ({"rope.scaling.slowness": 0.5}, "a.gguf: Sloth: slowness must be from 1"),
        ({"rope.scaling.type": "owl"}, "rope.scaling.type must be one of .*sloth.*, got 'owl'"),
        ({"rope.scaling.speed": 1.0}, "is about rotation and must be a key that ropewalk knows for llama"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(RopeError, match=says):
        from_config(gguf_files.write(tmp_path / "a.gguf", GGUF | changes))


def test_from_config() -> None:
    read = from_config(CONFIG)
    np.testing.assert_allclose(read.rope.inv_freq, slowed(4.0), rtol=1e-15)
    assert (read.rope.attention_factor, read.trained_length) == (1.5, 512)
    assert read.warnings == ("sloths are slow, max_position_embeddings or not.",)
    assert read.origins["slowness"] == "rope_parameters.slowness"
    assert from_config(changed(rope_type="slow_loris")).rope == read.rope


def test_from_config_with_a_length() -> None:
    read = from_config(OWL)
    assert not read.rope.is_static
    np.testing.assert_allclose(read.rope.at_length(601).inv_freq, slowed(2.0), rtol=1e-15)
    np.testing.assert_allclose(read.rope.at_length(600).inv_freq, slowed(1.0), rtol=1e-15)
    with pytest.raises(RopeError, match="the frequencies of Owl depend"):
        _ = read.rope.inv_freq


def test_the_keys_of_a_scheme_are_its_fields() -> None:
    with pytest.raises(RopeError, match="slowness must be given for rope_type 'sloth'"):
        from_config(changed(slowness=None))
    with pytest.raises(RopeError, match="Sloth: slowness must be from 1 to 1e6"):
        from_config(changed(slowness=0.5))
    with pytest.raises(RopeError, match=r"rope_parameters.slownes\b.* Did you mean 'slowness'"):
        from_config(changed(slownes=4.0))
    warnings = from_config(changed(sleeps=True)).warnings
    assert "rope_parameters.sleeps has no effect: it is a habit." in warnings


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("config", [CONFIG, OWL])
def test_to_hf_config(config: dict[str, Any], version: int) -> None:
    read = from_config(config)
    written = json.loads(json.dumps(read.to_hf_config(version=version)))
    assert from_config(written).layers == read.layers
    section = written["rope_parameters" if version == 5 else "rope_scaling"]
    said = {key: value for key, value in config["rope_parameters"].items() if version == 5 or key != "rope_theta"}
    assert section == said


def test_explain() -> None:
    words = from_config(CONFIG).explain(4096)
    assert "sloth: slowness 4.0, original_max_position_embeddings 512" in words
    assert "by a factor of 4" in words
    assert "512 tokens" in words
    assert from_config(OWL).facts(601)["ropes"][0]["rope"]["resolved_at_length"] == 601


def test_plots() -> None:
    axes = plots.inv_freq(from_config(CONFIG).rope).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[1:] == ["after scaling: Sloth", "one turn within the trained length of 512 tokens"]


def test_broken_configs(tmp_path: Path) -> None:
    counted = Counter(outcome(random.Random(seed), [CONFIG, OWL], tmp_path) for seed in range(300))
    assert min(counted["refused"], counted["read and rewritten"]) > 20, counted


def test_a_name_belongs_to_one_scheme() -> None:
    with pytest.raises(RopeError, match=r"must not belong to another scheme, got Sloth, sloth, slow_loris"):
        schemes.register(Sloth)


def test_an_unregistered_scheme_is_unknown() -> None:
    schemes.unregister(Owl)
    try:
        with pytest.raises(RopeError, match=" must be one of default, dynamic"):
            from_config(OWL)
    finally:
        schemes.register(Owl)


SOURCE = Path(ropewalk.__file__).parent
CLASSES = {*schemes.BY_NAME, "Scaling", "Scheme", "LengthDependent"}


def type_tests(tree: ast.AST) -> list[int]:
    """Return the lines that call isinstance or issubclass with a scheme, or that compare or look up a `.rope_type`."""
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) != "nn"}
            found += [node.lineno] * bool(names & CLASSES)
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += node.args if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get") else []
        sides += [node.slice] if isinstance(node, ast.Subscript) else []
        found += [n.lineno for n in sides if isinstance(n, ast.Attribute) and n.attr == "rope_type"]
    return found


def test_only_schemes_know_their_types() -> None:
    """engines/ names schemes, because it says with which options another program selects them."""
    files = [path for path in SOURCE.rglob("*.py") if path.parent.name not in ("schemes", "engines")]
    found = [f"{path.relative_to(SOURCE)}:{n}" for path in files for n in type_tests(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(x, YaRN | int)",
        "isinstance(x, schemes.Linear)",
        "x.rope_type == 'yarn'",
        "BUGS.get(x.rope_type)",
        "BUGS[x.rope_type]",
    ],
)
def test_the_rule_can_fail(line: str) -> None:
    assert type_tests(ast.parse(line)) == [1]
