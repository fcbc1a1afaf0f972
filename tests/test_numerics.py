"""`numerics` of `Rope.at`: the float32 angles of deployed code, compared bitwise with recordings of that code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
import ropewalk
from each import each
from ropewalk import NTK, DynamicNTK, Llama3, Proportional, Rope, RopeError, YaRN, schemes
from ropewalk.kernels import backend
from ropewalk.rope import float32
from ropewalk.schemes import Linear, PerPair, Scheme
from test_golden import GOLDEN, MEANING, PEERS, ROWS, load, recorded

# Some of these configs state no base.
pytestmark = pytest.mark.filterwarnings("ignore:.* so the base is 10000:UserWarning")

LENGTHS = load(GOLDEN / "lengths.json")["rows"]
TEXT_MODELS = [
    (f"{row['name']}: {case['id']}", (row, case))
    for row in load(GOLDEN / "text_models.json")["rows"]
    for case in row["cases"]
    if "inv_freq" in case and case.get("layout") != "none"  # a layer that does not rotate
]
# Recorded with AVX2 or AVX-512, which agree in these powers. PyTorch's power has another last bit elsewhere, and so has
# transformers.
recorded_here = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="this CPU rounds powers otherwise"
)
POSITIONS = torch.tensor([0, 1, 17, 4095, 100_000, 1_048_575, 2**31 - 1, -3])


def of_row(row: dict[str, Any], given: dict[str, Any]) -> Rope:
    base, rope_type = given.pop("rope_theta"), given.pop("rope_type")
    scaling = None if rope_type == "default" else schemes.SCHEMES[rope_type](**given)
    rope = Rope(row["rotary_dim"], base, "half", scaling=scaling)
    return rope.at_length(row["length"]) if "length" in row else rope


def products(case: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin by float32 products of the recorded frequencies."""
    angle = positions.to(torch.float32).unsqueeze(-1) * torch.tensor(case["inv_freq"], dtype=torch.float32)
    factor = case["attention_scaling"]
    return angle.cos() * factor, angle.sin() * factor


def check_row(row: dict[str, Any]) -> None:
    idle = ("type", "finetuned", "llama_4_scaling_beta", "partial_rotary_factor")
    given = {k: v for k, v in row["rope_parameters"].items() if k not in idle and not k.startswith("mrope")}
    rope = of_row(row, given)
    assert frequencies(rope) == as_float32(row["inv_freq"])
    rotation = rope.at(POSITIONS, numerics="float32")
    for table, expected in zip((rotation.cos, rotation.sin), products(row, POSITIONS), strict=True):
        assert table.dtype == torch.float32
        assert torch.equal(table, expected)


@recorded_here
def test_every_recorded_scheme_bit_for_bit() -> None:
    assert len(ROWS) == 66
    each(((f"{row['model']} {row['case']}", row) for row in ROWS), check_row)


@recorded_here
def test_every_recorded_length_bit_for_bit() -> None:
    assert {row["length"] for row in LENGTHS} >= {4096, 4097, 262_144}
    each(((f"{row['model']} {row['length']}", row) for row in LENGTHS), check_row)


def frequencies(rope: Rope) -> list[float]:
    return list(float32.frequencies(rope.base, rope.rotary_dim, rope.scaling)[0])


def as_float32(numbers: list[float]) -> list[float]:
    return np.array(numbers, dtype=np.float32).astype(np.float64).tolist()


