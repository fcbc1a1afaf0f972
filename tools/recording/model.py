"""Run one layer of a model of transformers with chosen projections, and read what its attention is given.

The model is built from its config on the meta device, so that its size does not matter. Every projection is replaced by
one that returns numbers of our choice, every norm by the identity, and every layer but one is skipped. What remains is
the model's own code: which frequencies it takes, which channels it slices, and how it rotates them. The first product
of queries and keys ends the run. Nothing here imports ropewalk.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .configs import modeling_file
from .parts import gives_keys, is_attention, is_mixer, is_norm, is_rotary, rotary_on_cpu, without_towers
from .stubs import Captured, CaptureError, Fed, FirstProduct, Looked, Projection, Same, Several, scaled_product

WITHOUT_ATTENTION = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")
NO_LAYERS = "no list of layers with attention"


class CannotRecordError(Exception):
    """The model does not fit this way of recording; the text says why."""


class Recorder:
    """A model built without numbers, of which single layers can be run."""

    def __init__(self, config: Any, cls: type) -> None:
        self.config = config
        config._attn_implementation = "eager"
        for part in (config, getattr(config, "attn_config", None)):
            if getattr(part, "clip_qkv", None) is not None:
                part.clip_qkv = float("inf")  # labels are larger than any bound
        with torch.device("meta"), rotary_on_cpu(modeling_file(config)), without_towers():
            self.model: Any = cls(config).eval()
        self.path, self.layers = self._layers(self.model)
        self.fed = Fed()
        self.outputs = 2  # a layer returns what it changed and something else, or that alone
        self._replace()

    def _layers(self, model: nn.Module) -> tuple[str, nn.ModuleList]:
        lists = [
            (name, part)
            for name, part in model.named_modules()
            if isinstance(part, nn.ModuleList) and any(is_attention(m) for m in part.modules())
            if "vision" not in name
        ]
        if not lists:
            raise CannotRecordError(NO_LAYERS)
        lists.sort(key=lambda each: (each[0].count("."), each[0] != "layers"))
        return lists[0]

    @torch.no_grad()
    def _replace(self) -> None:
        """Projections, norms and tables by ours; what is left on the meta device, by zeros."""
        number = 0
        for parent in list(self.model.modules()):
            if is_rotary(parent):
                continue
            for name, child in list(parent.named_children()):
                kind = type(child).__name__
                channels = getattr(child, "out_features", None) or getattr(child, "nf", None)
                if isinstance(child, nn.Linear) or ("Linear" in kind and channels):
                    parent._modules[name] = Projection(0, channels, self.fed)
                elif kind.endswith("CCAProjection"):  # Zaya: a mean of queries and keys, and a convolution
                    keys = child.num_key_value_heads
                    heads = [child.num_attention_heads, keys, keys]
                    parent._modules[name] = Several(heads, child.head_dim, self.fed)
                elif is_norm(child) or is_mixer(child):  # a mixer beside attention is slow
                    parent._modules[name] = Same(child)
                elif hasattr(child, "create_weight"):  # a table of sines
                    child.weight = nn.Parameter(torch.empty(child.weight.shape), requires_grad=False)
                    child.weight.copy_(child.create_weight())
                elif isinstance(child, nn.Embedding):
                    parent._modules[name] = Looked(child.embedding_dim)
        for layer in self.layers:
            number = 0
            for part in layer.modules():
                if isinstance(part, Projection):
                    number += 1
                    part.number = number
        for part in self.model.modules():
            for store in (part._parameters, part._buffers):
                for name, value in store.items():
                    if value is not None and value.is_meta:
                        # All of them: a tensor times a meta tensor is whatever memory holds, without an error.
                        zeros = torch.zeros((), dtype=value.dtype).expand(value.shape)
                        zeros = zeros.clone() if value.numel() < 2**22 else zeros
                        store[name] = nn.Parameter(zeros, requires_grad=False) if store is part._parameters else zeros

    def signature(self, index: int) -> str:
        """What tells this layer from others: plain attributes of its parts, its entries in lists of the config."""
        facts: list[Any] = []
        for name, part in self.layers[index].named_modules():
            for key, value in vars(part).items():
                if isinstance(value, (bool, int, float, str, type(None))) and key not in ("layer_idx", "number"):
                    facts.append((name, key, value))
        for key, value in vars(self.config).items():
            if isinstance(value, (list, tuple)) and len(value) == len(self.layers):
                facts.append((key, value[index]))
            elif isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
                facts.append((key, index in value))  # layers by number
        return repr(facts)

    def has_attention(self, index: int) -> bool:
        kinds = getattr(self.config, "layer_types", None) or getattr(self.config, "layers_block_type", None)
        if kinds and len(kinds) == len(self.layers) and kinds[index] in WITHOUT_ATTENTION:
            return False
        parts = [part for part in self.layers[index].modules() if is_attention(part)]
        return any("Cross" not in type(part).__name__ for part in parts)

    def run(
        self,
        index: int,
        rows: int,
        row: Callable[[int, int], Tensor],
        positions: Tensor | None = None,
        indexer: bool = False,
    ) -> Captured:
        """What the first product of one layer is given.

        Args:
            index: number of the layer.
            rows: batch size.
            row: from the number of a projection and its channels to what it returns, [rows, channels] for every token
                alike or [rows, tokens, channels].
            positions: [tokens], or [axes, tokens]; 0 and 1 where none are given.
            indexer: take the product of the layer's indexer, and not that of its attention.

        Raises:
            CannotRecordError: the model does not run in this way, or multiplies nothing.
        """
        self.fed.rows, self.fed.row = rows, row
        try:
            return self._captured(self._whole, index, rows, positions, indexer)
        except CannotRecordError as error:
            with contextlib.suppress(CannotRecordError):
                return self._captured(self._alone, index, rows, positions, indexer)
            raise error

    def _captured(
        self, forward: Callable[..., None], index: int, rows: int, positions: Tensor | None, indexer: bool
    ) -> Captured:
        mode = FirstProduct()
        handles = self._watch(index, mode, indexer)
        try:
            with torch.no_grad(), scaled_product(modeling_file(self.config), mode), mode:
                forward(index, rows, positions)
        except CaptureError as captured:
            tokens, chosen = (2, torch.arange(2)) if positions is None else self.tokens(positions)
            found: Captured = captured.args[0].of(rows, tokens, chosen)
        except Exception as error:
            raise CannotRecordError(f"{type(error).__name__}: {str(error)[:160]}") from error
        else:
            raise CannotRecordError("the layer multiplied no queries with keys")
        finally:
            for handle in handles:
                handle.remove()
        try:
            found.query  # noqa: B018 (its shape is read)
        except ValueError as error:
            raise CannotRecordError(str(error)) from error
        return found

    def _whole(self, index: int, rows: int, positions: Tensor | None) -> None:
        """Run the model with every other layer left out."""
        owner = self.model.get_submodule(self.path.rpartition(".")[0])
        attribute = self.path.rpartition(".")[2]
        arguments = self._arguments(rows, positions)
        try:
            for outputs in (self.outputs, 3 - self.outputs):
                kept = [
                    part if i == index or gives_keys(part) else Same(part, outputs)
                    for i, part in enumerate(self.layers)
                ]
                owner._modules[attribute] = nn.ModuleList(kept)
                try:
                    self.model(**arguments)
                except CaptureError:
                    self.outputs = outputs
                    raise
                except Exception:
                    if outputs != self.outputs:
                        raise
        finally:
            owner._modules[attribute] = self.layers

    def _alone(self, index: int, rows: int, positions: Tensor | None) -> None:
        """Run the attention of one layer with what the model's rotary class gives: the model may need other inputs."""
        part = next(part for part in self.layers[index].modules() if is_attention(part))
        tokens = 2 if positions is None else self.tokens(positions)[0]
        x = torch.zeros(rows, tokens, self.width)
        given: dict[str, Any] = {
            "position_ids": torch.arange(tokens).expand(rows, -1) if positions is None else of_rows(positions, rows),
            "attention_mask": torch.zeros(rows, 1, tokens, tokens),
        }
        named = sorted(self.model.named_modules(), key=lambda each: each[0].count("."))  # its own, and not a tower's
        rotary = [each for _, each in named if is_rotary(each)]
        taken = inspect.signature(part.forward).parameters
        if rotary and "position_embeddings" in taken:
            kinds = getattr(self.config, "layer_types", None)
            kind = [kinds[index]] if "layer_type" in inspect.signature(rotary[0].forward).parameters and kinds else []
            given["position_embeddings"] = rotary[0](x, given["position_ids"], *kind)
        needed = {name: None for name, p in taken.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        states = {name: x for i, name in enumerate(taken) if i == 0 or name.endswith("hidden_states")}
        states |= {name: x[:, :0] for name in states if name.startswith("context")}  # it stands before the tokens
        part(**{**needed, **states, **{name: value for name, value in given.items() if name in taken}})

    def _watch(self, index: int, mode: FirstProduct, indexer: bool) -> list[Any]:
        """Switch the mode on inside the layer's attention, or inside its indexer, and off again."""

        def enter(*_: Any) -> None:
            mode.inside = True

        def leave(*_: Any) -> None:
            mode.inside = False

        handles = []
        for name, part in self.layers[index].named_modules():
            if any(word in type(part).__name__ for word in ("Indexer", "Compressor")):  # they have queries of their own
                before, after = (enter, leave) if indexer else (leave, enter)
                handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
            elif is_attention(part) and not any(word in name for word in ("indexer", "compressor")):
                handles += [] if indexer else [part.register_forward_pre_hook(enter)]
        return handles

    def tokens(self, positions: Tensor) -> tuple[int, Tensor]:
        """How many tokens are run for these positions, and which of them: all from 0 where no positions are taken."""
        if positions.ndim > 1 or "position_ids" in inspect.signature(self.model.forward).parameters:
            return positions.shape[-1], torch.arange(positions.shape[-1])
        return int(positions.max()) + 1, positions

    def attentions(self, index: int) -> int:
        """How many times a layer attends."""
        parts = getattr(self.layers[index], "self_attn", None)
        return len(parts) if isinstance(parts, nn.ModuleList) else 1

    @property
    def several_axes(self) -> bool:
        """Whether the rotary class of the layers puts together what it turns by several positions of a token."""
        parts = [part for name, part in self.model.named_modules() if is_rotary(part) and "visual" not in name]
        return any(hasattr(part, "recomposition_frequencies") for part in parts if "Vision" not in type(part).__name__)

    @property
    def width(self) -> int:
        """Channels of the hidden states."""
        names = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
        return next(value for key in names if isinstance(value := getattr(self.config, key, None), int))

    def _arguments(self, rows: int, positions: Tensor | None) -> dict[str, Any]:
        """What the model is called with."""
        parameters = inspect.signature(self.model.forward).parameters
        arguments: dict[str, Any] = {}
        tokens = 2 if positions is None else self.tokens(positions)[0]
        if positions is not None and "position_ids" in parameters:
            arguments["position_ids"] = of_rows(positions, rows)
        if "inputs_embeds" in parameters:
            arguments["inputs_embeds"] = torch.zeros(rows, tokens, self.width)
        elif "hidden_states" in parameters:
            arguments["hidden_states"] = torch.zeros(rows, tokens, self.width)
        else:
            arguments["input_ids"] = torch.zeros(rows, tokens, dtype=torch.long)
        if "use_cache" in parameters:
            arguments["use_cache"] = False
        return arguments

    def frequencies(self) -> list[Frequencies]:
        """Every inv_freq of the model's rotary modules."""
        return [
            Frequencies(part, name)
            for part in self.model.modules()
            if is_rotary(part)
            for name, value in part._buffers.items()
            if value is not None and name.endswith("inv_freq") and "original" not in name
        ]


def of_rows(positions: Tensor, rows: int) -> Tensor:
    """Positions, [tokens] or [axes, tokens], for a batch of so many rows alike."""
    return positions.unsqueeze(-2).expand(*positions.shape[:-1], rows, -1)


@dataclass(frozen=True)
class Frequencies:
    """A buffer of a rotary module, which a run may change."""

    part: nn.Module
    name: str

    @property
    def inv_freq(self) -> Tensor:
        return self.part.get_buffer(self.name)

    @property
    def attention_factor(self) -> float:
        return float(getattr(self.part, self.name.replace("inv_freq", "attention_scaling"), 1.0))
