"""`check`: the targets that it accepts, how it calls them, its reports, and the cases that it cannot judge."""

from __future__ import annotations

import json
import math
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import oracle
from ropewalk import Rope, RopeError, conformance, schemes
from ropewalk.tools.check.bugs import BUGS
from wrong_programs import PROGRAMS, written

pytest_plugins = ["ropewalk.integrations.pytest"]

HERE = Path(__file__).parent
RIGHT, WRONG = HERE / "right", HERE / "wrong"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x with half pairing by angles that broadcast to `[…, pairs]`."""
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).type_as(x)


def rotated(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate x correctly with half pairing, `[batch, seq, heads, head_dim]`."""
    inv_freq = base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = positions[..., None, None] * inv_freq
    return turned(x, angles)


def rotated_by_10_000(x: Tensor, positions: Tensor) -> Tensor:
    return rotated(x, positions)


@dataclass
class ModelArgs:
    rope_theta: float
    dim: int = 4096
    n_heads: int = 32
    n_kv_heads: int | None = None


class TestTarget:
    def test_an_object(self) -> None:
        report = conformance.check(rotated)
        assert report.codes == []
        assert report.found["frequencies"] == "base 10000"
        assert report.target == "rotated"

    def test_a_module_and_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(RIGHT))
        monkeypatch.delitem(sys.modules, "flash_attn_reference", raising=False)
        assert conformance.check("flash_attn_reference:apply_rotary_emb_torch").codes == []

    def test_a_file_may_import_its_neighbours(self, tmp_path: Path) -> None:
        (tmp_path / "neighbour_of_checked.py").write_text("from math import pi\n")
        (tmp_path / "mine.py").write_text(
            "import neighbour_of_checked\n" + (RIGHT / "module_of_one_tensor.py").read_text("utf-8")
        )
        before = [*sys.path]
        assert conformance.check(f"{tmp_path / 'mine.py'}:Rope").codes == []
        assert sys.path == before

    def test_a_method(self, tmp_path: Path) -> None:
        source = (RIGHT / "module_of_one_tensor.py").read_text("utf-8").replace("def forward", "def rotate_keys")
        (tmp_path / "mine.py").write_text(source)
        report = conformance.check(f"{tmp_path / 'mine.py'}:Rope.rotate_keys", base=500.0)
        assert report.codes == []
        assert report.found["frequencies"] == "base 500"

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("nothing", "TARGET must name a module and something in it, got 'nothing'"),
            ("no_such_module_here:f", "no_such_module_here cannot be imported: ModuleNotFoundError"),
            ("no/such/file.py:f", "TARGET must name an existing file"),
            (f"{RIGHT / 'meta_complex.py'}:rotate", "Its callables are: apply_rotary_emb, precompute_freqs_cis"),
            (f"{RIGHT / 'meta_complex.py'}:a,b,c", "TARGET must have one or two names"),
            (5, "target must be one or two callables"),
        ],
    )
    def test_not_found(self, target: Any, message: str) -> None:
        with pytest.raises(RopeError) as e:
            conformance.check(target)
        assert message in str(e.value)

    @pytest.mark.parametrize("code", ["import sys; sys.exit()", "\nraise KeyError('gone')", "def f(:"])
    def test_a_file_that_cannot_be_run(self, tmp_path: Path, code: str) -> None:
        (tmp_path / "mine.py").write_text(code)
        with pytest.raises(RopeError, match=rf"cannot be run: .*\(mine\.py, line {1 + code.count(chr(10))}\)"):
            conformance.check(f"{tmp_path / 'mine.py'}:f")

    def test_a_warning_names_the_code_that_runs(self) -> None:
        assert "This runs the code of mine.py" in conformance.says_what_runs("mine.py:f")