def check_text_model(given: tuple[dict[str, Any], dict[str, Any]]) -> None:
    row, case = given
    ropes = ropewalk.from_config(row["config"], text_only=True)
    indexer = case["id"] == "dsa_indexer"
    rope = ropes.extra_ropes["indexer"] if indexer else ropes.layers[case.get("layer_idx", 0)]
    assert rope is not None
    rope = rope.at_length(case["seq_len"])
    assert frequencies(rope) == as_float32(case["inv_freq"])
    assert rope.attention_factor == case["attention_scaling"]
    if "q_rot" not in case or isinstance(case["positions"][0], list) or ropes.query_scale is not None:
        return  # another length of a case; several axes; queries multiplied afterwards
    stored = case.get("tokens", slice(None))
    positions = torch.tensor(case["positions"])[stored]
    for which, make in (("q", oracle.golden_q), ("k", oracle.golden_k)):
        x = torch.from_numpy(make(case[f"{which}_shape"])[:, :1, stored])
        expected = torch.tensor(case[f"{which}_rot"]).reshape(x.shape)
        # MLA's shared key is the rotated slice alone.
        alone = rope if x.shape[-1] == rope.head_dim else replace(rope, head_dim=rope.rotary_dim, rotary_offset=0)
        rotated = alone.at(positions, numerics="float32")(x, layout="bhsd")
        if ropes.output_order == "half" and not indexer:
            start, end = alone.rotary_offset, alone.rotary_offset + alone.rotary_dim
            parts = (
                rotated[..., :start],
                rotated[..., start:end:2],
                rotated[..., start + 1 : end : 2],
                rotated[..., end:],
            )
            rotated = torch.cat(parts, dim=-1)
        # DeepSeek-V2 has its cos and sin from torch.polar, as Meta.
        off = 1.2e-7 if row["config"].get("model_type") == "deepseek_v2" else 0.0
        assert (rotated - expected).abs().max() <= off


@recorded_here
def test_text_models_bit_for_bit() -> None:
    assert len(TEXT_MODELS) > 70
    each(TEXT_MODELS, check_text_model)


LENGTH = {"original_max_position_embeddings": 4096}
LIVE: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 7.3},
    {"rope_type": "llama3", "factor": 6.0, "low_freq_factor": 1.3, "high_freq_factor": 3.7, **LENGTH},
    {"rope_type": "llama3", "factor": 5.3, "low_freq_factor": 0.1, "high_freq_factor": 500.0, **LENGTH},
    {"rope_type": "yarn", "factor": 5.7, "beta_fast": 20.0, "beta_slow": 1.7, **LENGTH},
    {"rope_type": "longrope", "factor": 3.0, "short_factor": [1.1, *[1.7] * 31], "long_factor": [2.3] * 32, **LENGTH},
    {"rope_type": "proportional", "factor": 3.0, "partial_rotary_factor": 0.3},
]


@pytest.mark.parametrize("parameters", LIVE, ids=lambda p: f"{p['rope_type']} {p.get('factor', '')}")
def test_against_transformers_itself(parameters: dict[str, Any]) -> None:
    """Factors that are not powers of two, which the recordings lack. They reveal the order of the operations."""
    transformers = pytest.importorskip("transformers", "5.23")
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    for base in (10_000.0, 123_456.7, 5e6):
        config = transformers.LlamaConfig(head_dim=64, rope_parameters={**parameters, "rope_theta": base})
        module = rotary(config)
        given = {k: v for k, v in parameters.items() if k != "rope_type"}
        scaling = schemes.SCHEMES[parameters["rope_type"]](**given) if given else None
        rope = Rope(64, base, "half", scaling=scaling).at_length(1)
        positions = torch.tensor([[0, 1, 4095], [7, 3000, 3]])
        cos, sin = module(torch.ones(1), positions)
        rotation = rope.at(positions, numerics="float32")
        assert torch.equal(rotation.cos, cos[..., :32])
        assert torch.equal(rotation.sin, sin[..., :32])


def test_exact_is_another_and_the_default() -> None:
    rope = Rope(128, 1e4, "half")
    far = torch.tensor([100_000])
    assert torch.equal(rope.at(far).cos, rope.at(far, numerics="exact").cos)
    assert (rope.at(far).cos - rope.at(far, numerics="float32").cos).abs().max() > 1e-3


def cases_of(*names: str) -> list[Any]:
    return [pytest.param(name, case, id=f"{name}: {case['id']}") for name in names for case in PEERS[name]["cases"]]


@recorded_here
@pytest.mark.parametrize(
    ("name", "case"), cases_of("torchtune", "flash_attn_torch", "rotary_embedding_torch", "jquesnelle_yarn")
)
def test_rotated_q_and_k_of_peers_bit_for_bit(name: str, case: dict[str, Any]) -> None:
    rotation = MEANING[name](case).at(torch.tensor(case["positions"]), numerics="float32")
    for which in ("q", "k"):
        x, expected = recorded(case, which)
        assert torch.equal(rotation(x, layout="bhsd"), expected)


