"""Compare the rows of the table of models with recorded runs of the models' own code. See golden/README.md."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoConfig, NomicBertConfig
from transformers.models.nomic_bert.modeling_nomic_bert import NomicBertRotaryEmbedding

import oracle
from each import each
from ropewalk import Axes, ModelRopes, Rope, RopeError, from_config
from ropewalk.configs.families.latent import Latent
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.rows import source
from ropewalk.configs.tables.wrappers import WRAPPERS
from ropewalk.schemes import Linear

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = json.loads((GOLDEN / "text_models.json").read_text())["rows"]
DEFAULTS = json.loads((GOLDEN / "class_defaults.json").read_text())["rows"]

# The largest error of frequencies in transformers, which raises the base to a power in float32.
FLOAT32_POWER = 4.5e-7

# Of each row with a switch: the key, its default in the class, a value that rotates and one that does not, and whether
# null rotates.
SWITCHES = [
    ("falcon", "alibi", False, False, True, True),
    ("RefinedWeb", "alibi", False, False, True, True),
    ("RefinedWebModel", "alibi", False, False, True, True),
    ("esm", "position_embedding_type", "absolute", "rotary", "relative_key", False),
    ("granitemoehybrid", "position_embedding_type", None, "rope", "nope", False),
    ("zamba2", "use_mem_rope", False, True, False, False),
    ("hunyuan", "use_rotary_pos_emb", True, True, False, False),
    ("llada", "rope", False, True, False, False),
    ("new", "position_embedding_type", "rope", "rope", "absolute", False),
    ("xlm-roberta-flash", "position_embedding_type", "rotary", "rotary", "absolute", False),
]


def ropes_of(config: dict[str, Any]) -> ModelRopes:
    return from_config(config)


CASES = [
    (f"{row['name']}: {case['id']}", (row, case))
    for row in MODELS
    for case in row["cases"]
    if "inv_freq" in case or case.get("layout") == "none"
]


def rope_of(row: dict[str, Any], case: dict[str, Any]) -> Rope | None:
    ropes = ropes_of(row["config"])
    rope = ropes.extra_ropes["indexer"] if case["id"] == "dsa_indexer" else ropes.layers[case.get("layer_idx", 0)]
    return None if rope is None else rope.at_length(case["seq_len"])


class TestReleasedModels:
    def test_frequencies(self) -> None:
        def check(row_and_case: tuple[dict[str, Any], dict[str, Any]]) -> None:
            row, case = row_and_case
            rope = rope_of(row, case)
            if case.get("layout") == "none":
                assert rope is None
                return
            assert rope is not None
            np.testing.assert_allclose(rope.inv_freq, case["inv_freq"], rtol=FLOAT32_POWER)
            assert rope.attention_factor == pytest.approx(case["attention_scaling"], rel=1e-6)

        each(CASES, check)

    def test_pairing_and_slice(self) -> None:
        def check(row_and_case: tuple[dict[str, Any], dict[str, Any]]) -> None:
            row, case = row_and_case
            rope, layout = rope_of(row, case), case.get("layout")
            if rope is None or layout is None:
                return  # this case is at another length, and the pairs are in the first case
            pairing, _, permuted = layout.partition("+")
            if pairing != "offset-256":  # in Gemma 4 the whole head has pairs, of which a quarter rotates
                assert rope.pairing == pairing
                assert rope.rotary_dim == case["rotary_dim"]
                assert [rope.rotary_offset, rope.rotary_offset + rope.rotary_dim - 1] == case["moved_range"]
            if case["id"] != "dsa_indexer":
                assert (ropes_of(row["config"]).output_order == "half") == bool(permuted)

        each(CASES, check)

    def test_rotated(self) -> None:
        def check(row_and_case: tuple[dict[str, Any], dict[str, Any]]) -> None:
            row, case = row_and_case
            rope = rope_of(row, case)
            if "q_rot" not in case or rope is None:
                return
            ropes, positions = ropes_of(row["config"]), case["positions"]
            if rope.axes is not None and not isinstance(positions[0], list):
                positions = [positions] * rope.axes.count  # a text token has the same position on all axes
            rows = torch.tensor(positions)
            positions = rows.tolist() if rows.ndim == 1 else rows.amax(0).tolist()
            bound = np.array([p * 2.0**-23 + 1e-6 for p in positions])[:, None] * np.sqrt(2) * rope.attention_factor
            stored = case.get("tokens", slice(None))
            rows, positions, bound = rows[..., stored], np.array(positions)[stored].tolist(), bound[stored]
            for name, make in (("q", oracle.golden_q), ("k", oracle.golden_k)):
                x = torch.from_numpy(make(case[f"{name}_shape"])[:, :1, stored])
                expected = np.array(case[f"{name}_rot"], dtype=np.float32).reshape(x.shape)
                if x.shape[-1] != rope.head_dim:  # only the rotated channels were recorded (MLA's shared key)
                    assert x.shape[-1] == rope.rotary_dim
                    alone = Rope(rope.rotary_dim, rope.base, rope.pairing, scaling=rope.scaling)
                else:
                    alone = rope
                rotated = alone.at(rows)(x, layout="bhsd").numpy().copy()
                if ropes.output_order == "half" and case["id"] != "dsa_indexer":
                    start, end = alone.rotary_offset, alone.rotary_offset + alone.rotary_dim
                    rotated[..., start:end] = np.concatenate(
                        (rotated[..., start:end:2], rotated[..., start + 1 : end : 2]), axis=-1
                    )
                scale = ropes.query_scale
                if scale is not None and not scale.only_unrotated and (name == "q" or scale.scales_keys):
                    factors = [scale.at(p) if name == "q" else scale.constant for p in positions]
                    rotated = rotated * np.array(factors)[:, None]
                assert (
                    np.abs(rotated - expected) <= bound * max(1.0, 0 if scale is None else scale.at(max(positions)))
                ).all()

        each(CASES, check)

    def test_softmax_factor(self) -> None:
        def check(row_and_case: tuple[dict[str, Any], dict[str, Any]]) -> None:
            row, case = row_and_case
            rope, ropes = rope_of(row, case), ropes_of(row["config"])
            row_of_table = ARCHITECTURES[ropes.model_type]
            if (
                rope is None
                or not isinstance(row_of_table, Latent)
                or case["id"] == "dsa_indexer"
                or "softmax_scale" not in case
            ):
                return
            assert case["softmax_scale"] == pytest.approx(ropes.softmax_factor * rope.head_dim**-0.5, rel=1e-5)

        each(CASES, check)


def check_class_defaults(row: dict[str, Any]) -> None:
    ropes = ropes_of(row["config"])
    for index, expected in row["layers"].items():
        rope = ropes.layers[int(index)]
        if expected is None:
            assert rope is None
            continue
        assert rope is not None
        if expected.get("inv_freq"):
            np.testing.assert_allclose(rope.inv_freq, expected["inv_freq"], rtol=FLOAT32_POWER)
        assert rope.attention_factor == pytest.approx(expected["attention_factor"], rel=1e-6)
        assert rope.pairing == expected["pairing"]
        assert rope.rotary_offset == (expected.get("rotary_offset") or 0)
        assert (rope.axes is None) == ("axis" not in expected)
        if rope.axes is not None and row["model_type"] != "hunyuan_vl_text":
            assert list(rope.axes.axis) == expected["axis"]
            assert len(ropes.axis_names) == rope.axes.count == max(expected["axis"]) + 1
    kinds = row["layer_kinds"]
    if kinds:
        rotates = [kind is not None and row["layers"][str(kind)] is not None for kind in kinds]
        assert [rope is not None for rope in ropes.layers] == rotates


def test_class_defaults() -> None:
    """The ropes of each class default have the frequencies and pairs that the model's own code computed."""
    each(((f"{row['model_type']} {row.get('variant', '')}", row) for row in DEFAULTS), check_class_defaults)


