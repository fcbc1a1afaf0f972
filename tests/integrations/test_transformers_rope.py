"""Test models of transformers that are loaded with one rope and rotate by another.

The reference is transformers itself: the same weights in a model whose config states the other rope.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from model_checks import FAR, NEAR, output, refused, relative, rms, tokens, with_exact_tables
from ropewalk import Axes, Rope, RopeError, SelfExtend, schemes
from ropewalk.integrations.transformers import accelerate, restore

pytest.importorskip("transformers", "5.23")
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8_192}
LINEAR = {**PLAIN, "rope_type": "linear", "factor": 4.0}
BASES = {"rope_type": "default", "rope_theta": 1_000_000.0}, {"rope_type": "default", "rope_theta": 10_000.0}
WITH_YARN = Rope(16, 10_000.0, "half", scaling=schemes.YaRN(8.0, 8_192))
GLOBAL, LOCAL = "full_attention", "sliding_attention"
LONG = {"max_position_embeddings": 8_192}
# The model; what its config states, without and with the rope; the rope.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "llama": ("llama", {"rope_parameters": PLAIN, **LONG}, {"rope_parameters": YARN}, WITH_YARN),
    "a dict for one kind": ("llama", {"rope_parameters": PLAIN}, {"rope_parameters": YARN}, {"all": WITH_YARN}),
    "no scaling": ("qwen2", {"rope_parameters": YARN}, {"rope_parameters": PLAIN}, Rope(16, 10_000.0, "half")),
    "interleaved": (
        "cohere",
        {"rope_parameters": PLAIN},
        {"rope_parameters": LINEAR},
        Rope(16, 10_000.0, "interleaved", scaling=schemes.Linear(4.0)),
    ),
    "a part of a head": (
        "gpt_neox",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.25}},
        Rope(16, 10_000.0, "half", rotary_dim=4, scaling=schemes.Linear(4.0)),
    ),
    "global layers": (
        "gemma3_text",
        {"rope_parameters": {GLOBAL: BASES[0], LOCAL: BASES[1]}},
        {"rope_parameters": {GLOBAL: {**LINEAR, "rope_theta": 1e6}, LOCAL: BASES[1]}},
        {GLOBAL: Rope(16, 1e6, "half", scaling=schemes.Linear(4.0))},
    ),
    "both kinds": (
        "gemma3_text",
        {"rope_parameters": {GLOBAL: BASES[0], LOCAL: BASES[1]}},
        {"rope_parameters": {GLOBAL: YARN, LOCAL: BASES[0]}},
        {GLOBAL: WITH_YARN, LOCAL: Rope(16, 1e6, "half")},
    ),
}


def pair(case: str) -> tuple[Any, Any, Any]:
    """Return a model, the same weights in a model of transformers with another rope, and this rope."""
    name, before, after, rope = CASES[case]
    return tiny_models.build(name, **before), tiny_models.build(name, **(before | after)), rope


def generated(model: Any, cache: str) -> Tensor:
    """Generate greedily from two rows, the first with padding on the left."""
    ids = tokens(2, 16)
    seen = torch.ones_like(ids)
    seen[0, :5] = 0
    kept = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}[cache]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "disable_compile": True}
    return model.generate(ids, attention_mask=seen, **options, **kept)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_as_if_the_config_stated_it(case: str) -> None:
    model, other, rope = pair(case)
    ids, far = tokens(), 65_000  # far beyond max_position_embeddings
    before, expected = output(model, ids), output(other, ids)
    assert relative(before, expected) > 16 * NEAR
    said = accelerate(model, rope=rope)
    assert set(said.ropes.values()) >= (set(rope.values()) if isinstance(rope, dict) else {rope})
    assert relative(output(model, ids), expected) <= NEAR
    assert [torch.equal(generated(model, cache), generated(other, cache)) for cache in ("dynamic", "static")] == [
        True
    ] * 2
    exact = copy.deepcopy(other)
    with_exact_tables(exact)
    assert torch.equal(output(model, ids, far), output(exact, ids, far))
    restore(model)
    assert torch.equal(output(model, ids), before)


@torch.no_grad()
def test_a_hole_between_two_texts() -> None:
    """Positions are an argument, so two short texts may be 65,000 tokens apart."""
    model, exact, rope = pair("llama")
    with_exact_tables(exact)
    accelerate(model, rope=rope)
    places = torch.cat((torch.arange(16), torch.arange(65_000, 65_016)))[None]
    ids = tokens(2, 32)
    assert torch.equal(model(ids, position_ids=places)[0], exact(ids, position_ids=places)[0])


@torch.no_grad()
def test_in_bfloat16() -> None:
    model, exact, rope = pair("llama")
    with_exact_tables(exact)
    accelerate(model.bfloat16(), rope=rope)
    assert rms(output(model, tokens(), FAR).float(), output(exact, tokens(), FAR)) < 0.03  # bfloat16 itself


@torch.no_grad()
def test_a_rope_that_depends_on_the_length() -> None:
    """transformers takes the length from the call."""
    dynamic = {"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}
    model, other = tiny_models.build("llama", max_position_embeddings=32), tiny_models.build("llama", **dynamic)
    rope = Rope(16, 10_000.0, "half", scaling=schemes.DynamicNTK(4.0, 32))
    refused(model, "length must be passed, because the frequencies depend on it", rope=rope)
    accelerate(model, rope=rope, length=64)
    assert relative(output(model, tokens()), output(other, tokens())) <= NEAR
    accelerate(other, rope=WITH_YARN)  # needs no length, though the config's rope does


@pytest.mark.parametrize(
    ("name", "rope", "message"),
    [
        ("llama", "yarn", "rope must be a Rope, a SelfExtend, or a dict with one for each kind of layer, got 'yarn'"),
        ("llama", Rope(32, 1e4, "half"), "channels of model.rotary_emb as .* does, got head_dim=32, rotary_dim=32"),
        ("llama", Rope(16, 1e4, "interleaved"), "got pairing='interleaved'"),
        ("llama", Rope(16, 1e4, "half", rotary_dim=8), "got rotary_dim=8"),
        ("llama", Rope(16, 1e4, "half", axes=Axes.sections((4, 4))), "got axes="),
        ("llama", {GLOBAL: WITH_YARN}, r"kinds of layer that rotate \('all'\), got 'full_attention'"),
        ("gemma3_text", WITH_YARN, r"\('full_attention', 'sliding_attention'\), got one Rope for all kinds"),
        ("gemma3_text", {GLOBAL: None}, "rope must be a Rope, .*, got None"),
    ],
)
def test_refused(name: str, rope: Any, message: str) -> None:
    refused(tiny_models.build(name), message, rope=rope)


def test_not_with_their_angles() -> None:
    refused(tiny_models.build("llama"), "rope must be None with angles='theirs'", rope=WITH_YARN, angles="theirs")


class Unrotated(torch.nn.Module):
    """Replaces a rotary module of transformers: q and k do not turn."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        ones = torch.ones(*position_ids.shape, 16, dtype=x.dtype)
        return ones, torch.zeros_like(ones)