@recorded_here
@pytest.mark.parametrize(("name", "case"), cases_of("meta_llama", "gpt_fast", "llama2c"))
def test_angles_of_meta_bit_for_bit(name: str, case: dict[str, Any]) -> None:
    """The angles equal Meta's, but torch.polar rounds some of their cos and sin differently, as libm does."""
    rope, positions = MEANING[name](case), torch.tensor(case["positions"])
    angles = positions.to(torch.float32).unsqueeze(-1) * torch.tensor(frequencies(rope))
    unit = torch.polar(torch.ones_like(angles), angles)
    by_polar = ropewalk.Rotation(unit.real.contiguous(), unit.imag.contiguous(), pairing=rope.pairing)
    made = rope.at(positions, numerics="float32")
    assert (made.cos - by_polar.cos).abs().max() <= 2.0**-24
    assert (made.sin - by_polar.sin).abs().max() <= 2.0**-24
    for which in ("q", "k"):
        x, expected = recorded(case, which)
        assert torch.equal(by_polar(x, layout="bhsd"), expected)
        assert (made(x, layout="bhsd") - expected).abs().max() <= 1.2e-7


FAR = [0, 1, 4095, -131_071, 1_048_575, 2**31 - 1, -(2**31)]


@recorded_here
@pytest.mark.parametrize("row", [*ROWS[::9], LENGTHS[1]], ids=lambda row: row["model"])
def test_float32_frequencies_are_taken_as_exact(row: dict[str, Any]) -> None:
    idle = ("type", "finetuned", "llama_4_scaling_beta", "partial_rotary_factor")
    rope = of_row(row, {k: v for k, v in row["rope_parameters"].items() if k not in idle and k[:5] != "mrope"})
    inv_freq = as_float32(row["inv_freq"])
    rotation = rope.at(torch.tensor(FAR), numerics="float32-frequencies")
    half_a_step = 2.0**-25 * 2.0 ** math.ceil(math.log2(rope.attention_factor))  # float32, at the largest value
    bound = half_a_step + rope.attention_factor * (np.abs(FAR)[:, None] * (2 * math.pi * 2.0**-65) + 1e-15)
    for table, exact in zip((rotation.cos, rotation.sin), oracle.cos_sin(FAR, inv_freq), strict=True):
        assert (np.abs(table.double().numpy() - exact * rope.attention_factor) <= bound).all()


@recorded_here
def test_float32_frequencies_in_float64_and_between_tokens() -> None:
    row = ROWS[0]
    inv_freq = np.array(as_float32(row["inv_freq"]))
    rope = of_row(row, dict(row["rope_parameters"]))
    at = rope.at(torch.tensor(FAR), dtype=torch.float64, numerics="float32-frequencies")
    assert at.cos.dtype == torch.float64
    exact, _ = oracle.cos_sin(FAR, inv_freq.tolist())
    assert np.abs(at.cos.numpy() - exact).max() <= 2.0**31 * 2 * math.pi * 2.0**-65 + 2e-15
    between = rope.at(torch.tensor([0.5, 7.25], dtype=torch.float64), numerics="float32-frequencies")
    assert np.abs(between.cos.numpy() - np.cos(np.array([[0.5], [7.25]]) * inv_freq)).max() <= 2.0**-25


