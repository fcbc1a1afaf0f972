"""How rows of the architecture table are written: what many of them have in common, by name."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import error, shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.axes_rules import AxesRule
from ropewalk.configs.families.latent import Latent
from ropewalk.configs.families.refused import Refused
from ropewalk.configs.layers import ALL, Pattern


def checked(model_type: object, row: object) -> Architecture:
    """The row, where it is one that `models.register` can take."""
    who = "models.register"
    if not isinstance(model_type, str) or not model_type:
        raise error(who, "model_type must be a word", shown(model_type), "Pass what configs say.")
    if not isinstance(row, Architecture):
        cure = 'Build one: Architecture(source="where its code is", pairing="half").'
        raise error(who, "row must be an Architecture", shown(row), cure)
    return row


def source(folder: str) -> str:
    return f"transformers 5.23 models/{folder}"


def row(folder: str, **more: Any) -> Architecture:
    return Architecture(source=source(folder), **more)


def llama_like(names: str, *, head_dim_divides: bool = True, pairing: str = "half") -> dict[str, Architecture]:
    """The whole head of every layer turns, as in Llama. `type@folder` where the folder has another name."""
    rows = {}
    for name in names.split():
        model_type, _, folder = name.partition("@")
        rows[model_type] = row(folder or model_type, head_dim_divides=head_dim_divides, pairing=pairing)
    return rows


def partly(folder: str, share: float, *, pairing: str = "half", head_dim_divides: bool = True) -> Architecture:
    """A share of the head turns, in every layer."""
    return row(folder, pairing=pairing, partial=share, head_dim_divides=head_dim_divides)


def remote(where: str, **more: Any) -> Architecture:
    """A model whose code is not in transformers."""
    return Architecture(source=where, in_transformers=False, **more)


def latent(
    folder: str, *, pairing: str = "interleaved", output_order: str | None = "half", **more: Any
) -> Architecture:
    """Multi-head latent attention: the last qk_rope_head_dim channels of the head rotate."""
    return Latent(source=source(folder), pairing=pairing, output_order=output_order, **more)


def hybrid(folder: str, attention: str, others: tuple[str, ...], pattern: Pattern | None, **more: Any) -> Architecture:
    """Only the attention layers turn; the others have none or are of another kind."""
    kinds = {attention: Kind(), **dict.fromkeys(others)}
    return row(folder, kinds=kinds, pattern=pattern, **more)


def local_only(folder: str, pattern: Pattern | None, **more: Any) -> Architecture:
    """Sliding layers turn, full ones do not."""
    kinds = {"sliding_attention": Kind(), "full_attention": None, ALL: Kind()}
    return row(folder, kinds=kinds, pattern=pattern, flat=True, **more)


def several_axes(folder: str, axes: AxesRule, *, share: float | None = None, **more: Any) -> Architecture:
    """Tokens with several positions: images, video and multimodal text."""
    return row(folder, axes=axes, partial=share, **more)


def without_rope(folder: str) -> Architecture:
    """It rotates nothing, though its config may say rope_theta."""
    return row(folder, kinds={ALL: None})


def refused(folder: str, why: str) -> Architecture:
    return Refused(source=source(folder), why=why)