def by_definition(name: str, base: float, group: int, window: int, *, local_base: float = 0.0) -> Any:
    """Return a model in float64 whose attention is the formula of Self-Extend, for a call with all tokens."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **given: Any) -> Any:
        places, local = given["position_ids"], getattr(module, "is_sliding", False)
        distance = places[:, :, None] - places[:, None, :]
        grouped = places // group
        far = grouped[:, :, None] - grouped[:, None, :] + window - window // group
        distance = distance if local else torch.where(distance < window, distance, far)
        angles = distance[:, None, ..., None] * (local_base if local else base) ** (-torch.arange(8) / 8).double()
        q, k = (torch.complex(x[..., :8], x[..., 8:]) for x in (q, k))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        turned = q[:, :, :, None] * k.conj()[:, :, None] * torch.polar(torch.ones_like(angles), angles)
        scores = (turned.real.sum(-1) * given["scaling"]).masked_fill(~mask, -1e300)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("by_definition", attention)
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    AttentionMaskInterface.register("by_definition", lambda *a, **o: sdpa_mask(*a, **(o | whole)))
    model = tiny_models.build(name).double()
    model.config._attn_implementation = "by_definition"
    model.model.rotary_emb = Unrotated()
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_self_extend(name: str) -> None:
    model, ids = tiny_models.build(name), tokens(2, 48)
    bases = {"llama": (10_000.0, 0.0), "gemma3_text": (1_000_000.0, 10_000.0)}[name]
    exact = by_definition(name, bases[0], 4, 6, local_base=bases[1])
    extended = SelfExtend(Rope(16, bases[0], "half"), group=4, window=6)
    before, expected, attention = output(model, ids), output(exact, ids, 70_000), model.config._attn_implementation
    said = accelerate(model, rope={GLOBAL: extended} if name == "gemma3_text" else extended)
    assert f"attends in two passes: {extended}" in str(said)
    assert relative(output(model, ids, 70_000).double(), expected) <= NEAR
    assert relative(before.double(), expected) > 16 * NEAR
    for kind in ("dynamic", "static"):  # the first row is padded; the reference reads all tokens again in each step
        assert torch.equal(generated(model, kind), generated(exact, "none"))
    half = rms(output(copy.deepcopy(model).bfloat16(), ids, 70_000).double(), expected)
    assert half < 0.03  # bfloat16 itself
    restore(model)
    assert torch.equal(output(model, ids), before)
    assert model.config._attn_implementation == attention


def test_self_extend_refused() -> None:
    extended = SelfExtend(Rope(16, 10_000.0, "half"), 4, 6)
    refused(tiny_models.build("llama"), "got head_dim=32", rope=SelfExtend(Rope(32, 10_000.0, "half"), 4, 6))
    refused(tiny_models.build("gemma3n_text"), "for Self-Extend, the model must", rope={GLOBAL: extended})
    for name, options in (("gemma2", {"attn_logit_softcapping": 30.0}), ("gpt_oss", {"rope_parameters": PLAIN})):
        model = tiny_models.build(name, **options)
        accelerate(model, rope=extended)
        with pytest.raises(RopeError, match=r"without softcap, s_aux and position_bias, got (softcap|s_aux)"):
            output(model, tokens())


def test_self_extend_with_other_keys() -> None:
    """A cache in 8 bits would change the positions. Phi passes only the rotated channels to its function."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
            return super().update(k * 1.01, v, *rest, **more)

    model = tiny_models.build("llama")
    accelerate(model, rope=SelfExtend(Rope(16, 10_000.0, "half"), 4, 6))
    with pytest.raises(RopeError, match="a cache must return keys as they were stored, got other keys"):
        model(tokens(), cache=Rounding(config=model.config))
    phi = tiny_models.build("phi")
    accelerate(phi, rope=SelfExtend(Rope(16, 10_000.0, "half", rotary_dim=8), 4, 6))
    with pytest.raises(RopeError, match=r"q must be \[batch, heads, seq, 16\] where the model rotates it, got bhsd of"):
        output(phi, tokens())