class TestPositions:
    rope = Rope(64, 5e5, "half", scaling=YaRN(8.0, 4096))
    row: ClassVar = next(r for r in ROWS if r["rope_parameters"]["rope_type"] == "default")

    @recorded_here
    def test_a_batch_and_other_dtypes(self) -> None:
        rope, positions = of_row(self.row, dict(self.row["rope_parameters"])), torch.tensor([[0, 5], [100_000, 7]])
        expected = products(self.row, positions)
        for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
            rotation = rope.at(positions.to(dtype), dtype=torch.float32, numerics="float32")
            assert torch.equal(rotation.cos, expected[0])
            assert torch.equal(rotation.sin, expected[1])

    @recorded_here
    def test_fractional_positions(self) -> None:
        positions = torch.tensor([0.5, 1e5 + 0.125], dtype=torch.float64)
        rotation = of_row(self.row, dict(self.row["rope_parameters"])).at(positions, numerics="float32")
        assert torch.equal(rotation.sin, products(self.row, positions)[1])

    def test_beyond_2_24_the_position_itself_is_rounded(self) -> None:
        near = self.rope.at(torch.tensor([2**24, 2**24 + 1]), numerics="float32")
        assert torch.equal(near.cos[0], near.cos[1])
        near = self.rope.at(torch.tensor([2**24, 2**24 + 1]), numerics="float32-frequencies")
        assert not torch.equal(near.cos[0], near.cos[1])

    def test_device(self) -> None:
        for numerics in ("float32", "float32-frequencies"):
            assert self.rope.at(torch.arange(3), device="meta", numerics=numerics).cos.is_meta

    @pytest.mark.skipif(torch.__version__ < "2.12", reason="deployed numerics compile with PyTorch 2.12")
    @pytest.mark.parametrize("backend_name", ["eager", "aot_eager"])
    @pytest.mark.parametrize("numerics", ["float32", "float32-frequencies"])
    def test_compiled_bit_for_bit(self, numerics: Any, backend_name: str) -> None:
        """Frequencies are constants of the graph, so each rope is compiled separately."""
        torch.compiler.reset()
        float32._cached_frequencies.cache_clear()
        compiled = torch.compile(lambda r, p: r.at(p, numerics=numerics).cos, fullgraph=True, backend=backend_name)
        ropes = [Rope(64, 5e5, "half", scaling=s) for s in (None, YaRN(8.0, 4096), YaRN(16.0, 4096), Linear(4.0))]
        uses = [*((rope, torch.arange(5)) for rope in ropes), (ropes[0], torch.tensor([[0.5, 1e5]]))]
        for rope, positions in uses:
            assert torch.equal(compiled(rope, positions), rope.at(positions, numerics=numerics).cos)

    @pytest.mark.skipif(torch.__version__ < "2.12", reason="deployed numerics compile with PyTorch 2.12")
    @pytest.mark.usefixtures("compiler")
    def test_compiled_by_inductor(self) -> None:
        """Inductor's cos differs from the eager one by one ulp of float32."""
        positions = torch.arange(100_000, 100_016)
        for numerics in ("float32", "float32-frequencies"):
            compiled = torch.compile(lambda p, n=numerics: self.rope.at(p, numerics=n).cos, fullgraph=True)
            eager = self.rope.at(positions, numerics=numerics).cos
            assert (compiled(positions) - eager).abs().max() <= 2.0**-23 * self.rope.attention_factor

    @recorded_here
    def test_first_use_under_every_mode(self) -> None:
        """Neither a mode of the caller nor the default dtype and device affect the cached frequencies."""
        rope, expected = of_row(self.row, dict(self.row["rope_parameters"])), products(self.row, POSITIONS)[0]
        use = lambda: rope.at(POSITIONS, numerics="float32").cos  # noqa: E731
        with FakeTensorMode():
            float32._cached_frequencies.cache_clear()
            rope.at(torch.arange(3), numerics="float32")
        assert torch.equal(use(), expected)
        float32._cached_frequencies.cache_clear()
        with torch.device("meta"):
            assert torch.equal(use(), expected)
        float32._cached_frequencies.cache_clear()
        mapped = torch.func.vmap(lambda p: rope.at(p, numerics="float32").cos)(POSITIONS.reshape(2, 4))
        assert torch.equal(mapped.flatten(0, 1), expected)
        float32._cached_frequencies.cache_clear()
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            assert torch.equal(use(), expected)
        finally:
            torch.set_default_dtype(before)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(use(), expected)


def test_the_fast_path_is_for_exact_numerics_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = Rope(64, 5e5, "half")
    quick = rope.at(POSITIONS, numerics="float32").cos
    monkeypatch.setattr(backend, "FAST_PATH", False)
    assert torch.equal(rope.at(POSITIONS, numerics="float32").cos, quick)
    assert not torch.equal(rope.at(POSITIONS).cos, quick)


