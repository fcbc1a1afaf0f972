"""Read the files of other programs, and write what they say as the config.json of the same model.

Each format has a module that reads its ropes with their own pairing, and the sizes that the config.json states
(`ModelRopes.config`). The keys of the ropes are then written by the rules of the model_type.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk._checks import RopeError, error, shown, without_fix
from ropewalk.configs import hf, model_ropes, source
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES, name_of
from ropewalk.configs.reader import Reader, other_pairing
from ropewalk.configs.source import Request
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Llama3

_FLOAT32 = 1e-6
"""The tolerance of frequencies, relative, since a GGUF file holds numbers in float32."""


def read(values: dict[str, Any], name: str, asked: Request) -> ModelRopes:
    """Read the ropes of a file of another format than Hugging Face's and diffusers', as `source.load_any` loads it.

    The errors are those of `from_config`.
    """
    from ropewalk.configs import litgpt, meta, mistral

    if not values:
        from ropewalk.configs.gguf import read as gguf

        asked.refuse("a GGUF file", "factor", "like")
        ropes = gguf.read(Path(name), asked)
    elif source.is_litgpt(values):
        _check(asked, litgpt.FORMAT, "half", "factor", "like")
        ropes = litgpt.read(values, name, base=asked.base)
    elif mistral.matches(values):
        _check(asked, mistral.FORMAT, "interleaved", "factor", "like")
        ropes = mistral.read(values, name, base=asked.base)
    else:
        _check(asked, "Meta's params.json", "interleaved", "like")
        ropes = meta.read(values, name, base=asked.base, factor=asked.factor)
    return replace(ropes, writer=to_hf_config)


def _check(asked: Request, file_format: str, pairing: str, *refused: str) -> None:
    """Raise a RopeError for another pairing than that of the format, and for the arguments that it does not take."""
    asked.refuse(file_format, *refused)
    if asked.pairing not in (None, pairing):
        must = f"pairing of {file_format} must be {pairing!r}"
        raise error("from_config", must, shown(asked.pairing), other_pairing())


def to_hf_config(ropes: ModelRopes, version: int) -> dict[str, Any]:
    """Return the keys about rotation of the config.json of the same model, converted for transformers.

    Its pairing is that of its model_type: converters permute q and k where the pairing of the format is another one.

    Raises:
        RopeError: the file does not say enough, or no config of the model_type means these ropes.
    """
    fix = "Pass the config.json of the model."
    if ropes.config is None:
        must = f"the model_type of Hugging Face must follow from the {ropes.file_format}"
        raise error(ropes.source, must, f"{ropes.model_type}, for which it is not known", fix)
    outer, _, model_type = str(ropes.config["model_type"]).rpartition("/")
    must = f"the {ropes.file_format} must state what the config.json of a {model_type} states"
    stated = {**ropes.config, "model_type": model_type}
    row = ARCHITECTURES.get(name_of(model_type, stated))
    rope = next((rope for rope in ropes.layers if rope is not None), None)
    if row is not None and rope is not None and row.dim_key:
        stated[row.dim_key] = rope.rotary_dim
    try:
        c = Reader(stated, ropes.source, "", Request())
        kinds = () if row is None else tuple(row.kinds_of_layers(c))
        layers = tuple(rope and replace(rope, scaling=_stated(rope)) for rope in ropes.layers)
        own = replace(ropes, layers=layers, layer_kinds=kinds, model_type=model_type, config=stated)
        config = model_ropes.write(own, version)
        config = {"model_type": outer, "text_config": config} if outer else config
        found = hf.read(config, ropes.source, Request())
    except RopeError as e:
        raise error(ropes.source, must, without_fix(e).removeprefix(f"{ropes.source}: "), fix) from e
    apart = [i for i, (a, b) in enumerate(zip(ropes.layers, found.layers, strict=True)) if not _same(a, b)]
    if apart or not np.isclose(ropes.softmax_factor, found.softmax_factor, rtol=_FLOAT32):
        must = f"the config.json of a {model_type} must be able to mean the ropes of the {ropes.file_format}"
        raise error(ropes.source, must, f"{ropes.layers[apart[0] if apart else 0]}", fix)
    return config


def _stated(rope: Rope) -> Any:
    """Return the scheme of a rope, with the divisors of its pairs as the scaling of Llama 3 if they are its numbers.

    A GGUF file holds these divisors and not the parameters. The last one is the factor, and the others are constants of
    all released models.
    """
    if not hasattr(rope.scaling, "factors"):
        return rope.scaling
    plain = replace(rope, scaling=None)
    factor = float(plain.inv_freq[-1] / rope.inv_freq[-1])
    scaling = Llama3(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return scaling if _same(rope, replace(rope, scaling=scaling)) else rope.scaling


def _same(a: Rope | None, b: Rope | None) -> bool:
    """Whether two ropes are the same, except for their pairing and the rounding to float32.

    If the first has no axes, it may be the rope of text tokens of the second.
    """
    if a is None or b is None:
        return a is b
    if any(getattr(a, name) != getattr(b, name) for name in ("head_dim", "rotary_dim", "rotary_offset")):
        return False
    if a.axes not in (None, b.axes):
        return False
    for length in (1, 2**31):
        one, other = (rope if rope.is_static else rope.at_length(length) for rope in (a, b))
        first, second = ((*rope.inv_freq, rope.attention_factor) for rope in (one, other))
        if not np.allclose(first, second, rtol=_FLOAT32, atol=0):
            return False
    return True