def test_most_rows_were_run() -> None:
    run = {row["model_type"] for row in DEFAULTS} | {ropes_of(row["config"]).model_type for row in MODELS}
    supported = {name for name, row in ARCHITECTURES.items() if not row.refusal and row.in_transformers}
    assert len(supported & run) >= 0.9 * len(supported), sorted(supported - run)


def test_a_model_without_a_rope_gives_the_reason() -> None:
    def check(name: str) -> None:
        with pytest.raises(RopeError, match=r"model_type must name a model that a Rope describes, got") as raised:
            from_config({"model_type": name, "num_hidden_layers": 1})
        assert ARCHITECTURES[name].refusal in str(raised.value)

    each(((name, name) for name, row in ARCHITECTURES.items() if row.refusal), check)


def test_every_row_has_its_source() -> None:
    """All rows of transformers name the version from which `class_defaults.json` was recorded."""
    version = json.loads((GOLDEN / "class_defaults.json").read_text())["peer"]["version"].rpartition(".")[0]
    assert source("llama") == f"transformers {version} models/llama"
    for name, row in ARCHITECTURES.items():
        assert row.source, name
        if not row.refusal:
            assert row.in_transformers == row.source.startswith(source("")), name


def test_text_model_inside_another() -> None:
    text = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 5e5}
    ropes = from_config({"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip"}})
    assert ropes.rope == Rope(8, 5e5, "half")
    assert ropes.source == "config: text_config"
    with pytest.raises(RopeError, match="config: text_config: rope_theta must be a finite number"):
        from_config({"model_type": "llava", "text_config": {**text, "rope_theta": 0}})
    for broken in (None, [text], "text"):
        with pytest.raises(RopeError, match="config: text_config must be an object"):
            from_config({"model_type": "llava", "text_config": broken})
    unheard = from_config({"model_type": "unheard_of", "text_config": text, "vision_config": {"model_type": "llama"}})
    assert unheard.rope == Rope(8, 5e5, "half")
    assert unheard.warnings[0] == ("model_type 'unheard_of' is not known, but its text model under text_config is.")
    with pytest.raises(RopeError, match=r"pass config\['my_part'\]"):
        from_config({"model_type": "unheard_of", "my_part": text})
    assert not set(WRAPPERS) & set(ARCHITECTURES)