class TestCall:
    def test_parameter_names_without_a_known_role(self) -> None:
        def f(a: Tensor, b: Tensor) -> Tensor:
            return rotated(a, b)

        without_source = eval("lambda a, b: f(a, b)", {"f": f})
        with pytest.raises(RopeError, match="TARGET must have parameters for q and k, or for x"):
            conformance.check(without_source)
        assert conformance.check(lambda q, positions: without_source(q, positions)).codes == []

    def test_a_function_that_is_given_tables_has_no_scheme(self) -> None:
        scaling = {
            "rope_type": "longrope",
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
        }
        target = f"{RIGHT / 'hugging_face_with_a_fixed_axis.py'}:apply_rotary_pos_emb"
        report = conformance.check(target, config=LLAMA | {"max_position_embeddings": 32768, "rope_scaling": scaling})
        assert report.codes == []
        assert "long sequence" not in [grade.name for grade in report.grades]

    def test_a_constructor_with_an_unknown_parameter(self) -> None:
        class Rotary:
            def __init__(self, dim: int, flavour: str) -> None:
                self.flavour = flavour

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                return rotated(x, positions) if self.flavour == "plain" else x

        with pytest.raises(RopeError, match=r"got flavour\.(?s:.*)Rotary\(dim=64, flavour=\.\.\.\)"):
            conformance.check(Rotary)
        assert conformance.check(lambda dim: Rotary(dim=dim, flavour="plain")).codes == []
        assert conformance.check(lambda dim: Rotary(dim=dim, flavour="none")).codes == ["not-rotated"]
        assert conformance.check(lambda: Rotary(64, "plain")).codes == []

    def test_a_constructor_with_a_width_and_a_number_of_heads(self) -> None:
        class Rotary:
            def __init__(self, n_embd: int, n_head: int) -> None:
                self.dim = n_embd // n_head

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                assert x.shape[-1] == self.dim == 128
                return rotated(x, positions)

        assert "wrong-base" not in conformance.check(Rotary, config={**LLAMA, "head_dim": 128}).codes

    @pytest.mark.parametrize(
        ("make", "apply", "message"),
        [
            (
                lambda rows, dim: torch.zeros(rows),
                rotated,
                "every parameter of TestCall.<lambda> must have a default or a name whose",
            ),
            (lambda dim, base: sys.exit(3), lambda x, t: x, "(dim=64, base=10000.0) cannot be constructed: SystemExit"),
            (lambda dim, base: 5, lambda x, t: x, "code that computes tables must return tensors, got 5. Return cos"),
            (
                lambda x: x,
                lambda q, k: (q, k),
                "must have parameters for the tables: cos and sin, or one for both, got",
            ),
            (lambda x: x, lambda x, a, b, c: x, "for both, got parameters x, a, b, c. Check a function that calls it."),
        ],
    )
    def test_tables_that_cannot_be_passed(self, make: Any, apply: Any, message: str) -> None:
        with pytest.raises(RopeError) as e:
            conformance.check((make, apply))
        assert message in str(e.value)

    def test_parameters_for_tables_need_no_known_name(self) -> None:
        def make(n_positions: int, dim: int) -> tuple[Tensor, Tensor]:
            angles = torch.arange(n_positions)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2).double() / dim)
            return angles.cos(), angles.sin()

        def apply(a: Tensor, b: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
            u, v, c, s = *x.double().chunk(2, dim=-1), a.unsqueeze(-2), b.unsqueeze(-2)
            return torch.cat((u * c - v * s, v * c + u * s), dim=-1).type_as(x) * scale

        assert conformance.check((make, apply), base=10_000.0).codes == []
        assert conformance.check((lambda dim, n_positions: make(n_positions, dim)[::-1], apply)).verdict == "wrong"

    def test_a_function_of_five_tokens(self) -> None:
        with pytest.raises(RopeError, match=r"must accept more than one call, got RuntimeError: The size of tensor"):
            conformance.check(lambda x: rotated(x, torch.arange(5)))

    def test_a_constructor_that_raises(self) -> None:
        class Rotary:
            def __init__(self, dim: int) -> None:
                raise RuntimeError("no")

        with pytest.raises(
            RopeError, match=r"Rotary\(dim=64\) cannot be constructed: RuntimeError: no \(test_check\.py"
        ):
            conformance.check(Rotary)

    def test_a_function_that_always_raises(self) -> None:
        def f(x: Tensor) -> Tensor:
            raise RuntimeError("not today")

        with pytest.raises(RopeError, match=r"RuntimeError: not today \(test_check\.py, line \d+\)\."):
            conformance.check(f)

    def test_parameters_without_names(self) -> None:
        def positional(x: Tensor, positions: Tensor, /) -> Tensor:
            return rotated(x, positions)

        class Rotate(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
                ctx.positions = positions
                return rotated(x, positions)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
                return rotated(grad, -ctx.positions), None

        assert conformance.check(positional).codes == []
        assert conformance.check(Rotate).codes == []

    @pytest.mark.parametrize("returned", [None, [1, 2], {"x": 1}, torch.zeros(3)])
    def test_functions_that_return_no_tensor_of_the_shape(self, returned: Any) -> None:
        with pytest.raises(RopeError, match="must be callable in a known way, and rotate tensors"):
            conformance.check(lambda x, positions: returned)

    @pytest.mark.parametrize(
        ("function", "codes"),
        [
            (lambda x, positions: x, ["not-rotated"]),
            (lambda x, positions: x * torch.nan, ["not-finite"]),
            (lambda x, positions: x.float().cumsum(-1).type_as(x), ["not-a-rotation"]),
            (lambda x, positions: rotated(x, -positions), ["rotates-backwards"]),
            (lambda x, positions: rotated(x.double(), positions), ["wider-output"]),
        ],
    )
    def test_functions_that_compute_something_else(self, function: Callable[..., Any], codes: list[str]) -> None:
        assert conformance.check(function).codes == codes

    def test_raising_is_a_caution(self) -> None:
        """A function that raises an error returns no wrong result."""

        def one_row(x: Tensor, positions: Tensor) -> Tensor:
            if x.shape[0] > 1:
                raise ValueError("one row at a time")
            return rotated(x, positions)

        def float32_alone(x: Tensor, positions: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 alone")
            return rotated(x, positions)

        assert conformance.check(float32_alone).codes == ["raises"]
        report = conformance.check(one_row)
        assert (report.verdict, report.codes) == ("right", ["raises"])
        assert "one row at a time" in report.findings[0].says

    def test_megatron_layout(self) -> None:
        def f(x: Tensor, freqs: Tensor) -> Tensor:
            a, b = x.float().chunk(2, dim=-1)
            return (x * freqs.cos() + torch.cat((-b, a), dim=-1) * freqs.sin()).type_as(x)

        report = conformance.check(f, layout="sbhd")
        assert (report.codes, report.found["layout"]) == ([], "sbhd")

    def test_tables_that_do_not_fit_the_parameters(self) -> None:
        def make(positions: Tensor) -> Tensor:
            return positions[..., None].cfloat()

        def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return x * cos + x * sin

        with pytest.raises(RopeError, match=r"1 tensor\(s\) are computed for the parameters cos, sin"):
            conformance.check((make, rotate))

    @pytest.mark.parametrize(
        ("library", "array", "codes"), [("jax.numpy", "asarray", []), ("mlx.core", "array", ["table-clamps"])]
    )
    def test_other_libraries(self, library: str, array: str, codes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """With a stand-in, since these need not be installed. An index of JAX stops at the last row of a table."""
        monkeypatch.setitem(sys.modules, library, module := ModuleType(library))
        setattr(module, array, np.array)
        scope: dict[str, Any] = {"lib": module, "e": math.e, "inv_freq": 10_000.0 ** (-np.arange(32) / 32)}
        code = """
def f(x, pos):
    z = (x[..., :32] + 1j * x[..., 32:]) * e ** (1j * pos.clip(0, 4095)[..., None, None] * inv_freq)
    out = x.copy()
    out[..., :32], out[..., 32:] = z.real, z.imag
    return out
"""
        exec(code, scope)
        report = conformance.check(scope["f"], pairing="half", base=10_000.0)
        assert (report.codes, report.found["call"]) == (codes, f"f(x, pos), arrays of {library.partition('.')[0]}")

    def test_torchs_warnings_are_not_shown(self) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            return torch.complex(rotated(x, positions), torch.ones_like(x)).type_as(x)  # warns that a part is lost

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert conformance.check(f, pairing="half").verdict == "right"

    def test_an_axis_that_the_tables_get(self) -> None:
        """Whoever calls the function with the tables as they are rotates by the heads."""

        def make(positions: Tensor) -> Tensor:
            return positions[..., None] * 10_000.0 ** (-torch.arange(32) / 32)

        def apply(x: Tensor, angles: Tensor) -> Tensor:
            return turned(x, angles[-x.shape[-2] :])

        calls = [conformance.check((make, apply), layout=layout).found["call"] for layout in ("bshd", "bhsd")]
        text = "tables, then f(x, angles)"
        assert calls == [f"{text}, tables with an axis for the heads", text]

    def test_a_head_with_as_many_channels_as_a_grid_has_rows(self) -> None:
        class Rotary:
            def __init__(self, head_dim: int) -> None: ...
            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                return rotated(x, positions.clamp(max=3000))

        assert "wrong-far-positions" in conformance.check(Rotary, head_dim=256).codes

    def test_rows_of_zeros(self) -> None:
        report = conformance.check(lambda x, positions: rotated(x, positions) * (positions[..., None, None] > 3))
        assert report.findings[0].says == "The result is 0 at position 0, as with cos and sin of 0."

    def test_layout(self) -> None:
        with pytest.raises(RopeError, match=r"layout must be one of .bshd., .bhsd., .*, .1111d., got .dh."):
            conformance.check(rotated, layout="dh")  # type: ignore[arg-type]


class TestExpected:
    def test_config(self) -> None:
        report = conformance.check(rotated, config=LLAMA)
        assert report.codes == []
        report = conformance.check(rotated_by_10_000, config=LLAMA | {"rope_theta": 500000.0})
        assert report.codes == ["wrong-base"]
        assert report.findings[0].says == "The base is 10000 instead of 500000."

    def test_a_wrong_base_without_a_config(self) -> None:
        report = conformance.check(lambda x, positions: rotated(x, positions, 500.0), base=10_000.0)
        assert [finding.says for finding in report.findings] == ["The base is 500 instead of 10000."]
        # A usual base is named as such, although exponents 2i/64 would give the same.
        report = conformance.check(lambda x, positions: rotated(x, positions, 1e6), base=10_000.0, head_dim=96)
        assert [finding.says for finding in report.findings] == ["The base is 1000000 instead of 10000."]

    @pytest.mark.parametrize(
        ("size", "base", "sign", "too"),
        [
            (62, "13459.6", 1, ""),
            (66, "7564.63", 1, ""),
            (32, "1e+08", 1, ""),
            (128, "100", -1, " Every pair is rotated by minus its angle. This is right only for weights that were "),
        ],
    )
    def test_the_size_under_the_exponents_is_named(self, size: int, base: str, sign: int, too: str) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            return turned(x, sign * positions[..., None, None] * 10_000.0 ** (-torch.arange(0, 64, 2) / size))

        report = conformance.check(f, base=10_000.0)
        says = f"The exponents are 2i/{size}, but 64 channels are rotated. This equals base {base}.{too}"
        says += "trained with it." * bool(too)
        assert [(finding.code, finding.says) for finding in report.findings] == [("wrong-exponent", says)]

    @pytest.mark.parametrize(
        ("exponents", "says"),
        [
            (-(torch.arange(0, 64, 2) + 1) / 64, "The exponents are (2i+1)/64 instead of 2i/64."),
            (-(torch.arange(0, 64, 2) + 2) / 64, "The exponents are (2i+2)/64 instead of 2i/64."),
            (torch.arange(0, 64, 2).double() / 64, "The exponents have no minus sign."),
        ],
    )
    def test_other_exponents_are_named(self, exponents: Tensor, says: str) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            return turned(x, positions[..., None, None] * 10_000.0**exponents)

        report = conformance.check(f, base=10_000.0)
        assert [(finding.code, finding.says) for finding in report.findings] == [("wrong-exponent", says)]
        alone = conformance.check(f)  # without a base, only what no rope has is wrong
        assert alone.codes == ["wrong-exponent"] * ("sign" in says)

    def test_pairing(self) -> None:
        report = conformance.check(rotated, pairing="interleaved")
        assert report.findings[0].says == "The pairing is half, but interleaved is expected."

    def test_the_pairing_of_a_config(self) -> None:
        said = RIGHT / "llama2_c_loop.py"
        report = conformance.check(f"{said}:rope", config=LLAMA)
        assert report.codes == ["wrong-pairing"]
        assert "weights of model_type llama use half" in report.findings[0].says

    def test_values_that_the_config_lacks_and_a_key_that_it_must_not_have(self) -> None:
        config = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"rope_kind": 3}
        given = {"config": config | {"model_type": "mine"}, "pairing": "half", "ignore": ["rope_kind", "no-gradient"]}
        assert conformance.check(rotated, base=10_000.0, **given).codes == []
        assert conformance.check(rotated_by_10_000, base=500_000.0, **given).codes == ["wrong-base"]

    def test_a_scheme_that_depends_on_the_length(self) -> None:
        config = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}

        def dynamic(x: Tensor, positions: Tensor) -> Tensor:
            n = max(int(positions.max()) + 1, 4096)
            return rotated(x, positions, 10_000.0 * (2.0 * n / 4096 - 1.0) ** (64 / 62))

        assert conformance.check(dynamic, config=config).codes == []
        longest = 4096

        def growing(x: Tensor, positions: Tensor) -> Tensor:
            """As in transformers, which keeps the frequencies of the longest sequence until a short one comes."""
            nonlocal longest
            n = int(positions.max()) + 1
            longest = max(n, longest) if n > 4096 else 4096
            return rotated(x, positions, 10_000.0 * (2.0 * longest / 4096 - 1.0) ** (64 / 62))

        assert conformance.check(growing, config=config).codes == []

        def late(x: Tensor, positions: Tensor) -> Tensor:
            return (dynamic if int(positions.max()) > 5000 else rotated)(x, positions)

        def early(x: Tensor, positions: Tensor) -> Tensor:
            return (rotated if int(positions.max()) > 5000 else dynamic)(x, positions)

        for function, n in ((rotated, "4,104"), (late, "4,104"), (early, "8,192")):
            report = conformance.check(function, config=config)
            says = f"A sequence of {n} tokens has the frequencies of a short one. Training ended at 4,096."
            assert [(finding.code, finding.says) for finding in report.findings] == [("length-ignored", says)]

    @pytest.mark.parametrize("rest", [1.0, math.nan])
    def test_a_bug_that_only_the_scheme_knows(self, rest: float) -> None:
        """In the frequencies of a bug, NaN stands for any frequency."""

        @dataclass(frozen=True)
        class Halved(schemes.Scheme):
            rope_type = "halved"

            def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
                return tuple(w / 2 for w in schemes.default.inv_freq(base, rotary_dim))

            def known_bugs(self, base: float, rotary_dim: int) -> Iterator[tuple[str, str, Sequence[float]]]:
                others = [rest * w for w in self.inv_freq(base, rotary_dim)[1:]]
                yield "halved-first-pair", "The first pair has 2 radians.", (2.0, *others)
                yield "halved-first-pair", "The first pair has 0.75 radians.", (0.75, *others)

        def f(x: Tensor, positions: Tensor) -> Tensor:
            angles = positions[..., None, None] * torch.tensor([0.75, *10_000.0 ** (-torch.arange(2, 64, 2) / 64) / 2])
            return turned(x, angles)

        report = conformance.check(f, rope=Rope(64, 10_000.0, "half", scaling=Halved()))
        assert [(finding.code, finding.says) for finding in report.findings] == [
            ("halved-first-pair", "The first pair has 0.75 radians.")
        ]
        assert "WRONG  halved-first-pair: the frequencies are those of a mistake" in str(report)

    def test_the_config_object_has_only_the_keys_of_the_config(self, tmp_path: Path) -> None:
        class Rotary:
            def __init__(self, config: Any) -> None:
                self.base = getattr(config, "rope_theta", 10_000.0)
                self.keys = vars(config)
                seen.append({*vars(config)})

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                return rotated(x, positions, self.base)

        class ReadsKind(Rotary):
            def __init__(self, config: Any) -> None:
                assert config.head_dim == 64  # as config classes derive it
                self.base = config.rope_theta * config.rope_kind

        seen: list[set[str]] = []
        parameters = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
        config = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | parameters
        assert conformance.check(Rotary, config=config).codes == ["wrong-base"]
        assert seen[0] == {*config}
        with pytest.raises(RopeError, match="AttributeError: the config has no rope_kind"):
            conformance.check(ReadsKind, config=LLAMA)

    @pytest.mark.parametrize("annotation", [Any, "ModelArgs", ModelArgs, LlamaConfig, dict])
    def test_a_config_that_nobody_states_has_the_keys_that_are_read(self, annotation: Any) -> None:
        class Rotary:
            def __init__(self, hparams: Any) -> None:
                if annotation is LlamaConfig:
                    width = hparams.hidden_size // hparams.num_attention_heads
                    self.base = hparams.rope_parameters["rope_theta"]
                elif annotation is dict:
                    width, self.base = hparams["emb_dim"] // hparams["n_heads"], hparams["rope_base"]
                else:
                    width, self.base = hparams.dim // hparams.n_heads, hparams.rope_theta
                assert width == 64
                assert not hasattr(hparams, "flavour")

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                return rotated(x, positions, self.base)

        Rotary.__init__.__annotations__["hparams"] = annotation
        assert conformance.check(Rotary).codes == []
        if annotation in ("ModelArgs", ModelArgs):
            assert conformance.check(Rotary, config=LLAMA | {"rope_theta": 500_000.0}).codes == []

    @pytest.mark.parametrize(
        ("ramp", "codes", "says"),
        [
            ("right", [], "base 500000"),
            ("mirrored", ["llama3-smooth-inverted"], "mirrored frequency"),
            ("kept", ["wrong-frequencies"], "There is no ramp: the 3 pairs on it are kept."),
            ("divided", ["wrong-frequencies"], "There is no ramp: the 3 pairs on it are divided by the factor."),
        ],
    )
    def test_options_of_llama_3_by_other_names(self, ramp: str, codes: list[str], says: str) -> None:
        def make(
            head_dim: int, theta_base: float = 10_000.0, freq_config: dict[str, float] | None = None
        ) -> Callable[..., Tensor]:
            inv_freq = theta_base ** (-torch.arange(0, head_dim, 2).double() / head_dim)
            if freq_config is not None:
                of_length = freq_config["original_context_length"] * inv_freq / (2 * math.pi)
                low, high = freq_config["low_freq_factor"], freq_config["high_freq_factor"]
                smooth = ((of_length - low) / (high - low)).clamp(0, 1)
                instead = {"right": smooth, "mirrored": 1 - smooth, "kept": torch.tensor(1.0)}
                inside = (smooth > 0) & (smooth < 1)
                smooth = torch.where(inside, instead.get(ramp, torch.tensor(0.0)), smooth)
                inv_freq = smooth * inv_freq + (1 - smooth) * inv_freq / freq_config["factor"]
            return lambda x, positions: turned(x, positions[..., None, None] * inv_freq)

        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LLAMA | {"rope_theta": 500_000.0, "rope_scaling": scaling}
        report = conformance.check(make, config=config)
        assert report.codes == codes
        assert says in str(report), str(report)

    def test_code_for_the_config_class_of_transformers_gets_one(self) -> None:
        class Rotary:
            def __init__(self, config: LlamaConfig) -> None:
                self.base = config.rope_parameters["rope_theta"]

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                return rotated(x, positions, self.base)

        class Plain(Rotary):
            def __init__(self, config: Any) -> None:
                super().__init__(config)

        assert conformance.check(Rotary, config=LLAMA | {"rope_theta": 500_000.0}).codes == []
        assert conformance.check(Plain, config=LlamaConfig(**LLAMA)).codes == []
        with pytest.raises(RopeError, match="the config has no rope_parameters"):
            conformance.check(Plain, config=LLAMA)

    def test_tests_that_need_a_longer_call_are_not_judged(self) -> None:
        """Without positions, a call would need more tokens than the model was trained with."""
        config = LLAMA | {"max_position_embeddings": 65_536, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
        report = conformance.check(lambda x: rotated(x, torch.arange(x.shape[1])), config=config)
        says = {grade.name: grade.says for grade in report.grades}
        assert report.codes == []
        assert says["long sequence"].startswith("not judged: positions cannot be passed")
        assert says["earlier calls"] == "not judged: no call with more than 65,536 tokens can be made"

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"config": LLAMA, "rope": Rope(64, 1e4, "half")},
                "must be stated by rope alone, by config, or by base, pairing and head_dim, got config and rope",
            ),
            ({"config": LLAMA, "head_dim": 64}, "got config and head_dim. Drop the others."),
            ({"rope": Rope(64, 1e4, "half"), "base": 1e4}, "got rope and base."),
            ({"factor": 8.0, "download": True}, "got factor and download."),
            ({"config": LLAMA, "base": 5e5}, "rope_theta"),
            ({"ignore": ["rope_kind"]}, "ignore must be one of 'wrong-device'"),
            ({"config": LLAMA, "layer": 2}, "layer must be from 0 to 1, got 2"),
            ({"pairing": "both"}, "pairing must be"),
            ({"base": 1e4, "layer": 0}, "got layer and base."),
            ({"head_dim": 63}, "head_dim must be even, got 63"),
            ({"head_dim": 0}, "head_dim must be an integer of at least 2, got 0"),
        ],
    )
    def test_refused(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(RopeError) as e:
            conformance.check(rotated, **given)
        assert message in str(e.value)


# ExecuTorch had factor 8 for Llama 3.2 (its issue 7265), TransformerLens the length of a table (its pull request 910).
@pytest.mark.parametrize(
    ("factor", "length", "says"),
    [
        (8.0, 8192, "They are those of factor 8 instead of 32."),
        (32.0, 2048, "They are those of original_max_position_embeddings 2048 instead of 8192."),
        (8.0, 2048, "Pair "),  # both
    ],
)
@pytest.mark.parametrize("scheme", ["llama3", "yarn"])
def test_numbers_of_a_scaling(scheme: str, factor: float, length: int, says: str) -> None:
    if scheme == "llama3":
        found = oracle.by_parts(5e5, 64, factor, 1.0, 4.0, length)
        scaling: Any = schemes.Llama3(32.0, 1.0, 4.0, 8192)
    else:
        found = oracle.yarn(5e5, 64, factor, length)
        scaling = schemes.YaRN(32.0, 8192, attention_factor=1.0)
    inv_freq = torch.tensor([float(w) for w in found], dtype=torch.float64)

    def f(x: Tensor, positions: Tensor) -> Tensor:
        return turned(x, positions[..., None, None] * inv_freq)

    report = conformance.check(f, rope=Rope(64, 5e5, "half", scaling=scaling))
    assert report.codes == ["wrong-frequencies"]
    assert report.findings[0].says.startswith(says)


def test_a_factor_of_the_base_and_not_of_the_frequencies() -> None:
    plain = 5e5 ** (-torch.arange(0, 64, 2).double() / 64)
    right = torch.tensor([float(w) for w in oracle.yarn(5e5, 64, 32.0, 8192)], dtype=torch.float64)
    kept = (right - plain / 32) / (plain - plain / 32)
    wrong = kept * plain + (1 - kept) * (32 * 5e5) ** (-torch.arange(0, 64, 2).double() / 64)
    rope = Rope(64, 5e5, "half", scaling=schemes.YaRN(32.0, 8192, attention_factor=1.0))
    report = conformance.check(lambda x, positions: turned(x, positions[..., None, None] * wrong), rope=rope)
    assert report.findings[0].says == "The base is multiplied by 32, and they are not divided by it."


class TestFoundAlone:
    """Frequencies that are found without an expected config or base."""

    def test_llama3(self) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            plain = 500_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
            smooth = ((8192 * plain / (2 * torch.pi) - 1.0) / 3.0).clamp(0, 1)
            angles = positions[..., None, None] * (plain * smooth + plain / 8 * (1 - smooth))
            return turned(x, angles)

        report = conformance.check(f)
        assert report.codes == []
        assert report.found["frequencies"] == "no base fits: 1 to 3.77e-07 radians per token"

    @pytest.mark.parametrize("base", [1e4, 5e5])
    def test_a_usual_base_in_16_bits(self, base: float) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            inv_freq = (base ** (-torch.arange(0, 64, 2).float() / 64)).bfloat16().float()
            angles = positions[..., None, None].float() * inv_freq
            return turned(x, angles)

        assert conformance.check(f).codes == ["low-precision-frequencies"]

    def test_frequencies_that_are_no_progression(self) -> None:
        """Frequencies without a progression may be learned, so they are not wrong."""

        def f(x: Tensor, positions: Tensor) -> Tensor:
            angles = positions[..., None, None] * torch.sin(1.0 + torch.arange(32, dtype=torch.float64)).abs()
            return turned(x, angles)

        report = conformance.check(f)
        says = "no base fits: 0.841 to 0.551 radians per token"
        assert (report.codes, report.found["frequencies"]) == ([], says)

    def test_a_pair_that_turns_by_more_than_a_radian(self) -> None:
        """As in code for audio or for coordinates. No scheme for text does it, but nobody said that it is for text."""
        report = conformance.check(lambda x, positions: rotated(x, 2.5 * positions))
        assert (report.codes, report.found["frequencies"]) == ([], "base 10000, divided by 0.4")

    def test_turns_of_coordinates(self) -> None:
        """As in lucidrains' code for pixels, from -1 to 1: whole positions turn by several π, which float32 rounds."""

        def f(x: Tensor, coords: Tensor) -> Tensor:
            row, column = coords.float().unbind(-1)
            scales = torch.linspace(1.0, 5.0, 10)
            return turned(x, torch.cat([p[..., None, None] * scales * math.pi for p in (row, column)], dim=-1))

        with pytest.raises(RopeError, match="less than half a turn per position, got more, as for coordinates"):
            conformance.check(f, head_dim=40)
        assert conformance.check(lambda x, coords: f(x, coords / 64), head_dim=40).codes == []

    def test_a_usual_progression_in_reverse_order(self) -> None:
        report = conformance.check(
            lambda x, positions: turned(x, positions[..., None, None] * 1e4 ** (torch.arange(-62, 2, 2).double() / 64))
        )
        assert report.codes == ["frequencies-reversed"]

    def test_a_progression_whose_slowest_pair_comes_first(self) -> None:
        """No weights are known, so an unusual one may be right. It must not be denied that it is a progression."""
        report = conformance.check(
            lambda x, positions: turned(x, positions[..., None, None] * 1e-4 * 1e4 ** torch.linspace(0, 1, 32).double())
        )
        assert (report.codes, report.found["frequencies"]) == ([], "no base fits: 0.0001 to 1 radians per token")

    @pytest.mark.parametrize("given", [{}, {"base": 10_000.0}])
    @pytest.mark.parametrize(
        ("moved", "code", "says"),
        [
            (lambda p: p + 3, "positions-off-by-one", "Position 0 gets the angles of 3."),
            (lambda p: p * p, "wrong-frequencies", "The angles are not proportional to the positions."),
        ],
    )
    def test_positions_that_are_moved(
        self, moved: Callable[[Tensor], Tensor], code: str, says: str, given: dict[str, Any]
    ) -> None:
        report = conformance.check(lambda x, positions: rotated(x, moved(positions)), **given)
        assert (report.codes[0], report.findings[0].says) == (code, says)

    def test_a_pairing_without_a_name(self) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            mirrored = torch.cat((x[..., :32], x[..., 32:].flip(-1)), dim=-1)
            out = rotated(mirrored, positions)
            return torch.cat((out[..., :32], out[..., 32:].flip(-1)), dim=-1)

        report = conformance.check(f)
        assert report.codes == ["wrong-pairing"]
        assert report.findings[0].says.startswith("Channels 0 and 63 form the first pair")

    def test_angles_of_its_own_for_each_head(self) -> None:
        """As in vision models that learn them. Without a statement, nothing says that they are a bug."""

        def f(x: Tensor, positions: Tensor) -> Tensor:
            speeds = 1 + torch.arange(x.shape[2])[:, None] / 100
            inv_freq = 10_000.0 ** (-torch.arange(0, 64, 2).double() / 64)
            return turned(x, positions[..., None, None] * speeds * inv_freq)

        with pytest.raises(RopeError, match="angles of its own for each head"):
            conformance.check(f, layout="bshd")
        assert conformance.check(f, layout="bshd", base=10_000.0).codes == ["heads-differ"]

    def test_the_number_of_the_head_is_added(self) -> None:
        """As in a kernel that walks the heads as tokens (emlx 121), where nothing is stated but the layout."""

        def f(x: Tensor, positions: Tensor) -> Tensor:
            at = positions[..., None] + torch.arange(x.shape[2])
            return turned(x, at[..., None] * 10_000.0 ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1]))

        (finding,) = conformance.check(f, layout="bshd").findings
        assert (finding.code, finding.says[:48]) == ("heads-differ", "The number of the head is added to the position.")

    def test_halves_of_blocks(self) -> None:
        """As in code for music: blocks of other sizes, with channels between them that rest."""

        def f(x: Tensor, positions: Tensor) -> Tensor:
            angles = positions[..., None, None] * 10_000.0 ** (-torch.arange(16).double() / 16)
            parts = [x.chunk(4, dim=-1)[0], *x[..., 32:].split(8, dim=-1)[::2]]
            a, b, c = (turned(part, own) for part, own in zip(parts, angles.split([8, 4, 4], dim=-1), strict=True))
            return torch.cat((a, x[..., 16:32], b, x[..., 40:48], c, x[..., 56:]), dim=-1)

        report = conformance.check(f)
        says = "half, in 3 blocks"
        assert (report.codes, report.found["pairing"], report.found["frequencies"][:10]) == ([], says, "base 10000")
        assert conformance.check(f, pairing="half").codes == ["wrong-pairing"]

    def test_crossed_and_not_rotated(self) -> None:
        report = conformance.check(lambda q, k, cos, sin: (k, q))
        says = ["The result for q is computed from k. The result for k is computed from q."]
        assert (report.codes, [finding.says for finding in report.findings]) == (["query-and-key-crossed"], says)

    def test_a_slice_that_is_moved_to_the_end_of_a_table(self) -> None:
        """As by dynamic_slice of JAX: equinox 799."""

        def f(x: Tensor, offset: int) -> Tensor:
            return rotated(x, min(offset, 300 - x.shape[1]) + torch.arange(x.shape[1]))

        report = conformance.check(f, layout="bshd")
        assert [(finding.code, finding.says) for finding in report.findings] == [
            ("wrong-far-positions", "Position 301 has the angles of 297.")
        ]

    @pytest.mark.parametrize(
        ("of", "code"),
        [
            (lambda p: p + 1, "positions-off-by-one"),
            (lambda p: p - 1, "positions-off-by-one"),
            (lambda p: 2 * p, "wrong-far-positions"),
            (lambda p: min(p, 5), "wrong-far-positions"),
        ],
    )
    def test_a_wrong_offset_is_one_bug(self, of: Callable[[int], int], code: str) -> None:
        """A single token, and the gradient, have the angles of the wrong offset, too."""

        def f(x: Tensor, offset: int) -> Tensor:
            return rotated(x, torch.arange(x.shape[1]) + (of(offset) if offset else 0))

        assert conformance.check(f).codes == [code]