@dataclass(frozen=True)
class Sloth(Scheme):
    """A scheme from outside ropewalk, without deployed code."""

    rope_type: ClassVar[str] = "sloth"
    slowness: float

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        return tuple(w / self.slowness for w in schemes.default.inv_freq(base, rotary_dim))


def test_frequencies_of_a_scheme_without_deployed_code_are_rounded_once() -> None:
    rope = Rope(64, 5e5, "half", scaling=Sloth(3.0))
    rounded = torch.from_numpy(rope.inv_freq).float()
    rotation = rope.at(POSITIONS, numerics="float32")
    assert torch.equal(rotation.cos, (POSITIONS.float().unsqueeze(-1) * rounded).cos())


ALL = (
    None,
    Linear(3.0),
    NTK(7.0),
    Llama3(8.0, 1.0, 4.0, 8192),
    Llama3(8.0, 1.0, 1.0, 8192),
    PerPair([1.5] * 31 + [math.inf]),
    Proportional(0.3, 2.0),
    YaRN(16.0, 4096),
    YaRN(16.0, 4096, truncate=False),
)


@pytest.mark.parametrize("scaling", ALL, ids=repr)
@pytest.mark.parametrize("base", [100.0, 1e4, 12_345.678, 1e8])
def test_near_the_float64_frequencies(scaling: Scheme | None, base: float) -> None:
    """float32 numbers, close to those of float64: the exponent of ln(base) · 2⁻²⁵ and a few roundings."""
    made = float32.frequencies(base, 64, scaling)[0]
    exact = Rope(64, base, "half", scaling=scaling).inv_freq
    assert np.array(made).astype(np.float32).astype(np.float64).tolist() == list(made)
    np.testing.assert_allclose(made, exact, rtol=1.5e-6)


EXTREMES = (1e-300, 1.0, 1e30, 1e100, 1e300, 1.7976931348623157e308)


def extreme() -> Iterator[Rope]:
    for base, a in itertools.product((1.0000000000000002, 1e4, 1.7e308), EXTREMES):
        for make in (
            lambda a: None,
            Linear,
            NTK,
            lambda a: Proportional(1.0, a),
            lambda a: PerPair([a] * 8),
            lambda a: Llama3(a, 1.0, 4.0, 64),
            lambda a: Llama3(4.0, min(a, 1.0), a, 64),
            lambda a: YaRN(a, 4096),
        ):
            try:
                yield Rope(16, base, "half", scaling=make(a))
            except RopeError:
                continue


def test_extreme_numbers_give_finite_tables_or_are_refused() -> None:
    refusals = set()
    for rope in extreme():
        try:
            rotation = rope.at(torch.arange(3), numerics="float32")
        except RopeError as e:
            refusals.add(str(e))
            continue
        assert rotation.cos.isfinite().all(), rope
        assert rotation.sin.isfinite().all(), rope
    message = 'frequencies must be finite in float32, got inf. Pass numerics="exact".'
    assert refusals == {f"Rope.at: {message}"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numerics": "float16"}, "Rope.at: numerics must be one of 'exact', 'float32', 'float32-frequencies'"),
        ({"numerics": None}, "Rope.at: numerics must be"),
        ({"numerics": ["float32"]}, "Rope.at: numerics must be"),
        ({"numerics": "float32", "dtype": torch.float64}, "Rope.at: dtype must be torch.float32 with numerics"),
        ({"numerics": "float32-frequencies", "dtype": torch.float16}, "Rope.at: dtype must be torch.float32 or"),
        ({"numerics": "float32", "positions": torch.ones(3).half()}, "Rope.at: positions must be int32 or int64"),
        ({"numerics": "float32", "positions": 3}, "Rope.at: positions must be a tensor"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        Rope(8, 1e4, "half").at(**{"positions": torch.arange(3), **arguments})


def test_a_length_is_required() -> None:
    rope = Rope(8, 1e4, "half", scaling=DynamicNTK(2.0, 64))
    with pytest.raises(RopeError, match="the length must be resolved"):
        rope.at(torch.arange(3), numerics="float32")
    assert rope.at_length(200).at(torch.arange(3), numerics="float32").cos.shape == (3, 4)
