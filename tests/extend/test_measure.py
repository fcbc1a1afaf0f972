"""Test the measurement of `ropewalk extend`: its verdict on recorded tables, and what it has tiny models do.

The tables were measured by transformers' own code on two real models, before this code existed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from ropewalk import RopeError
from ropewalk.tools.extend import measure, subject
from ropewalk.tools.extend.measure import Steps, best_of, factors_of, find, reach_of
from ropewalk.tools.extend.measured import measured_text
from ropewalk.tools.extend.subject import PASSAGE, Subject

transformers = pytest.importorskip("transformers", "5.23")

# Distance: accuracy on random tokens, and on text, of which 0.35 and 0.39 are guessed.
SMOLLM2 = {
    300: (0.68, 0.95), 1000: (0.67, 0.94), 2000: (0.54, 0.93), 3000: (0.48, 0.90), 4000: (0.39, 0.88),
    5000: (0.39, 0.73), 6000: (0.48, 0.87), 6500: (0.31, 0.73), 7000: (0.10, 0.54), 7500: (0.01, 0.44),
    7872: (0.0, 0.41), 8192: (0.0, 0.40),
}  # fmt: skip
GEMMA3 = {
    1000: (0.88, 0.97), 4000: (0.88, 0.97), 8000: (0.88, 0.96), 16000: (0.87, 0.95), 20000: (0.86, 0.94),
    24000: (0.86, 0.93), 28000: (0.80, 0.91), 32000: (0.70, 0.89), 36000: (0.32, 0.75), 40000: (0.26, 0.69),
}  # fmt: skip
# Method and factor: the same at twice the stated length, and the loss of short texts with factor 4.
SMOLLM2_AT_16K = {
    ("yarn", 2): (0.0, 0.40), ("yarn", 3): (0.22, 0.60), ("yarn", 4): (0.54, 0.87), ("llama3", 2): (0.0, 0.42),
    ("llama3", 3): (0.44, 0.79), ("llama3", 4): (0.41, 0.84), ("ntk", 4): (0.08, 0.55), ("linear", 4): (0.0, 0.23),
}  # fmt: skip
GEMMA3_AT_64K = {
    ("yarn", 2): (0.32, 0.87), ("yarn", 3): (0.84, 0.94), ("yarn", 4): (0.87, 0.95), ("llama3", 2): (0.59, 0.90),
    ("llama3", 3): (0.87, 0.94), ("llama3", 4): (0.88, 0.95), ("ntk", 2): (0.16, 0.67), ("ntk", 3): (0.75, 0.92),
    ("ntk", 4): (0.87, 0.94), ("linear", 2): (0.65, 0.89), ("linear", 3): (0.88, 0.93), ("linear", 4): (0.88, 0.95),
}  # fmt: skip
SHORT = {"llama3": 0.01, "yarn": 0.05, "ntk": 0.04, "linear": 1.7}


def copied(random: float, text: float, guessed: float) -> float:
    return (random + max(0.0, text - guessed) / (1 - guessed)) / 2


@pytest.mark.parametrize(
    ("unscaled", "scaled", "guessed", "reaches", "methods", "factors"),
    [
        (SMOLLM2, SMOLLM2_AT_16K, 0.35, (6000, 7872), {"llama3", "yarn"}, (3, 4)),
        (GEMMA3, GEMMA3_AT_64K, 0.39, (24_000, 32_768), {"llama3"}, (3, 3)),
    ],
)
def test_the_verdict_on_real_models(unscaled, scaled, guessed, reaches, methods, factors) -> None:
    reach, usual = reach_of({distance: copied(*pair, guessed) for distance, pair in unscaled.items()})
    assert reaches[0] <= reach <= reaches[1]
    rows = [
        {"method": method, "factor": factor, "at_target": copied(*pair, guessed), "short": SHORT[method]}
        for (method, factor), pair in scaled.items()
    ]
    best = best_of(rows, measure.SHARE * usual)
    assert best["method"] in methods
    assert factors[0] <= best["factor"] <= factors[1]


@pytest.mark.parametrize(
    ("curve", "reach"),
    [
        ({1: 0.9, 2: 0.9, 3: 0.0, 4: 0.0, 5: 0.0, 6: 0.0}, 2),  # most distances are beyond the cliff
        ({1: 0.9, 2: 0.5, 3: 0.9, 4: 0.0}, 3),  # a dip
        ({1: 0.9, 2: 0.8, 3: 0.7, 4: 0.6, 5: 0.5}, 2),  # a steady slope: 0.7 is less than 0.9 × 0.8
        ({1: 0.9, 2: 0.9, 3: 0.9}, 3),
        ({1: 0.1, 2: 0.0, 3: 0.0}, 0),  # no copy at any distance
    ],
)
def test_reach(curve, reach) -> None:
    assert reach_of(curve)[0] == reach


def test_factors_are_on_top_of_the_factor_of_the_config() -> None:
    assert factors_of(16_384, 6_143, 8_192, 1.0) == [3.0, 4.0, 6.0]
    assert factors_of(16_384, 6_143, 8_192, 8.0) == [24.0, 32.0, 48.0]
    assert factors_of(9_000, 8_800, 8_192, 1.0) == [2.0, 3.0]
    assert factors_of(20_000, 9_830, 8_192, 1.0) == [3.0, 4.0, 5.0]
    assert factors_of(16_500, 9_830, 8_192, 1.0) == [3.0, 4.0]  # and not 2


def test_a_smaller_factor_counts_more_than_short_texts() -> None:
    rows = [
        {"factor": f, "short": s, "at_target": c} for f, s, c in ((3.0, 0.0, 0.5), (6.0, 0.0, 0.9), (4.0, 0.1, 0.8))
    ]
    assert best_of(rows, 0.7) == rows[2]
    assert best_of(rows, 0.95) is None


class Fake:
    """A model that copies across factor × 1,500 tokens, except with "yarn"; "linear" harms short texts."""

    stated, factor, methods = 2_000, 1.0, ("yarn", "linear", "llama3")
    self_extends = True

    def __init__(self, copies: float = 0.8) -> None:
        self.copies, self.calls = copies, 0

    def copy(
        self, distance: float, seed: int, method: str = "none", factor: float = 1.0, *window: int, seen: bool = True
    ) -> Any:
        self.calls += 1
        if method == "self_extend":
            if not self.self_extends:
                raise RopeError("it has sinks")
            distance, factor = max(0, distance - window[0]) / factor + min(distance, window[0]), 1.0
        reaches = distance / factor <= 1_500 and method != "yarn"
        return [self.copies, 0.4 + 0.6 * self.copies] if reaches and seen else [0.0, 0.4]

    def loss(self, length: int, seed: int, method: str = "none", factor: float = 1.0, *window: int) -> float:
        self.calls += 1
        return 3.0 + seed + {"none": 0.0, "self_extend": 0.0, "linear": 0.5}.get(method, 0.01) * factor


def run(fake: Fake, target: int, keep: Path | None = None, about: str = "fake") -> dict[str, Any]:
    return find(fake, target, Steps(keep, about, 1))


def said(found: dict[str, Any], target: int) -> str:
    facts = {"target": target, "stated_length": 2_000, "layer": 5, "kind": "full_attention", **found}
    return measured_text(facts).replace("\n  ", " ")


def test_finds_the_smallest_factor_and_the_method_that_harms_least() -> None:
    found = run(Fake(), 4_000)
    assert found["reach"] == 1_500
    # A passage ends at 4,000. The reach without the 375 tokens that Self-Extend leaves alone is 1,125: 3,497 / 1,125.
    assert [row["factor"] for row in found["rows"]] == [3.0, 4.0, 6.0] * 3 + [4.0, 5.0, 7.0]
    assert (found["method"], found["factor"]) == ("llama3", 3.0)
    chosen = next(row for row in found["rows"] if row["method"] == "llama3")
    assert chosen["short"] == pytest.approx(0.03)
    assert chosen["at_target"] == chosen["at_half"] == chosen["lowest"] == pytest.approx(0.8)
    text = said(found, 4_000)
    assert "verdict: llama3 with factor 3, the smallest that reaches 4,000 tokens (copies 0.80" in text
    assert [text.count(mark) for mark in ("reaches\n", "chosen")] == [8, 1]
    rope = "ropewalk.SelfExtend(ropes.layers[5], group=4, window=375)"
    assert f"accelerate(model, rope={{'full_attention': {rope}}})" in text


@pytest.mark.parametrize(
    ("fake", "target", "method", "words"),
    [
        (Fake(0.1), 4_000, None, "No verdict: this model copies 0.10 of the tokens at best"),
        (Fake(), 1_000, "none", "verdict: nothing is needed for 1,000 tokens."),
        (type("Y", (Fake,), {"methods": ("yarn",)})(), 4_000, None, "verdict: no method of engines reaches 4,000"),
        (type("S", (Fake,), {"self_extends": False})(), 4_000, "llama3", "Self-Extend was not measured: it has sinks"),
    ],
)
def test_other_verdicts(fake, target, method, words) -> None:
    found = run(fake, target)
    assert found["method"] == method
    assert words in said(found, target)


def test_results_are_kept_and_continued(tmp_path: Path) -> None:
    keep = tmp_path / "kept.json"
    fake = Fake()
    fake.loss = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(fake, 4_000, keep)
    assert (first := fake.calls) > 0
    again = Fake()
    found = run(again, 4_000, keep)
    assert found == run(Fake(), 4_000)
    run(complete := Fake(), 4_000)
    assert first + again.calls == complete.calls
    for about, calls in (("another", complete.calls), ("fake", 0), ("another", 0)):
        later = Fake()
        assert run(later, 4_000, keep, about) == found
        assert later.calls == calls
    keep.write_text("{}")
    with pytest.raises(RopeError, match="does not hold kept results: KeyError"):
        run(Fake(), 4_000, keep)


# Real models, tiny and with random weights

LENGTH = 2_048
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
TWO = {"full_attention": {**PLAIN, "rope_theta": 1e6}, "sliding_attention": PLAIN}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "max_window_layers": 0}
MODELS = {
    "llama": {"rope_parameters": PLAIN},
    "qwen2": {"rope_parameters": PLAIN, "sliding_window": 64, **MIXED},
    "gpt_oss": {"rope_parameters": PLAIN, "sliding_window": 64, "layer_types": MIXED["layer_types"]},  # one for both
    "gemma3_text": {
        "rope_parameters": TWO,
        "sliding_window": 64,
        "num_hidden_layers": 2,
        "layer_types": MIXED["layer_types"],
    },
}
SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {},
}  # fmt: skip


def build(name: str, method: str = "none") -> Any:
    """Build a tiny model whose config states the method with factor 4 for the layers that see the whole text."""
    changes = {**MODELS[name], "max_position_embeddings": LENGTH}
    whole = changes["rope_parameters"].get("full_attention", changes["rope_parameters"])
    base = whole["rope_theta"] * (4.0 ** (16 / 14) if method == "ntk" else 1.0)
    stated = {**whole, **SCHEMES[method], "rope_theta": base}
    changes["rope_parameters"] = {**TWO, "full_attention": stated} if name == "gemma3_text" else stated
    return tiny_models.build(name, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Save each model with a tokenizer of one token for each character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("models")
    characters = {chr(i): i for i in range(127)} | {"<s>": 127}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<s>")
    for name in MODELS:
        build(name).save_pretrained(root / name)
        made.save_pretrained(root / name)
    return {name: root / name for name in MODELS}


def load(folders: dict[str, Path], name: str) -> Subject:
    return Subject(folders[name], dtype="float32", device="cpu")


def record(one: Subject) -> list[tuple[dict[str, Any], Tensor]]:
    """Return a list to which every call of the model adds its arguments and its logits."""
    calls: list[tuple[dict[str, Any], Tensor]] = []
    one.network.register_forward_hook(lambda _, a, given, out: calls.append((given, out.logits)), with_kwargs=True)
    return calls


@pytest.mark.parametrize("method", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_copy_is_that_of_transformers(folders, name: str, method: str) -> None:
    """The same tokens with a config that states the method, and masks that are built here, position by position."""
    one, distance = load(folders, name), 1_500
    calls = record(one)
    shares = one.copy(distance, 0, method, 4.0)
    (given, logits) = calls[0]
    tokens, positions = given["input_ids"], given["position_ids"]
    assert torch.equal(tokens[:, :PASSAGE], tokens[:, -PASSAGE:])
    assert (positions[:, -PASSAGE:] - positions[:, :PASSAGE] == distance).all()
    assert tokens.shape[1] == 2 * PASSAGE + (0 if name == "llama" else 64)
    count = tokens.shape[1]
    mask = {kind: torch.full((1, 1, count, count), -1e9) for kind in ("full_attention", "sliding_attention")}
    for q in range(count):
        for k in range(q + 1):
            mask["full_attention"][0, 0, q, k] = 0.0
            if positions[0, q] - positions[0, k] < 64:
                mask["sliding_attention"][0, 0, q, k] = 0.0
    passed = mask["full_attention"] if name == "llama" else mask
    expected = build(name, method)(input_ids=tokens, position_ids=positions, attention_mask=passed).logits
    # Float32 sums in another order, and angles of float32 up to position 1,628: 2e-4 were measured, of 3.
    assert (logits - expected[:, -PASSAGE:]).abs().max() < 2e-3
    right = (logits[:, :-1].argmax(-1) == tokens[:, 1 - PASSAGE :]).float().mean(1)
    each = len(tokens) // 2
    assert shares == pytest.approx([float(right[:each].mean()), float(right[each:].mean())])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_self_extend_groups_positions_of_the_layers_that_see_the_whole_text(folders, name: str) -> None:
    """Without a window, Self-Extend is the rotation by position // group."""
    one, expected = load(folders, name), build(name)
    if name != "llama":  # silence the layer with a window, for which the positions stay
        for network in (one.network, expected):
            network.model.layers[0].self_attn.o_proj.weight.zero_()
    calls = record(one)
    one.copy(1_500, 0, "self_extend", 4.0, 0)
    given, logits = calls[0]
    mask = {"attention_mask": mask["full_attention"] if isinstance(mask := given["attention_mask"], dict) else mask}
    other = expected(input_ids=given["input_ids"], position_ids=given["position_ids"] // 4, **mask).logits
    assert (logits - other[:, -PASSAGE:]).abs().max() < 2e-3  # as above
    one.copy(1_500, 0)
    assert (logits - calls[1][1]).abs().max() > 0.01
    if name != "llama":
        one = load(folders, name)
        one.network.model.layers[1].self_attn.o_proj.weight.zero_()
        calls = record(one)
        one.copy(1_500, 0, "self_extend", 4.0, 0)
        one.copy(1_500, 0)
        assert (calls[0][1] - calls[1][1]).abs().max() < 2e-3


def test_a_model_that_self_extend_does_not_serve_can_still_be_measured(folders) -> None:
    one = load(folders, "gpt_oss")
    before = one.copy(1_500, 0, "yarn", 4.0)
    for group, why in ((4.0, "s_aux"), (0.0, "group must be")):
        with pytest.raises(RopeError, match=why):
            one.copy(1_500, 0, "self_extend", group, 0)
    assert one.copy(1_500, 0, "yarn", 4.0) == before


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
@torch.no_grad()
def test_no_layer_with_a_window_sees_across_the_hole(folders, name: str) -> None:
    one = load(folders, name)
    one.network.model.layers[1].self_attn.o_proj.weight.zero_()  # the only layer that sees the whole text
    calls = record(one)
    one.copy(1_500, 0)
    one.copy(1_500, 0, seen=False)
    assert not torch.equal(calls[0][0]["input_ids"][:, :PASSAGE], calls[1][0]["input_ids"][:, :PASSAGE])
    assert torch.equal(calls[0][1], calls[1][1])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_text_is_read_as_transformers_reads_it_at_once(folders, name: str, monkeypatch) -> None:
    one, tokens = load(folders, name), [*range(32, 120)] * 3
    monkeypatch.setattr(subject, "_NUMBERS", 0)  # chunks of 64
    losses = one.read(tokens, "yarn", 4.0)
    logits = build(name, "yarn")(torch.tensor([tokens])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    assert (losses - expected).abs().max() < 2e-3  # as above
    assert one.loss(300, 0) == one.loss(300, 0)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_everything(folders, name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Random weights copy nothing, so nothing may be concluded. If that is no obstacle, every step runs."""
    keep = tmp_path / "kept.json"
    measured = measure.measure(folders[name], 8_192, keep=keep)
    assert (measured["reach"], measured["method"], measured["factor"]) == (0, None, None)
    assert "No verdict" in measured_text(measured)
    assert "measuring" in capsys.readouterr().err
    monkeypatch.setattr(measure, "_KNOWS", -1.0)
    made: list[Any] = []
    monkeypatch.setattr(measure, "Steps", lambda *given: made.append(steps := Steps(*given)) or steps)
    measured = measure.measure(folders[name], 8_192, keep=keep)
    assert measured["reach"] > 0
    assert len(measured["rows"]) == 15
    assert made[0].bar.total == made[0].bar.n
    json.dumps(measured)
    assert measure.measure(folders[name], 512, keep=keep)["method"] == "none"


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RopeError, match=r"nothing cannot be loaded: .* Pass a folder with weights"):
        Subject(tmp_path / "nothing", dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mistral",
            {"sliding_window": 64},
            "a layer that rotates must see the whole text, got only layers with windows",
        ),
        (
            "llama",
            {"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 2.0}},
            "the scheme of the config must be one that another factor extends, got dynamic",
        ),
    ],
)
def test_models_that_no_factor_extends(folders, tmp_path: Path, name: str, changes: Any, message: str) -> None:
    tiny_models.build(name, max_position_embeddings=LENGTH, **changes).save_pretrained(tmp_path)
    for path in folders["llama"].glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(RopeError, match=message):
        Subject(tmp_path, dtype="float32", device="cpu")


def test_a_scheme_of_the_config_is_the_only_method(folders, tmp_path: Path) -> None:
    build("llama", "yarn").save_pretrained(tmp_path)
    for path in folders["llama"].glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    one = Subject(tmp_path, dtype="float32", device="cpu")
    assert (one.methods, one.factor, one.stated) == (("yarn",), 4.0, 4 * LENGTH)
    calls = record(one)
    one.copy(1_500, 0, "yarn", 8.0)
    tokens, positions = calls[0][0]["input_ids"], calls[0][0]["position_ids"]
    config = build("llama", "yarn").config
    config.rope_parameters = {**config.rope_parameters, "factor": 8.0}
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(one.network.state_dict())
    with torch.no_grad():
        expected = other(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
    assert (calls[0][1] - expected[:, -PASSAGE:]).abs().max() < 2e-3  # as above
