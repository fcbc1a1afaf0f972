"""Run one layer of a model of transformers with chosen projections, and capture its rotated queries and keys.

The model is built from its config on the meta device, so its size does not matter. Every projection is replaced by a
stub that returns chosen numbers, every norm by the identity, and all other layers are skipped. The rest is the model's
own code, which selects the frequencies, slices the channels and rotates them. The first product of queries and keys
ends the run. Nothing here imports ropewalk.
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
from .parts import is_attention, is_mixer, is_norm, is_rotary, rotary_on_cpu, shares_keys, without_towers
from .stubs import (
    Captured,
    CaptureError,
    FirstProduct,
    Identity,
    Projection,
    ProjectionOutputs,
    SeparateProjections,
    ZeroEmbedding,
    scaled_product,
)

WITHOUT_ATTENTION = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")
NO_LAYERS = "no list of layers with attention"


class CannotRecordError(Exception):
    """The model cannot be recorded in this way. The message says why."""


class Recorder:
    """A model without weights, of which single layers can be run.

    Args:
        config: the config of the model.
        cls: the class of the model.
    """

    def __init__(self, config: Any, cls: type) -> None:
        self.config = config
        config._attn_implementation = config._experts_implementation = "eager"
        for part in (config, getattr(config, "attn_config", None)):
            if getattr(part, "clip_qkv", None) is not None:
                part.clip_qkv = float("inf")  # no clipping, because labels are large numbers
        with torch.device("meta"), rotary_on_cpu(modeling_file(config)), without_towers():
            self.model: Any = cls(config).eval()
        self.path, self.layers = self._layers(self.model)
        self.numbers = ProjectionOutputs()
        self.outputs = 2  # the number of outputs of a layer: 1, or 2 if it also returns something else
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
        """Replace projections, norms and tables by stubs, and all other tensors on the meta device by zeros."""
        number = 0
        for parent in list(self.model.modules()):
            if is_rotary(parent):
                continue
            for name, child in list(parent.named_children()):
                kind = type(child).__name__
                channels = getattr(child, "out_features", None) or getattr(child, "nf", None)
                if isinstance(child, nn.Linear) or ("Linear" in kind and channels):
                    parent._modules[name] = Projection(0, channels, self.numbers)
                elif kind.endswith("CCAProjection"):  # Zaya, which mixes queries and keys by a mean and a convolution
                    keys = child.num_key_value_heads
                    heads = [child.num_attention_heads, keys, keys]
                    parent._modules[name] = SeparateProjections(heads, child.head_dim, self.numbers)
                elif is_norm(child) or is_mixer(child):  # a mixer next to attention is slow
                    parent._modules[name] = Identity(child)
                elif hasattr(child, "create_weight"):  # a table of sines
                    child.weight = nn.Parameter(torch.empty(child.weight.shape), requires_grad=False)
                    child.weight.copy_(child.create_weight())
                elif isinstance(child, nn.Embedding):
                    parent._modules[name] = ZeroEmbedding(child.embedding_dim)
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
                        # Leave no meta tensor: a product with one is uninitialized memory, without an error.
                        zeros = torch.zeros((), dtype=value.dtype).expand(value.shape)
                        zeros = zeros.clone() if value.numel() < 2**22 else zeros
                        store[name] = nn.Parameter(zeros, requires_grad=False) if store is part._parameters else zeros

    def signature(self, index: int) -> str:
        """Return a text that is equal for layers of the same kind.

        It contains the plain attributes of the layer's modules, and the layer's entries in lists of the config.
        """
        facts: list[Any] = []
        for name, part in self.layers[index].named_modules():
            for key, value in vars(part).items():
                if isinstance(value, (bool, int, float, str, type(None))) and key not in ("layer_idx", "number"):
                    facts.append((name, key, value))
        for key, value in vars(self.config).items():
            if isinstance(value, (list, tuple)) and len(value) == len(self.layers):
                facts.append((key, value[index]))
            elif isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
                facts.append((key, index in value))  # a list of indices of layers
        return repr(facts)

    def has_attention(self, index: int) -> bool:
        """Return whether a layer has self-attention."""
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
        """Run one layer, and return the operands of its first product of queries and keys.

        Args:
            index: the index of the layer.
            rows: the batch size.
            row: a function of the number of a projection and its channels. It returns the output of that projection,
                [rows, channels] for every token, or [rows, tokens, channels].
            positions: [tokens], or [axes, tokens]. None means 0 and 1.
            indexer: whether to return the product of the layer's indexer instead of its attention.

        Raises:
            CannotRecordError: the model does not run in this way, or computes no product of queries and keys.
        """
        self.numbers.rows, self.numbers.row = rows, row
        try:
            return self._capture(self._one_layer, index, rows, positions, indexer)
        except CannotRecordError as error:
            with contextlib.suppress(CannotRecordError):
                return self._capture(self._attention_only, index, rows, positions, indexer)
            raise error

    def _capture(
        self, forward: Callable[..., None], index: int, rows: int, positions: Tensor | None, indexer: bool
    ) -> Captured:
        mode = FirstProduct()
        handles = self._watch(index, mode, indexer)
        try:
            with torch.no_grad(), scaled_product(modeling_file(self.config), mode), mode:
                forward(index, rows, positions)
        except CaptureError as captured:
            tokens, chosen = (2, torch.arange(2)) if positions is None else self.tokens(positions)
            found: Captured = captured.args[0].with_tokens(rows, tokens, chosen)
        except Exception as error:
            raise CannotRecordError(f"{type(error).__name__}: {str(error)[:160]}") from error
        else:
            raise CannotRecordError("the layer computed no product of queries and keys")
        finally:
            for handle in handles:
                handle.remove()
        try:
            found.query  # noqa: B018 (raises if the shape is not supported)
        except ValueError as error:
            raise CannotRecordError(str(error)) from error
        return found

    def _one_layer(self, index: int, rows: int, positions: Tensor | None) -> None:
        """Run the model with all other layers replaced by the identity."""
        owner = self.model.get_submodule(self.path.rpartition(".")[0])
        attribute = self.path.rpartition(".")[2]
        arguments = self._arguments(rows, positions)
        try:
            for outputs in (self.outputs, 3 - self.outputs):
                layers = [
                    part if i == index or shares_keys(part) else Identity(part, outputs)
                    for i, part in enumerate(self.layers)
                ]
                owner._modules[attribute] = nn.ModuleList(layers)
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

    def _attention_only(self, index: int, rows: int, positions: Tensor | None) -> None:
        """Run only the attention of one layer, with the output of the model's rotary class.

        This works for models that need inputs other than tokens.
        """
        part = next(part for part in self.layers[index].modules() if is_attention(part))
        tokens = 2 if positions is None else self.tokens(positions)[0]
        x = torch.zeros(rows, tokens, self.width)
        arguments: dict[str, Any] = {
            "position_ids": torch.arange(tokens).expand(rows, -1)
            if positions is None
            else expand_rows(positions, rows),
            "attention_mask": torch.zeros(rows, 1, tokens, tokens),
        }
        named = sorted(
            self.model.named_modules(), key=lambda each: each[0].count(".")
        )  # the text model's module comes before a tower's
        rotary = [each for _, each in named if is_rotary(each)]
        parameters = inspect.signature(part.forward).parameters
        if rotary and "position_embeddings" in parameters:
            kinds = getattr(self.config, "layer_types", None)
            kind = [kinds[index]] if "layer_type" in inspect.signature(rotary[0].forward).parameters and kinds else []
            arguments["position_embeddings"] = rotary[0](x, arguments["position_ids"], *kind)
        needed = {
            name: None for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        }
        states = {name: x for i, name in enumerate(parameters) if i == 0 or name.endswith("hidden_states")}
        states |= {name: x[:, :0] for name in states if name.startswith("context")}  # the context precedes the tokens
        part(**{**needed, **states, **{name: value for name, value in arguments.items() if name in parameters}})

    def _watch(self, index: int, mode: FirstProduct, indexer: bool) -> list[Any]:
        """Register hooks that switch the mode on inside the layer's attention or indexer. Return their handles."""

        def enter(*_: Any) -> None:
            mode.inside = True

        def leave(*_: Any) -> None:
            mode.inside = False

        handles = []
        for name, part in self.layers[index].named_modules():
            if any(word in type(part).__name__ for word in ("Indexer", "Compressor")):  # they compute their own queries
                before, after = (enter, leave) if indexer else (leave, enter)
                handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
            elif is_attention(part) and not any(word in name for word in ("indexer", "compressor")):
                handles += [] if indexer else [part.register_forward_pre_hook(enter)]
        return handles

    def tokens(self, positions: Tensor) -> tuple[int, Tensor]:
        """Return how many tokens to run for these positions, and which of them to return.

        A model that takes no positions must run all tokens from position 0 on.
        """
        if positions.ndim > 1 or "position_ids" in inspect.signature(self.model.forward).parameters:
            return positions.shape[-1], torch.arange(positions.shape[-1])
        return int(positions.max()) + 1, positions

    def attentions(self, index: int) -> int:
        """Return the number of attentions in a layer."""
        parts = getattr(self.layers[index], "self_attn", None)
        return len(parts) if isinstance(parts, nn.ModuleList) else 1

    @property
    def several_axes(self) -> bool:
        """Whether the rotary class of the layers combines the angles of several positions of a token."""
        parts = [part for name, part in self.model.named_modules() if is_rotary(part) and "visual" not in name]
        return any(hasattr(part, "recomposition_frequencies") for part in parts if "Vision" not in type(part).__name__)

    @property
    def width(self) -> int:
        """The number of channels of the hidden states."""
        names = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
        return next(value for key in names if isinstance(value := getattr(self.config, key, None), int))

    def _arguments(self, rows: int, positions: Tensor | None) -> dict[str, Any]:
        """Return the arguments with which the model is called."""
        parameters = inspect.signature(self.model.forward).parameters
        arguments: dict[str, Any] = {}
        tokens = 2 if positions is None else self.tokens(positions)[0]
        if positions is not None and "position_ids" in parameters:
            arguments["position_ids"] = expand_rows(positions, rows)
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
        """Return every inv_freq buffer of the model's rotary modules."""
        return [
            Frequencies(part, name)
            for part in self.model.modules()
            if is_rotary(part)
            for name, value in part._buffers.items()
            if value is not None and name.endswith("inv_freq") and "original" not in name
        ]


def expand_rows(positions: Tensor, rows: int) -> Tensor:
    """Expand positions, [tokens] or [axes, tokens], to a batch of `rows` equal rows."""
    return positions.unsqueeze(-2).expand(*positions.shape[:-1], rows, -1)


@dataclass(frozen=True)
class Frequencies:
    """An inv_freq buffer of a rotary module. A run of the model may change its numbers."""

    part: nn.Module
    name: str

    @property
    def inv_freq(self) -> Tensor:
        return self.part.get_buffer(self.name)

    @property
    def attention_factor(self) -> float:
        return float(getattr(self.part, self.name.replace("inv_freq", "attention_scaling"), 1.0))
