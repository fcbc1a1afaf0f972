"""Constructors of common rows of the architecture table."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import error, shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.axes_rules import AxesRule
from ropewalk.configs.families.latent import Latent
from ropewalk.configs.families.refused import Refused
from ropewalk.configs.layers import ALL, Pattern


def check_row(model_type: object, row: object) -> Architecture:
    """Return the row, or raise a RopeError if `models.register` cannot accept it."""
    who = "models.register"
    if not isinstance(model_type, str) or not model_type:
        raise error(
            who, "model_type must be a non-empty string", shown(model_type), "Pass the model_type of the configs."
        )
    if not isinstance(row, Architecture):
        cure = 'Pass one, e.g. Architecture(source="URL of its code", pairing="half").'
        raise error(who, "row must be an Architecture", shown(row), cure)
    return row


def source(folder: str) -> str:
    """The source of a row: a folder of transformers."""
    return f"transformers 5.23 models/{folder}"


def row(folder: str, **more: Any) -> Architecture:
    """A model of transformers, with the fields of `Architecture` that differ from Llama."""
    return Architecture(source=source(folder), **more)


def llama_like(names: str, *, head_dim_divides: bool = True, pairing: str = "half") -> dict[str, Architecture]:
    """Rows of models in which the whole head of every layer rotates, as in Llama.

    `names` lists model_types. Write `model_type@folder` if the folder has another name.
    """
    rows = {}
    for name in names.split():
        model_type, _, folder = name.partition("@")
        rows[model_type] = row(folder or model_type, head_dim_divides=head_dim_divides, pairing=pairing)
    return rows


def partly(folder: str, share: float, *, pairing: str = "half", head_dim_divides: bool = True) -> Architecture:
    """A share of the head rotates, in every layer."""
    return row(folder, pairing=pairing, partial=share, head_dim_divides=head_dim_divides)


def remote(where: str, **more: Any) -> Architecture:
    """A model whose code is not in transformers."""
    return Architecture(source=where, in_transformers=False, **more)


def latent(
    folder: str, *, pairing: str = "interleaved", output_order: str | None = "half", **more: Any
) -> Architecture:
    """Multi-head latent attention: the last qk_rope_head_dim channels of the head rotate."""
    return Latent(source=source(folder), pairing=pairing, output_order=output_order, **more)


def hybrid(
    folder: str, attention: str, unrotated: tuple[str, ...], pattern: Pattern | None, **more: Any
) -> Architecture:
    """Only the attention layers rotate. The other kinds of layers have no attention, or attention without a rope."""
    kinds = {attention: Kind(), **dict.fromkeys(unrotated)}
    return row(folder, kinds=kinds, pattern=pattern, **more)


def local_only(folder: str, pattern: Pattern | None, **more: Any) -> Architecture:
    """Sliding layers rotate, and full ones do not."""
    kinds = {"sliding_attention": Kind(), "full_attention": None, ALL: Kind()}
    return row(folder, kinds=kinds, pattern=pattern, flat=True, **more)


def several_axes(folder: str, axes: AxesRule, *, share: float | None = None, **more: Any) -> Architecture:
    """Tokens with several positions: images, video and multimodal text."""
    return row(folder, axes=axes, partial=share, **more)


def without_rope(folder: str) -> Architecture:
    """The model rotates nothing, although its config may have rope_theta."""
    return row(folder, kinds={ALL: None})


def refused(folder: str, why: str) -> Architecture:
    """No Rope describes the model. `why` gives the reason."""
    return Refused(source=source(folder), why=why)