def test_names_that_the_classes_of_transformers_replace() -> None:
    """The files of Granite 4 and EXAONE 4.5 have the names on the left (`configuration_utils.py` of transformers)."""
    from transformers import AutoConfig

    names = {"attention": "full_attention", "mamba": "linear_attention"}
    granite = {"model_type": "granitemoehybrid", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    granite |= {"position_embedding_type": "rope", "rope_theta": 1e7, "layer_types": list(names)}
    granite |= {"mamba_n_heads": 4, "mamba_d_head": 32}
    assert AutoConfig.for_model(**granite).layer_types == list(names.values())
    ropes = from_config({**granite, "max_position_embeddings": 2048}).layers
    assert (
        ropes == from_config({**granite, "layer_types": list(names.values())}).layers == (Rope(16, 1e7, "half"), None)
    )
    indexed = {"model_type": "glm_moe_dsa", "layer_types": ["deepseek_sparse_attention"]}
    assert AutoConfig.for_model(**indexed, num_hidden_layers=1).layer_types == ["indexed_attention"]
    exaone = {"model_type": "exaone4_5_text", "num_hidden_layers": 4, "head_dim": 8, "rope_theta": 1e6}
    whole = {"model_type": "exaone4_5", "text_config": {**exaone, "sliding_window": 16, "sliding_window_pattern": 4}}
    assert AutoConfig.for_model(**whole).text_config.model_type == "exaone4"
    assert from_config(whole, text_only=True).layers == (*[Rope(8, 1e6, "half")] * 3, None)


def test_several_parts() -> None:
    """The sizes are those of transformers' defaults, which nested configs omit. None is the model if all could be."""
    small = {"model_type": "blt_local_decoder", "num_hidden_layers": 9}
    whole = {
        "model_type": "blt",
        "decoder_config": small,
        "global_config": {"model_type": "blt_global_transformer"},
        "encoder_config": {"model_type": "blt_local_encoder"},
        "patcher_config": {"model_type": "blt_patcher", "rope_theta": 2e4},
    }
    blt = from_config(whole)
    assert blt.layers == (Rope(128, 5e5, "interleaved"),) * 25
    local = Rope(64, 5e5, "interleaved")
    parts = {"patcher_config": Rope(64, 2e4, "interleaved"), "encoder_config": local, "decoder_config": local}
    assert blt.extra_ropes == parts
    assert "another rope: encoder_config\n" in blt.explain()
    assert blt.explain().count("trained length") == 1
    assert from_config(whole, text_only=True).extra_ropes == {}
    dia = from_config(
        {
            "model_type": "dia",
            "encoder_config": {"model_type": "dia_encoder"},
            "decoder_config": {"model_type": "dia_decoder"},
        }
    )
    assert (len(dia.layers), dia.rope) == (18, Rope(128, 1e4, "half"))
    assert dia.extra_ropes == {"encoder_config": Rope(128, 1e4, "half")}
    with pytest.raises(
        RopeError,
        match=r"2 parts of this model could be meant, got 'blt2'. Read each part by itself: "
        r"from_config\(config\['decoder_config'\]\) or from_config\(config\['global_config'\]\)\.",
    ):
        from_config({"model_type": "blt2", "decoder_config": small, "global_config": whole["global_config"]})


def test_parts_have_the_recorded_frequencies() -> None:
    """The parts are the class defaults whose own modules were recorded. The text model is the first one."""
    recorded = {row["model_type"]: row for row in DEFAULTS}
    audio, video = ("audio_config", "pe_audio_encoder"), ("video_config", "pe_video_encoder")
    both = ("audio_video_config", "pe_audio_video_encoder")
    encoder = ("vision_config.encoder_config", "deepseek_ocr2_encoder")
    for whole, *parts in (
        ("pe_audio", ("text_config", "modernbert"), audio),
        ("pe_video", ("text_config", "modernbert"), video),
        ("pe_audio_video", ("text_config", "modernbert"), both, *((f"{both[0]}.{k}", n) for k, n in (audio, video))),
        ("deepseek_ocr2", ("text_config", "deepseek_ocr2_text"), encoder),
        ("deepseek_ocr2_vision", ("encoder_config", "deepseek_ocr2_encoder")),
        ("colmodernvbert", ("vlm_config.text_config", "modernbert")),
    ):
        config: dict[str, Any] = {"model_type": whole, "vlm_config": {"model_type": "modernvbert"}}
        for path, name in parts:
            *outer, last = path.split(".")
            inside = config
            for key in outer:
                inside = inside.setdefault(key, {})
            inside[last] = dict(recorded[name]["config"])
        ropes = from_config(config)
        (_, text), *others = parts
        assert ropes.model_type == text
        for rope, name in ((ropes.layers[0], text), *((ropes.extra_ropes[path], name) for path, name in others)):
            expected = recorded[name]["layers"]["0"]
            assert rope is not None
            np.testing.assert_allclose(rope.inv_freq, expected["inv_freq"], rtol=FLOAT32_POWER)
            assert rope.pairing == expected["pairing"]


def test_parts_of_encoders_decoders_and_policies() -> None:
    """The sizes and bases are those of transformers' classes. An encoder may have a rope for each kind of layer."""
    sizes = {"hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256, "max_position_embeddings": 8192}
    module = {**sizes, "model_type": "t5_gemma_module", "num_hidden_layers": 3, "rope_theta": 1e4}
    gemma = from_config({"model_type": "t5gemma", "encoder": {**module, "rope_theta": 2e4}, "decoder": module})
    assert (gemma.layers, gemma.extra_ropes) == ((Rope(256, 1e4, "half"),) * 3, {"encoder": Rope(256, 2e4, "half")})

    nested = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    text = {**sizes, "model_type": "t5gemma2_text", "num_hidden_layers": 6, "rope_parameters": nested}
    second = from_config(
        {
            "model_type": "t5gemma2",
            "encoder": {"model_type": "t5gemma2_encoder", "text_config": text},
            "decoder": {**text, "model_type": "t5gemma2_decoder"},
        }
    )
    sliding, full = Rope(256, 1e4, "half"), Rope(256, 1e6, "half")
    assert second.layers == (*[sliding] * 5, full)
    assert second.extra_ropes == {"encoder.sliding_attention": sliding, "encoder.full_attention": full}
    assert "another rope: encoder.full_attention\n" in second.explain()

    action = {"model_type": "gemma", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 18}
    action |= {"head_dim": 256, "rope_theta": 1e4}
    language = {"model_type": "paligemma", "text_config": {"model_type": "gemma", "rope_theta": 2e4}}
    policy = from_config({"model_type": "pi0", "vlm_config": language, "dit_config": action})
    assert (policy.rope, policy.extra_ropes) == (Rope(256, 2e4, "half"), {"dit_config": Rope(256, 1e4, "half")})

    speech = {"hidden_size": 1280, "num_attention_heads": 10, "num_hidden_layers": 2, "rope_theta": 1e4}
    diarization = {**speech, "model_type": "nemotron3_diarization_audio", "hidden_size": 640}
    audio = {
        "model_type": "nemotron3_5_transcribe_audio",
        "asr_config": {**speech, "model_type": "nemotron3_5_transcribe_asr_audio"},
        "diarization_config": {"model_type": "nemotron3_diarization", "audio_config": diarization},
    }
    heard, other = Rope(128, 1e4, "half", rotary_dim=64), Rope(64, 1e4, "half")
    assert (from_config(audio).rope, from_config(audio).extra_ropes) == (heard, {"diarization_config": other})
    model = {"model_type": "nemo_speechlm", "audio_config": audio}
    model["text_config"] = {"model_type": "nemotron_h", "num_hidden_layers": 2}
    ropes = from_config(model)
    assert ropes.layers == (None, None)
    assert ropes.extra_ropes == {"audio_config.asr_config": heard, "audio_config.diarization_config": other}

    lasr = {"model_type": "lasr_encoder", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 17}
    assert from_config({"model_type": "lasr_ctc", "encoder_config": {**lasr, "rope_theta": 1e4}}).rope == other


def test_audio_encoder_with_the_names_of_whisper() -> None:
    """transformers reads whisper_config, of published files, and half of each head rotates."""
    config = {"model_type": "dots3_note_audio_encoder", "hidden_size": 1024, "num_attention_heads": 8}
    config |= {"num_hidden_layers": 3}
    assert from_config(config).layers == (Rope(128, 1e4, "half", rotary_dim=64),) * 3
    config["whisper_config"] = {"d_model": 1280, "encoder_attention_heads": 20, "encoder_layers": 32}
    assert from_config(config).layers == (Rope(64, 1e4, "half", rotary_dim=32),) * 32


def test_defaults_of_a_nested_text_model() -> None:
    """These configs have only the keys that the files of Gemma 3 4B and LLaVA 1.5 have."""
    scaling = {"factor": 8.0, "rope_type": "linear"}
    text = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "rope_scaling": scaling}
    ropes = from_config({"model_type": "gemma3", "text_config": text})
    assert len(ropes.layers) == 34
    assert ropes.layers[0] == Rope(256, 10_000.0, "half")
    assert ropes.layers[5] == Rope(256, 1_000_000.0, "half", scaling=Linear(8.0))
    assert any("head_dim, rope_theta, rope_local_base_freq: not stated" in warning for warning in ropes.warnings)
    llava = from_config(
        {"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 4096}}
    )
    assert llava.rope == Rope(128, 10_000.0, "half")
    assert len(llava.layers) == 32
    with pytest.raises(RopeError, match="num_hidden_layers must be"):  # a missing key at the top level is an error
        from_config({"model_type": "llama", "max_position_embeddings": 4096})
    nested = {"model_type": "gemma3_text", "rope_parameters": {
        "full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}}  # fmt: skip
    stated = from_config({"model_type": "gemma3", "text_config": nested})
    assert [rope.base for rope in stated.layers[4:6] if rope] == [2e4, 5e5]


CHATGLM = {
    "model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40, "kv_channels": 128,
    "seq_length": 131072, "original_rope": True, "rope_ratio": 500,
}  # fmt: skip


class TestChatGLM:
    """The facts about ChatGLM are those of the code of GLM-4-9B, and that of vLLM for `original_rope`."""

    def test_base_and_pairs(self) -> None:
        ropes = from_config(CHATGLM)
        assert ropes.rope == Rope(128, 5_000_000.0, "interleaved", rotary_dim=64)
        np.testing.assert_allclose(ropes.rope.inv_freq, 5e6 ** -(np.arange(0, 64, 2) / 64), rtol=1e-15)
        assert len(ropes.layers) == 40
        assert ropes.max_position_embeddings == 131072
        assert ropes.origins["base"].startswith("10000 · rope_ratio")
        assert any("ChatGLM2-32K divides positions" in warning for warning in ropes.warnings)
        assert from_config({**CHATGLM, "original_rope": False}).rope.pairing == "half"

    def test_without_a_ratio(self) -> None:
        ropes = from_config({key: value for key, value in CHATGLM.items() if key != "rope_ratio"})
        assert ropes.rope.base == 10_000.0
        assert not ropes.warnings
        assert from_config({**CHATGLM, "rope_ratio": 1, "_name_or_path": "chatglm2-6b"}).rope.base == 10_000.0

    def test_files_of_other_versions(self) -> None:
        with pytest.raises(RopeError, match="ChatGLM2-32K divides positions by it: build the Rope by hand"):
            from_config({**CHATGLM, "_name_or_path": "THUDM/chatglm2-6b-32k"})
        with pytest.raises(RopeError, match="position_encoding_2d must be False, got True"):
            from_config({**CHATGLM, "position_encoding_2d": True})
        with pytest.raises(RopeError, match="rope_ratio must be"):
            from_config({**CHATGLM, "rope_ratio": "500"})
        with pytest.raises(RopeError, match="only its own code reads"):
            from_config(CHATGLM).to_hf_config(version=5)


class TestSingleModels:
    def test_dbrx(self) -> None:
        dbrx = {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
                "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}}  # fmt: skip
        ropes = from_config(dbrx)
        assert ropes.rope == Rope(128, 500_000.0, "half")
        assert ropes.origins["base"] == "attn_config.rope_theta"
        assert ropes.max_position_embeddings == 32768
        for version in (4, 5):
            assert from_config(ropes.to_hf_config(version=version)).layers == ropes.layers
        # transformers 5 writes two bases for the class default, and reads only one of them.
        lost = {"rope_theta": 10000.0, "rope_type": "default"}
        with pytest.warns(UserWarning, match=r"attn_config\.rope_theta \(500000\) has no effect in transformers"):
            assert from_config({**dbrx, "rope_parameters": lost}).rope.base == 10000.0
        with pytest.raises(RopeError, match=r"attn_config\.rope_theta must be given, since it is the base"):
            from_config({**dbrx, "attn_config": {"clip_qkv": 8}})

    def test_longcat_flash(self) -> None:
        ropes = from_config({
            "model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6144, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 1e7,
        })  # fmt: skip
        assert len(ropes.layers) == 56
        assert ropes.rope == Rope(192, 1e7, "interleaved", rotary_dim=64, rotary_offset=128)
        assert ropes.query_scale is not None
        assert ropes.query_scale.at(1) == 2.0  # √(6144 / 1536), computed by the model's own code
        assert ropes.output_order == "half"

    def test_a_softmax_factor_that_overflows(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale_all_dim": 1e300}
        with pytest.raises(RopeError, match="mscale_all_dim must give a finite softmax factor"):
            from_config({
                "model_type": "deepseek_v3", "num_hidden_layers": 1, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                "rope_theta": 1e4, "rope_scaling": scaling,
            })  # fmt: skip

    def test_deepseek_v4(self) -> None:
        config = next(
            row["config"] for row in DEFAULTS if row.get("variant") == "flat" and row["model_type"] == "deepseek_v4"
        )
        ropes = from_config(config)
        compressed = ropes.layers[2]
        assert compressed is not None
        indexer = Rope(128, 160_000.0, "interleaved", rotary_dim=64, rotary_offset=64, scaling=compressed.scaling)
        assert ropes.extra_ropes == {"indexer": indexer}
        assert ropes.rotates_values
        assert "the attention's output is rotated back" in ropes.explain()
        assert ropes.origins["rotary_dim"] == "qk_rope_head_dim, the last of the head"
        with pytest.raises(RopeError, match=r"compress_ratios must contain only 0, 4, 128, got 3"):
            from_config({**config, "compress_ratios": [0, 0, 4, 128, 3]})
        with pytest.raises(RopeError, match="compress_ratios must be a list with an entry for each of the 5 layers"):
            from_config({**config, "compress_ratios": [0, 0, 4, 128]})
        longer = [*config["compress_ratios"], 0, 0, 0]  # of a checkpoint with its draft, as transformers cuts it
        assert from_config({**config, "compress_ratios": longer}).layers == ropes.layers

    def test_indexer_of_hy_v4_vl(self) -> None:
        """`HYV4VLIndexer` rotates the last channels of its head by positions on the same axes."""
        config = next(row["config"] for row in DEFAULTS if row["model_type"] == "hy_v4_vl_text")
        axes = Axes.interleaved((12, 10, 10))
        indexer = Rope(128, 10_000.0, "interleaved", rotary_dim=64, rotary_offset=64, axes=axes)
        assert from_config(config).extra_ropes == {"indexer": indexer}

    def test_dory_counts_blocks_of_attention_and_mlps(self) -> None:
        """A released file lists the MLPs as well, and counts them as layers. transformers drops them."""
        dory = {"model_type": "dory", "head_dim": 16, "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e7}}}  # fmt: skip
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        blocks = [block for kind in kinds for block in (kind, "mlp")]
        ropes = from_config({**dory, "num_hidden_layers": 6, "layer_types": blocks})
        assert [rope.base for rope in ropes.layers if rope] == [1e4, 1e7, 1e4]
        assert from_config({**dory, "num_hidden_layers": 3, "layer_types": kinds}).layers == ropes.layers
        assert from_config(ropes.to_hf_config(version=5)).layers == ropes.layers
        with pytest.raises(RopeError, match="layer_types must be a list with an entry for each of the 5 layers"):
            from_config({**dory, "num_hidden_layers": 5, "layer_types": blocks})

    @pytest.mark.parametrize("model_type", ["mimo_v2_flash", "mimo_v2"])
    def test_mimo_from_its_own_file(self, model_type: str) -> None:
        """MiMo-V2.5 and V2.6 are mimo_v2, whose classes in vLLM and SGLang are those of V2-Flash."""
        ropes = from_config({
            "model_type": model_type, "num_hidden_layers": 3, "head_dim": 192, "partial_rotary_factor": 0.334,
            "rope_theta": 5e6, "swa_rope_theta": 1e4, "hybrid_layer_pattern": [0, 1, 1], "swa_head_dim": 192,
            "vision_config": {"hidden_size": 16}, "audio_config": {"hidden_size": 8},
        })  # fmt: skip
        assert [(rope.base, rope.rotary_dim) for rope in ropes.layers if rope] == [(5e6, 64), (1e4, 64), (1e4, 64)]

    def test_the_draft_of_kimi_k3(self) -> None:
        """vllm#53634, as Inferact published it: the attention of DeepSeek-V2, in which vLLM rotates interleaved pairs."""
        config = {
            "model_type": "k3_dspark", "num_hidden_layers": 5, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "mla_use_nope": False, "max_position_embeddings": 1_048_576, "rope_theta": 5e4, "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32_768, "rope_theta": 5e4,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}  # fmt: skip
        ropes = from_config(config)
        assert (ropes.rope.pairing, ropes.rope.attention_factor) == ("interleaved", 1.0)
        expected = np.array(oracle.yarn(5e4, 64, 32.0, 32_768), float)
        np.testing.assert_allclose(ropes.rope.inv_freq, expected, rtol=1e-12)
        assert ropes.softmax_factor == pytest.approx((0.1 * np.log(32) + 1) ** 2)
        with pytest.raises(RopeError, match="mla_use_nope must be False, got True"):
            from_config({**config, "mla_use_nope": True})

    def test_step_from_its_own_file(self) -> None:
        """The lists have an entry for each layer, and one for the layer that predicts a further token."""
        step = {
            "model_type": "step3p5", "num_hidden_layers": 4, "head_dim": 128, "num_nextn_predict_layers": 1,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
            "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072,
                             "low_freq_factor": 1.0, "high_freq_factor": 32.0},
            "yarn_only_types": ["full_attention"],
        }  # fmt: skip
        ropes = from_config(step)
        golden = next(row for row in DEFAULTS if row["model_type"] == "step3p5" and row.get("variant") == "mixed")
        for index in (0, 1):
            rope, expected = ropes.layers[index], golden["layers"][str(index)]
            assert rope is not None
            np.testing.assert_allclose(rope.inv_freq, expected["inv_freq"], rtol=FLOAT32_POWER)
            assert rope.rotary_dim == expected["rotary_dim"]
        with pytest.raises(RopeError, match=r"yarn_only_types must be \['full_attention'\]"):
            from_config({**step, "yarn_only_types": ["sliding_attention"]})
        with pytest.raises(RopeError, match=r"rope_theta\[2\] must agree with rope_theta\[1\]"):
            from_config({**step, "rope_theta": [5e6, 1e4, 2e4, 1e4, 5e6]})

    def test_olmo_hybrid_without_a_base(self) -> None:
        olmo = {"model_type": "olmo_hybrid", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
        assert not any(from_config({**olmo, "rope_theta": None}).layers)
        both = from_config(
            {**olmo, "rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}
        )  # OlmoHybridConfig: 5e5
        assert both.layers == (None, None, None, Rope(16, 5e5, "half"))
        with pytest.raises(RopeError, match="rope_theta must be given, since it is the base"):
            from_config(olmo)

    @pytest.mark.parametrize(
        ("model_type", "turns"),
        [("exaone4", True), ("exaone_moe", True), ("kolibri1", True), ("cohere2", False), ("flint", False)],
    )
    def test_without_a_window(self, model_type: str, turns: bool) -> None:
        """EXAONE 4 rotates all layers if `sliding_window` is null. Cohere 2 then rotates none."""
        config = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                  "head_dim": 16, "rope_theta": 1e6, "layer_types": ["full_attention"] * 2, "sliding_window": None}  # fmt: skip
        ropes = from_config(config)
        assert [rope is not None for rope in ropes.layers] == [turns] * 2
        assert [rope is not None for rope in from_config({**config, "sliding_window": 8}).layers] == [False] * 2
        assert from_config(ropes.to_hf_config(version=5)).layers == ropes.layers

    def test_layers_without_rope_in_cohere_compass(self) -> None:
        ropes = from_config({
            "model_type": "cohere_compass_text", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": {"rope_theta": 5e4, "mrope_section": [4, 2, 2]}, "full_attention": None},
        })  # fmt: skip
        assert ropes.layers == (Rope(16, 5e4, "half", axes=Axes.interleaved((4, 2, 2))), None)

    def test_head_sizes_of_sliding_layers_in_dots(self) -> None:
        config = next(
            row["config"] for row in DEFAULTS if row.get("variant") == "flat" and row["model_type"] == "dots3_note_text"
        )
        assert from_config(config).extra_ropes == {"indexer": Rope(128, 8e7, "interleaved", rotary_dim=64)}
        with pytest.raises(RopeError, match="swa_qk_nope_head_dim must be"):
            from_config({key: value for key, value in config.items() if key != "swa_qk_nope_head_dim"})
        with pytest.raises(RopeError, match="swa_head_dim must be more than swa_qk_nope_head_dim=192, got 192"):
            from_config({**config, "swa_head_dim": 192})


class TestLayers:
    base: ClassVar = {"model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 6, "rope_theta": 1e6}

    def test_implied_pattern(self) -> None:
        ropes = from_config(
            {**self.base, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8}}
        )
        assert [rope.base for rope in ropes.layers if rope] == [1e4] * 5 + [1e6]
        assert [rope.scaling is None for rope in ropes.layers if rope] == [True] * 5 + [False]
        assert ropes.origins["layer_types"] == "implied: the last of every 6 is full_attention"

    def test_stated_pattern(self) -> None:
        ropes = from_config({**self.base, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2})
        assert [rope.base for rope in ropes.layers if rope] == [1e4, 1e6] * 3

    def test_stated_layers(self) -> None:
        kinds = ["full_attention"] * 5 + ["sliding_attention"]
        nested = {
            "full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        }
        values = {**self.base, "rope_theta": None, "layer_types": kinds, "rope_parameters": nested}
        assert [rope.base for rope in from_config(values).layers if rope] == [1e6] * 5 + [1e4]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layer_types": ["full_attention"]}, "layer_types must be a list with an entry for each of the 6 layers"),
            ({"layer_types": "full_attention"}, "layer_types must be a list with an entry"),
            ({"layer_types": ["full"] * 6}, "layer_types must contain only full_attention, sliding_attention, got 'full'"),
            ({"layer_types": [["full_attention"]] * 6}, "layer_types must contain only"),
            ({"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer of at least 1"),
            ({"rope_parameters": {"full": {"rope_theta": 1e6}}}, "rope_parameters.full must be a layer type of this model"),
        ],
    )  # fmt: skip
    def test_refusals(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(RopeError) as raised:
            from_config({**self.base, "rope_local_base_freq": 1e4, **changes})
        assert message in str(raised.value)

    def test_no_rope_layers(self) -> None:
        base = {"model_type": "smollm3", "head_dim": 8, "num_hidden_layers": 4, "rope_theta": 1e6}
        assert [r is None for r in from_config(base).layers] == [False, False, False, True]
        assert [r is None for r in from_config({**base, "no_rope_layer_interval": 2}).layers] == [False, True] * 2
        assert [r is None for r in from_config({**base, "no_rope_layers": [0, 1, 1, 0]}).layers] == [
            True,
            False,
            False,
            True,
        ]
        for wrong in ([True] * 4, ["x"] * 4, [-1] * 4):
            with pytest.raises(RopeError, match="no_rope_layers must contain only numbers"):
                from_config({**base, "no_rope_layers": wrong})

    def test_bases_of_layers(self) -> None:
        base = {"model_type": "granite_swa", "head_dim": 8, "num_hidden_layers": 3}
        ropes = from_config({**base, "layer_rope_theta": [1e4, 0, 1e4]})
        assert ropes.layers == (Rope(8, 1e4, "half"), None, Rope(8, 1e4, "half"))
        with pytest.raises(RopeError, match=r"layer_rope_theta\[2\] must agree with layer_rope_theta\[0\]"):
            from_config({**base, "layer_rope_theta": [1e4, 0, 1e5]})

    def test_numbered_layers(self) -> None:
        base = {"model_type": "bamba", "head_dim": 8, "num_hidden_layers": 3, "rope_theta": 1e4}
        ropes = from_config({**base, "attn_layer_indices": [1]})
        assert ropes.layers == (None, Rope(8, 1e4, "half", rotary_dim=4), None)
        assert from_config(base).layers == (None, None, None)
        with pytest.raises(RopeError, match="attn_layer_indices must be a list of layer numbers below 3"):
            from_config({**base, "attn_layer_indices": [3]})

    def test_layer_types_are_required_if_layers_differ(self) -> None:
        with pytest.raises(RopeError, match="layer_types must be given, since the layers differ"):
            from_config({"model_type": "laguna", "head_dim": 8, "num_hidden_layers": 2, "rope_parameters": {}})

    @pytest.mark.parametrize(("model_type", "key", "default", "on", "off", "null_rotates"), SWITCHES)
    def test_switch(
        self, model_type: str, key: str, default: object, on: object, off: object, null_rotates: bool
    ) -> None:
        """A missing key has the default of the class; null is a value. What is stated in vain is named."""
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "attention_head_dim": 16}
        config = {"model_type": model_type, **sizes, "d_model": 64, "n_heads": 4, "n_layers": 2}
        base_key = "rotary_emb_base" if model_type == "xlm-roberta-flash" else "rope_theta"
        config |= {base_key: 5e5, "layers_block_type": ["hybrid"] * 2, "layer_types": ["full_attention"] * 2}
        missing = from_config(config)
        for rotates, ropes in (
            (default == on, missing),
            (True, from_config({**config, key: on})),
            (False, from_config({**config, key: off})),
            (null_rotates, from_config({**config, key: None})),
        ):
            assert [rope and rope.base for rope in ropes.layers] == [5e5 if rotates else None] * 2
            warned = [w for w in ropes.warnings if w.startswith(f"{base_key} has no effect: {key} is ")]
            assert len(warned) == (not rotates)
        assert ("by default" in missing.origins.get("layer_types", "")) == (default != on)

    def test_defaults_of_switches(self) -> None:
        """Those of transformers' own classes are the ones in its rows; the others come from the models' repositories."""
        configs = pytest.importorskip("transformers").CONFIG_MAPPING
        rows = {name: row.switch for name, row in ARCHITECTURES.items() if row.switch is not None}
        assert {(name, key, default) for name, (key, _, default) in rows.items()} == {row[:3] for row in SWITCHES}
        for name, (key, _, default) in rows.items():
            if ARCHITECTURES[name].in_transformers:
                assert getattr(configs[name](), key) == default, name

    def test_unknown_model_whose_layers_differ(self) -> None:
        values = {"model_type": "mine", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 1e4}
        assert from_config(values, pairing="half").rope == Rope(8, 1e4, "half")
        for key, values_of_layers in (
            ("layer_types", ["full_attention", "sliding_attention"]),
            ("no_rope_layers", [1, 0]),
        ):
            with pytest.raises(RopeError, match="must be the same for all layers if ropewalk does not know"):
                from_config({**values, key: values_of_layers}, pairing="half")


class TestLatentAttention:
    base: ClassVar = {
        "model_type": "deepseek_v3", "num_hidden_layers": 1, "rope_theta": 1e4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    }  # fmt: skip

    def test_the_last_channels_rotate(self) -> None:
        ropes = from_config(self.base)
        assert ropes.rope == Rope(24, 1e4, "interleaved", rotary_dim=8, rotary_offset=16)
        assert ropes.output_order == "half"
        assert ropes.softmax_factor == 1.0

    def test_rope_interleave(self) -> None:
        ropes = from_config({**self.base, "rope_interleave": False})
        assert ropes.rope.pairing == "half"
        assert ropes.output_order is None
        with pytest.raises(RopeError, match="rope_interleave must be true or false"):
            from_config({**self.base, "rope_interleave": "no"})

    def test_softmax_factor(self) -> None:
        yarn = {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 1,
            "mscale_all_dim": 1,
        }
        ropes = from_config({**self.base, "rope_scaling": yarn})
        assert ropes.softmax_factor == pytest.approx(1.368888**2, abs=1e-5)
        assert ropes.rope.attention_factor == 1.0

    @pytest.mark.parametrize(
        ("stated", "pairing", "warned"), [(None, "half", 0), (False, "half", 0), (True, "interleaved", 1)]
    )
    def test_a_config_may_state_the_pairing_of_the_indexer(
        self, stated: bool | None, pairing: str, warned: int
    ) -> None:
        """vLLM reads `indexer_rope_interleave`. The code of DeepSeek-V3.2 has the pairing half."""
        config = {**self.base, "model_type": "deepseek_v32", "index_head_dim": 32, "indexer_rope_interleave": stated}
        ropes = from_config(config)
        assert ropes.extra_ropes["indexer"].pairing == pairing
        assert ropes.rope.pairing == "interleaved"
        assert len(ropes.warnings) == warned

    def test_sizes_are_needed(self) -> None:
        with pytest.raises(RopeError, match="qk_rope_head_dim must be an integer from 2 to 65536, got None"):
            from_config({**self.base, "qk_rope_head_dim": None})
        with pytest.raises(RopeError, match="index_head_dim: Rope: rotary_dim"):
            from_config({**self.base, "model_type": "deepseek_v32", "index_head_dim": 4})


def test_query_scale_of_ministral() -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192,
        "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    values = {"model_type": "ministral3", "head_dim": 8, "num_hidden_layers": 1, "rope_parameters": yarn}
    scale = from_config(values).query_scale
    assert scale is not None
    assert scale.at(8191) == 1.0
    assert scale.at(8192) == pytest.approx(1 + 0.1 * np.log(2))
    plain = {key: value for key, value in yarn.items() if key != "llama_4_scaling_beta"}
    assert from_config({**values, "rope_parameters": plain}).query_scale is None


def test_query_scale_of_layers_without_rotation() -> None:
    values = {"model_type": "llama4_text", "num_hidden_layers": 4, "head_dim": 8, "rope_theta": 5e5}
    scale = from_config(values).query_scale
    assert scale is not None
    assert scale.only_unrotated
    # transformers: log1p(floor((position + 1) / floor_scale)) · attn_scale + 1, by default with 8192 and 0.1
    assert [scale.at(p) for p in (8190, 8191, 16383)] == [1.0, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(3)]
    scale = from_config({**values, "attn_temperature_tuning": 4, "floor_scale": 16, "attn_scale": 0.5}).query_scale
    assert scale is not None
    assert scale.at(15) == 1 + 0.5 * np.log(2)
    assert from_config({**values, "attn_temperature_tuning": False}).query_scale is None

    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None}
    beam = {"model_type": "beam", "num_hidden_layers": 2, "head_dim": 8, "layer_types": list(kinds)}
    scale = from_config({**beam, "rope_parameters": kinds}).query_scale
    assert scale is not None
    assert scale.only_unrotated
    # transformers: exp(0.1 · log1p((position + 1) / 2048))
    assert [scale.at(p) for p in (0, 2047, 6143)] == pytest.approx([1.0000488, 2**0.1, 4**0.1], rel=1e-7)


class TestParametersFromOtherKeys:
    base: ClassVar = {
        "model_type": "llama",
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
        "max_position_embeddings": 4096,
    }

    def test_dynamic_uses_the_length_of_the_model(self) -> None:
        rope = from_config({**self.base, "rope_scaling": {"type": "dynamic", "factor": 2.0}}).rope
        assert rope.at_length(8192).scaling.alpha == 3.0
        with pytest.raises(RopeError, match="max_position_embeddings must be given"):
            from_config(
                {**self.base, "max_position_embeddings": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
            )

    def test_dynamic_with_alpha_is_ntk(self) -> None:
        """The files of Hunyuan also contain parameters of other schemes."""
        scaling = {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
        }
        ropes = from_config({**self.base, "model_type": "hunyuan_v1_dense", "rope_scaling": scaling})
        assert ropes.rope.scaling.alpha == 1000.0
        assert any("is not read if alpha is given" in warning for warning in ropes.warnings)

    def test_longrope_with_each_of_its_names(self) -> None:
        scaling = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        values = {**self.base, "model_type": "phi3", "original_max_position_embeddings": 1024}
        ropes = [from_config({**values, "rope_scaling": {"type": name, **scaling}}).rope for name in ("longrope", "su")]
        assert ropes[0] == ropes[1]
        assert ropes[0].scaling.factor == 4.0
        assert ropes[0].at_length(1025).inv_freq[0] == 0.5
        with pytest.raises(RopeError, match="LongRoPE: short_factor must have 4 numbers"):
            from_config({**values, "rope_scaling": {"type": "su", **scaling, "short_factor": [1.0]}})


def test_sizes_of_single_layers() -> None:
    base = {
        "model_type": "gemma4_text", "head_dim": 8, "num_hidden_layers": 6,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
    }  # fmt: skip
    assert from_config({**base, "global_head_dim": 16}).layers[5] == Rope(16, 1e6, "half")
    ropes = from_config({**base, "per_layer_config": {"05": {"head_dim": 16}}})
    assert ropes.layers[5] == Rope(16, 1e6, "half")
    assert ropes.layers[0] == Rope(8, 1e4, "half")
    for wrong in ([1], {"5x": {}}, {"99": {}}, {"05": 16}, {"05": {"head_dim": "16"}}):
        with pytest.raises(RopeError, match=r"per_layer_config|head_dim must be"):
            from_config({**base, "per_layer_config": wrong})
    with pytest.raises(
        RopeError, match="per_layer_config must give all layers of kind sliding_attention the same head_dim"
    ):
        from_config({**base, "per_layer_config": {"0": {"head_dim": 16}, "1": {"head_dim": 32}}})


@pytest.mark.parametrize(
    "name", ["afmoe", "cohere2", "exaone4", "lfm2", "llama", "minimax", "qwen3_5_text", "qwen3_next"]
)
def test_one_rope_in_objects_for_kinds_of_layers(name: str) -> None:
    """transformers cannot read it, so no meaning is guessed."""
    config = AutoConfig.for_model(name)
    one = config.rope_parameters
    config.rope_parameters = {"full_attention": one, "sliding_attention": one}
    modeling = importlib.import_module(
        f"transformers.models.{name.removesuffix('_text')}.modeling_{name.removesuffix('_text')}"
    )
    [rotary] = {v for k, v in vars(modeling).items() if k.endswith("RotaryEmbedding") and "Vision" not in k}
    with pytest.raises(KeyError, match="rope_type"):
        rotary(config)
    with pytest.raises(
        RopeError, match=r"_attention must not be an object for this model_type, got an object\. All layers"
    ):
        from_config(config)
    assert any(from_config({**config.to_dict(), "rope_parameters": one}).layers)


def test_the_published_files_of_nomic() -> None:
    """nomic-embed-text-v1.5 has the keys of its own code beside those of transformers, and older files only those."""
    old = {
        "model_type": "nomic_bert",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 8192,
        "max_trained_positions": 2048,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
    }
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "max_position_embeddings": 2048}
    both = {**old, **sizes, "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}}
    module = NomicBertRotaryEmbedding(NomicBertConfig.from_dict(both))
    for config in (old, both):
        ropes = from_config(config)
        np.testing.assert_allclose(ropes.rope.inv_freq, module.inv_freq, rtol=FLOAT32_POWER)
        assert (ropes.rope.pairing, len(ropes.layers), ropes.trained_length) == ("half", 12, 2048)
    # The cards of nomic-embed-text tell the user to set it for 8,192 tokens.
    scaled = NomicBertRotaryEmbedding(NomicBertConfig.from_dict({**both, "rotary_scaling_factor": 2}))
    scaled(torch.zeros(1), torch.arange(8192)[None])
    ropes = from_config({**old, "rotary_scaling_factor": 2})
    np.testing.assert_allclose(ropes.rope.inv_freq, scaled.inv_freq, rtol=FLOAT32_POWER)
    assert ropes.warnings == (
        "rotary_scaling_factor has no effect: only Nomic's own code reads it, as dynamic NTK's factor.",
    )
    for key, value in (("rotary_emb_fraction", 0.5), ("rotary_emb_interleaved", True)):
        with pytest.raises(RopeError, match=key):
            from_config({**old, key: value})
