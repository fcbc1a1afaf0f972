"""Functions that build the `Architecture` of a model, for the tables of models."""

from __future__ import annotations

from typing import Any

from ropewalk.configs.architecture import Architecture, KindRule
from ropewalk.configs.families.latent import Latent
from ropewalk.configs.layers import ALL, Kind


def source(folder: str) -> str:
    """Return the `source` of an `Architecture`: the folder of the model in transformers."""
    return f"transformers 5.24 models/{folder}"


def row(folder: str, **fields: Any) -> Architecture:
    """Build the `Architecture` of a model of transformers. `fields` are its fields that differ from those of Llama."""
    return Architecture(source=source(folder), **fields)


def llama_like(names: str, **fields: Any) -> dict[str, Architecture]:
    """Build the `Architecture` of models of transformers in which the whole head of every layer rotates, as in Llama.

    Args:
        names: the model_types, separated by spaces. `model_type@folder` names the folder of the model in transformers,
            if its name is not the model_type.
        fields: as in `Architecture`.

    Returns:
        A dict from each model_type to its `Architecture`.
    """
    rows = {}
    for name in names.split():
        model_type, _, folder = name.partition("@")
        rows[model_type] = row(folder or model_type, **fields)
    return rows


def remote(code: str, **fields: Any) -> Architecture:
    """Build the `Architecture` of a model whose code is not in transformers. `code` names the file with its code."""
    return Architecture(source=code, in_transformers=False, **fields)


def latent(
    folder: str, *, pairing: str = "interleaved", output_order: str | None = "half", **fields: Any
) -> Architecture:
    """Build the `Architecture` of a model with multi-head latent attention. qk_rope_head_dim channels rotate."""
    return Latent(source=source(folder), pairing=pairing, output_order=output_order, **fields)


def hybrid(folder: str, attention: str, unrotated: tuple[str, ...], pattern: KindRule, **fields: Any) -> Architecture:
    """Build the `Architecture` of a model in which only one kind of layer rotates.

    Args:
        folder: the folder of the model in transformers.
        attention: the kind of layer that rotates.
        unrotated: the other kinds of layers, which have no attention, or attention without a rope.
        pattern: as in `Architecture`.
        fields: other fields of `Architecture`.
    """
    kinds = {attention: Kind(), **dict.fromkeys(unrotated)}
    return row(folder, kinds=kinds, pattern=pattern, **fields)


def local_only(folder: str, pattern: KindRule, **fields: Any) -> Architecture:
    """Build the `Architecture` of a model that rotates in layers with a sliding window, but not with full attention."""
    kinds = {"sliding_attention": Kind(), "full_attention": None, ALL: Kind()}
    return row(folder, kinds=kinds, pattern=pattern, flat=True, **fields)


def without_rope(folder: str) -> Architecture:
    """Build the `Architecture` of a model that rotates nothing, although its config may have rope_theta."""
    return row(folder, kinds={ALL: None})


def refused(folder: str, why: str) -> Architecture:
    """Build the `Architecture` of a model that no `Rope` describes. Reading its config raises an error with `why`."""
    return row(folder, refusal=why)


def other_positions(model_type: str, instead: str) -> Architecture:
    """Build the `Architecture` of a model without a rope. Reading its config raises an error that says what it has."""
    why = f"{model_type} has no rotary positions: it has {instead}."
    return Architecture(source=f"the model's own code: {instead}", refusal=why)