class TestRounding:
    """What is rounded to 16 bits is named right, whether or not the base is known."""

    @pytest.mark.parametrize("given", [{}, {"base": 10_000.0}])
    @pytest.mark.parametrize("stage", ["frequencies", "positions", "angles", "tables"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_one_stage(self, dtype: torch.dtype, stage: str, given: dict[str, Any]) -> None:
        def rounded(t: Tensor, this: str) -> Tensor:
            return t.to(dtype).float() if stage == this else t.float()

        inv_freq = rounded(10_000.0 ** (-torch.arange(0, 64, 2).float() / 64), "frequencies")
        angles = rounded(rounded(torch.arange(8_192), "positions")[:, None] * inv_freq, "angles")
        cos, sin = (rounded(t, "tables") for t in (angles.cos(), angles.sin()))

        def f(x: Tensor, positions: Tensor) -> Tensor:
            a, b, c, s = *x.float().chunk(2, dim=-1), cos[positions][:, :, None], sin[positions][:, :, None]
            return torch.cat((a * c - b * s, b * c + a * s), dim=-1).type_as(x)

        report = conformance.check(f, **given)
        assert report.codes == [f"low-precision-{stage}"]
        assert str(dtype).removeprefix("torch.") in report.findings[0].says


class TestIgnore:
    def test_a_finding_is_shown_and_not_counted(self) -> None:
        report = conformance.check(lambda x, positions: rotated(x, -positions), ignore=["rotates-backwards"])
        assert (report.verdict, report.codes, report.counted) == ("right", ["rotates-backwards"], [])
        assert "IGNORED  rotates-backwards: pairs are rotated by minus their angle" in str(report)
        assert report.to_dict()["findings"][0]["ignored"] is True
        assert conformance.assert_right(lambda x, positions: x, ignore=["not-rotated"]).verdict == "right"

    def test_the_rest_is_judged(self) -> None:
        def f(x: Tensor, positions: Tensor) -> Tensor:
            return rotated(x, -positions.clamp(max=1_023))

        report = conformance.check(f, ignore=["rotates-backwards"])
        assert (report.verdict, report.codes) == ("wrong", ["rotates-backwards", "table-clamps"])

    def test_an_unknown_code(self) -> None:
        with pytest.raises(RopeError, match=r"ignore must be one of 'wrong-device', .*Did you mean 'wrong-base'\?"):
            conformance.check(rotated, ignore=["wrong_base"])


class TestReport:
    def test_lines(self) -> None:
        text = str(conformance.check(f"{WRONG / 'cos_and_sin_swapped.py'}:apply_rotary_pos_emb"))
        assert text.startswith(f"{WRONG / 'cos_and_sin_swapped.py'}:apply_rotary_pos_emb: wrong\n")
        assert "WRONG  cos-and-sin-swapped: cos and sin are swapped" in text
        assert "How to fix it: Swap them" in text

    @pytest.mark.parametrize(
        ("given", "listed"),
        [
            ({}, "pairing, base, scaling, attention factor"),
            ({"pairing": "half"}, "base, scaling, attention factor"),
            ({"pairing": "half", "base": 10_000.0}, None),
            ({"rope": Rope(64, 10_000.0, "half")}, None),
        ],
    )
    def test_what_nothing_states_is_not_judged(self, given: dict[str, Any], listed: str | None) -> None:
        report = conformance.check(lambda x, positions: rotated(x, positions), **given)
        assert report.found.get("not judged", "").partition(", which ")[0] == (listed or "")

    def test_json(self) -> None:
        report = conformance.check(f"{WRONG / 'output_order.py'}:Rotary")
        said = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert (said["verdict"], said["findings"][0]["code"]) == ("right", "output-order")
        assert said["findings"][0]["severity"] == "caution"

    def test_a_cast_of_the_module_is_left_to_verify(self) -> None:
        """It rounds every buffer, also those of transformers, so it is no finding. It is said that it was not tried."""

        class Rotary(torch.nn.Module):
            inv_freq: Tensor

            def __init__(self, dim: int) -> None:
                super().__init__()
                self.register_buffer("inv_freq", 10_000.0 ** (-torch.arange(0, dim, 2) / dim), persistent=False)

            def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
                angles = positions[..., None].float() * self.inv_freq.float()
                return angles.cos(), angles.sin()

        def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            cos, sin = cos[:, :, None], sin[:, :, None]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        report = conformance.check((Rotary, apply))
        assert report.codes == []
        says = "what .bfloat16() or .half() does to inv_freq, which conformance.verify reads in a loaded model"
        assert report.found["not tried"] == says
        assert "not tried" not in conformance.check(rotated).found
        config = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
        config |= {"rope_theta": 10_000.0, "max_position_embeddings": 4096}
        held = conformance.verify(Rotary(64).half(), config).held
        assert [each.code for each in held] == ["low-precision-frequencies"]

    def test_the_smallest_case(self) -> None:
        report = conformance.Report("mine")
        report.add("size-dependent", "The last head is not rotated.", "3 heads of 80 channels, 1 token")
        report.add("wrong-base", "The base is 500 instead of 10000.")
        first, second = report.to_dict()["findings"]
        assert (first["case"], second["case"]) == (None, "3 heads of 80 channels, 1 token")
        assert "    The last head is not rotated.\n    Smallest case: 3 heads of 80 channels, 1 token.\n" in str(report)
        assert str(report).count("Smallest case") == 1

    @pytest.mark.parametrize("name", ["cache", "past_k", "layer_past", "use_cache", "past_key_value"])
    def test_decoding_that_was_not_tried(self, name: str) -> None:
        scope: dict[str, Any] = {"rotated": rotated}
        exec(f"def f(x, positions, {name}=None, scale=1.0): return rotated(x, positions), {name}", scope)
        report = conformance.check(scope["f"])
        assert str(report).startswith(f"f: right, but decoding was not tried (not passed: {name})\n")
        assert report.to_dict()["untried"] == [name]
        assert str(conformance.check(rotated)).startswith("rotated: right\n")

    def test_every_bug_has_a_title(self) -> None:
        for code, bug in BUGS.items():
            assert code == code.lower()
            assert bug.title
            assert bug.fix.endswith((".", ")")) or not bug.fix

    def test_errors_at_far_positions(self) -> None:
        """Exact angles only have rounding errors. The larger errors of float32 angles are reported as a number."""

        def f(x: Tensor, positions: Tensor) -> Tensor:
            inv_freq = 10_000.0 ** (-torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
            angles = positions[..., None, None].float() * inv_freq
            return turned(x, angles)

        drifts = {grade.name: grade for grade in conformance.check(f).grades}["error at 1,048,575"]
        exact = {grade.name: grade for grade in conformance.check(rotated).grades}["error at 1,048,575"]
        assert drifts.number is not None
        assert exact.number is not None
        assert (drifts.right, exact.right) == (True, True)
        assert drifts.number > 1e-3
        assert exact.number < 1e-7
        assert "exact to float32" in exact.says

    def test_the_end_of_a_table_is_named(self, tmp_path: Path) -> None:
        says = conformance.check(f"{written(PROGRAMS['table_wraps'], tmp_path)}:Rotary").findings[0].says
        assert says == "Position 2,049 has the angles of 1: they repeat after 2,048 tokens."
        rotary = runpy.run_path(str(written(PROGRAMS["table_clamps"], tmp_path)))["Rotary"]
        says = conformance.check(lambda dim, base: rotary(dim, base=base, max_positions=300)).findings[0].says
        assert says == "Position 301 has the angles of 299, the last of a table of 300 rows."

    def test_the_last_row_of_a_slice_is_broadcast(self) -> None:
        """A call from the last row on is not refused, and one past it is."""

        def f(x: Tensor, start_pos: int) -> Tensor:
            angles = torch.arange(253)[start_pos : start_pos + x.shape[1], None] * 100.0 ** (-torch.arange(32) / 32)
            return turned(x, angles[:, None])

        report = conformance.check(f)
        assert report.codes == [], str(report)
        assert next(grade.says for grade in report.grades if grade.name == "far positions").startswith(
            "fails past position 252"
        )

    def test_a_base_that_is_not_passed_on(self) -> None:
        """As theta in FluxPosEmbed (diffusers issue 10111), where no table is cached."""

        class Rotary:
            def __init__(self, dim: int, theta: float) -> None:
                self.dim, self.theta = dim, theta

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                return rotated(x, positions)

        (finding,) = conformance.check(Rotary).findings
        assert finding.code == "base-ignored"
        assert finding.bug.fix.startswith("Pass it on to the code that computes the angles")

    def test_one_call_changes_no_state(self) -> None:
        torch.manual_seed(3)
        before = torch.get_rng_state()
        conformance.check(rotated)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.is_grad_enabled()


class TestAssert:
    def test_passes(self) -> None:
        assert conformance.assert_right(rotated).verdict == "right"

    def test_fails_with_the_report(self) -> None:
        with pytest.raises(AssertionError, match="wrong-base: the base is wrong"):
            conformance.assert_right(rotated_by_10_000, config=LLAMA | {"rope_theta": 500000.0})

    def test_a_single_token_of_another_shape_fails(self, tmp_path: Path) -> None:
        path = written(PROGRAMS["wrong_shape__one_token"], tmp_path)
        with pytest.raises(AssertionError, match=r"q of shape \(1, 1, 8, 64\) is returned with shape \(1, 8, 64\)"):
            conformance.assert_right(f"{path}:Rotary")

    def test_fixture(self, assert_rope: Callable[..., Any]) -> None:
        assert assert_rope(rotated, base=10_000.0).codes == []
