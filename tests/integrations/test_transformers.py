"""Test models of transformers that rotate through ropewalk, in every way in which models are run.

Each model is tiny and has random weights. test_transformers_table.py tests all model types.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import oracle
import ropewalk
import tiny_models
from model_checks import FAR, NEAR, attached, gradients, output, relative, rms, tokens, with_exact_tables
from ropewalk import RopeError
from ropewalk.integrations.transformers import accelerate, restore
from ropewalk.integrations.transformers.functions import original

pytest.importorskip("transformers", "5.23")


@pytest.fixture
def llama() -> Any:
    return tiny_models.build("llama")


def far_with_exact_tables(name: str) -> Tensor:
    model, ids = tiny_models.build(name), tokens()
    with_exact_tables(model)
    with torch.no_grad():
        return output(model, ids, FAR)


class TestNumbers:
    """What test_transformers_table.py does not measure for each model."""

    def test_their_angles_in_bfloat16(self) -> None:
        """Like the kernel, OLMo 2 rotates in float32 and rounds once, so the results are bitwise equal."""
        model, ids = tiny_models.build("olmo2").to(torch.bfloat16), tokens()
        with torch.no_grad():
            expected = output(model, ids)
            accelerate(model, angles="theirs")
            assert torch.equal(output(model, ids), expected)

    def test_their_angles_are_never_cast(self, llama: Any) -> None:
        """Llama's module rounds cos and sin to bfloat16. The Rotation attached to them stays float32."""
        llama.to(torch.bfloat16)
        ids = tokens()
        with torch.no_grad():
            expected = output(llama, ids).float()
            accelerate(llama, angles="theirs")
            tables = llama.model.rotary_emb(torch.zeros(1, 64, 64, dtype=torch.bfloat16), torch.arange(64)[None])
            assert [table.dtype for table in tables] == [torch.bfloat16] * 2
            assert attached(tables).cos.dtype is torch.float32
            assert rms(output(llama, ids).float(), expected) < 0.03

    def test_rows_with_positions_of_their_own(self, llama: Any) -> None:
        """Each of two rows with distant positions gives the same result as in a batch of one."""
        ids, places = tokens(2, 16), torch.stack((torch.arange(16), torch.arange(90_000, 90_016)))
        accelerate(llama)
        with torch.no_grad():
            both = llama(input_ids=ids, position_ids=places)[0]
            for row in (0, 1):
                alone = llama(input_ids=ids[row : row + 1], position_ids=places[row : row + 1])[0]
                assert relative(both[row], alone[0]) <= NEAR

    def test_rotations_are_counted(self, llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every layer that rotates uses a Rotation, and none falls back to the original function."""
        calls = []
        turn = ropewalk.Rotation.__call__
        monkeypatch.setattr(ropewalk.Rotation, "__call__", lambda *a, **k: calls.append(1) or turn(*a, **k))
        smol = tiny_models.build("smollm3")  # every fourth layer does not rotate
        for model, layers in ((llama, 2), (smol, 3)):
            accelerate(model)
            calls.clear()
            output(model, tokens())
            assert len(calls) == layers

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_the_same_tokens(self, llama: Any, cache: str) -> None:
        def generate() -> Tensor:
            ids = tokens(2, 16)
            seen = torch.ones_like(ids)
            seen[0, :5] = 0  # padding on the left: positions of two rows
            kept = {} if cache == "dynamic" else {"cache_implementation": "static"}
            return llama.generate(
                ids,
                attention_mask=seen,
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=-1,
                disable_compile=True,
                **kept,
            )

        expected = generate()
        accelerate(llama)
        assert torch.equal(generate(), expected)

    def test_after_a_cast_to_bfloat16(self) -> None:
        """`.to` casts inv_freq of transformers and ruins its angles. Those of ropewalk are not in the model."""
        model, ids = tiny_models.build("llama"), tokens(2, 32)
        places = torch.cat((torch.arange(16), torch.arange(4_000, 4_016)))[
            None
        ]  # the second half looks back to the first
        cast = copy.deepcopy(model).to(torch.bfloat16)
        before, after = copy.deepcopy(model), copy.deepcopy(cast)
        accelerate(before)
        before.to(torch.bfloat16)
        accelerate(after)
        exact = copy.deepcopy(cast).float()  # the same weights
        with_exact_tables(exact)
        with torch.no_grad():
            wanted, theirs, ours, others = (
                each(input_ids=ids, position_ids=places)[0].float() for each in (exact, cast, before, after)
            )
        assert torch.equal(ours, others)
        assert rms(ours, wanted) < 0.03  # bfloat16 itself
        assert rms(theirs, wanted) > 4 * rms(ours, wanted)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_after_a_cast_there_and_back(self, llama: Any, dtype: torch.dtype) -> None:
        """inv_freq is float32 again, but still rounded."""
        llama.to(dtype).float()
        ids = tokens()
        wanted = copy.deepcopy(llama)
        with_exact_tables(wanted)
        accelerate(llama)
        assert torch.equal(output(llama, ids, FAR), output(wanted, ids, FAR))

    def test_float64(self, llama: Any) -> None:
        llama.double()
        ids = tokens()
        with torch.no_grad():
            near = output(llama, ids)
            accelerate(llama)
            assert output(llama, ids).dtype is torch.float64
            cos, _ = llama.model.rotary_emb(torch.zeros(1, 1, 1).double(), torch.tensor([[FAR]]))
            exact, _ = oracle.cos_sin([FAR], [float(w) for w in oracle.inv_freq(10_000.0, 16)])
            bound = 1e-15 + FAR * 2 * torch.pi * 2.0**-65  # the steps are 64 bits
            assert abs(cos[0, :, :8].numpy() - exact).max() <= bound
            assert relative(output(llama, ids), near) <= NEAR

    def test_under_another_default_dtype(self, llama: Any) -> None:
        """The probes of `accelerate` do not depend on it."""
        torch.set_default_dtype(torch.bfloat16)
        try:
            accelerate(llama)
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            assert torch.equal(output(llama, tokens(), FAR), far_with_exact_tables("llama"))

    def test_autocast(self, llama: Any) -> None:
        """PyTorch casts q and k to bfloat16 before attention, so the rotation may round them as well."""
        ids = tokens()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            accelerate(llama, angles="theirs")
            ours = output(llama, ids)
            restore(llama)
            theirs = output(llama, ids)
        assert ours.dtype == theirs.dtype
        assert rms(ours.float(), theirs.float()) < 0.01

    @pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing(self, llama: Any, reentrant: bool) -> None:
        llama.train()
        expected = gradients(llama, tokens())
        llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
        accelerate(llama)
        got = gradients(llama, tokens())
        assert max(rms(got[name], expected[name]) for name in expected) <= 2 * NEAR

    def test_inference_mode_then_training(self, llama: Any) -> None:
        expected = gradients(llama, tokens())
        accelerate(llama)
        with torch.inference_mode():
            output(llama, tokens())
        got = gradients(llama, tokens())
        assert max(rms(got[name], expected[name]) for name in expected) <= 2 * NEAR

    @pytest.mark.filterwarnings("ignore")  # PyTorch announces the end of this quantisation
    @pytest.mark.parametrize("first", ["quantise", "accelerate"])
    def test_quantised_linear_layers(self, llama: Any, first: str) -> None:
        quantise = torch.ao.quantization.quantize_dynamic
        ids = tokens()
        expected = output(quantise(copy.deepcopy(llama)), ids)
        if first == "accelerate":
            accelerate(llama, angles="theirs")
        llama = quantise(llama)
        if first == "quantise":
            accelerate(llama, angles="theirs")
        assert torch.equal(output(llama, ids), expected)


class TestCodeThatUsesTheTables:
    """Tables are tensors of the model's shape and dtype, so its code may slice and combine them."""

    @pytest.mark.parametrize("angles", ["exact", "theirs"])
    @torch.no_grad()
    def test_layers_that_share_keys(self, angles: Any) -> None:
        """Gemma 4 slices cos and sin where later layers reuse the keys of earlier ones."""
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        kinds = ["sliding_attention", "full_attention"] * 2
        shared = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": kinds, "global_head_dim": 32}
        sizes = {key: tiny_models.TINY[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 16}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            config = Gemma4TextConfig(**sizes, **shared, vocab_size_per_layer_input=sizes["vocab_size"])
            model, ids = Gemma4ForCausalLM(config).eval(), tokens()
        expected, written = output(model, ids), model.generate(ids[:1, :8], max_new_tokens=4, do_sample=False)
        rounded = output(copy.deepcopy(model).to(torch.bfloat16), ids)
        accelerate(model, angles=angles)
        assert relative(output(model, ids), expected) <= NEAR
        assert torch.equal(model.generate(ids[:1, :8], max_new_tokens=4, do_sample=False), written)
        model.to(torch.bfloat16)
        # How roundings to bfloat16 cancel is chance, which the processor decides. It is less than a bit.
        assert rms(output(model, ids).float(), expected) <= 2 * rms(rounded.float(), expected)

    def test_tables_are_as_the_model_makes_them(self, llama: Any) -> None:
        ids, rotary = torch.arange(70_000, 70_005)[None], llama.model.rotary_emb
        for dtype in (torch.float32, torch.bfloat16):
            theirs = rotary(torch.zeros(2, 5, 64, dtype=dtype), ids)
            accelerate(llama)
            ours = rotary(torch.zeros(2, 5, 64, dtype=dtype), ids)
            restore(llama)
            exact = oracle.cos_sin(ids[0].tolist(), [float(w) for w in oracle.inv_freq(10_000.0, 16)])
            for got, their, wanted in zip(ours, theirs, exact, strict=True):
                assert (got.shape, got.dtype) == (their.shape, their.dtype)
                assert torch.equal(got[0], torch.from_numpy(wanted).float().repeat(1, 2).to(dtype))

    @torch.no_grad()
    def test_functions_that_are_replaced_afterwards(self, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """For example by Liger."""
        import transformers.models.llama.modeling_llama as file

        ids, calls = tokens(), []
        accelerate(llama)
        expected = output(llama, ids)
        plain = original(file.apply_rotary_pos_emb)
        monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda *given: calls.append(1) or plain(*given))
        assert torch.equal(output(llama, ids), expected)
        assert len(calls) == 2

    @torch.no_grad()
    def test_a_function_that_cannot_be_called(self, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """For example Liger's on a CPU. The report gives the exception."""
        import transformers.models.llama.modeling_llama as file

        plain, ids = original(file.apply_rotary_pos_emb), tokens()

        def needs_a_gpu(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            if q.shape[0] == 2 and q.shape[-2] != ids.shape[1]:
                raise RuntimeError("0 active drivers")
            return plain(q, k, cos, sin, unsqueeze_dim)

        expected = output(llama, ids)
        monkeypatch.setattr(file, "apply_rotary_pos_emb", needs_a_gpu)
        said = str(accelerate(llama))
        assert "own functions rotate by the exact cos and sin of model.rotary_emb" in said
        assert "apply_rotary_pos_emb raised RuntimeError: 0 active drivers" in said
        assert relative(output(llama, ids), expected) <= NEAR

    @torch.no_grad()
    def test_a_key_that_the_model_does_not_read(self) -> None:
        """transformers only warns about it, and the model's frequencies show that it has no effect."""
        parameters = {"rope_type": "default", "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
        model, ids = tiny_models.build("llama", rope_parameters=parameters), tokens()
        expected = output(model, ids)
        note = (
            "rope_parameters.original_max_position_embeddings was not read. The model has the frequencies of the other"
        )
        assert note in str(accelerate(model))
        assert relative(output(model, ids), expected) <= NEAR
        assert "rotary_emb_dim was not read" in str(accelerate(tiny_models.build("bamba", rotary_emb_dim=8)))

    def test_a_model_type_that_is_not_known(self, llama: Any) -> None:
        """Its function shows the pairing."""
        llama.config.model_type = "no_such_model"
        assert accelerate(llama).ropes == {"model.rotary_emb": ropewalk.Rope(16, 10_000.0, "half")}

    def test_without_a_kernel(self, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ropewalk, "backends", lambda: {"cpu kernel": "not usable: not built"})
        assert accelerate(llama).warnings == (
            "the rotation runs in plain PyTorch, because the cpu kernel is not usable: not built",
        )


class TestLengths:
    DYNAMIC: ClassVar = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}

    def test_dynamic_ntk(self) -> None:
        """It agrees with transformers in one call of the length that was passed."""
        model = tiny_models.build("llama", rope_parameters=self.DYNAMIC, max_position_embeddings=32)
        ids = tokens()
        with torch.no_grad():
            near = output(model, ids)
        with pytest.raises(RopeError, match="length must be passed"):
            accelerate(model)
        accelerate(model, length=64)
        with torch.no_grad():
            assert relative(output(model, ids), near) <= NEAR

    def test_dynamic_ntk_with_their_angles(self) -> None:
        model = tiny_models.build("llama", rope_parameters=self.DYNAMIC, max_position_embeddings=32)
        ids = tokens()
        with torch.no_grad():
            expected = [output(copy.deepcopy(model), ids[:, :n]) for n in (16, 64)]
            accelerate(model, angles="theirs")
            assert torch.equal(output(model, ids[:, :16]), expected[0])
            assert torch.equal(output(model, ids), expected[1])

    def test_longrope_on_both_sides_of_the_switch(self) -> None:
        model, ids = tiny_models.build("phi3:longrope"), tokens()
        with torch.no_grad():
            short, long = output(model, ids), output(model, ids, 8_192)
            short = output(model, ids)  # and back: theirs has written into its buffer
            accelerate(model, length=4_096)
            assert relative(output(model, ids), short) <= NEAR
            restore(model)
            accelerate(model, length=4_097)
            assert relative(output(model, ids, 8_192), long) <= 1e-3  # their drift
            restore(model)
            accelerate(model, angles="theirs")
            assert torch.equal(output(model, ids), short)
            assert torch.equal(output(model, ids, 8_192), long)

    def test_a_length_that_nothing_needs(self, llama: Any) -> None:
        with pytest.raises(RopeError, match="length must be None, because no frequencies depend on it"):
            accelerate(llama, length=64)
        with pytest.raises(RopeError, match="length must be None with angles='theirs'"):
            accelerate(llama, angles="theirs", length=64)
