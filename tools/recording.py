"""Run one layer of a model of transformers with chosen projections, and read what its attention is given.

The model is built from its config on the meta device, so that its size does not matter. Every projection is replaced by
one that returns numbers of our choice, every norm by the identity, and every layer but one is skipped. What remains is
the model's own code: which frequencies it takes, which channels it slices, and how it rotates them. The first product
of queries and keys ends the run. Nothing here imports ropewalk.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from recording_configs import config_of, modeling_file, plain
from recording_stubs import CaptureError, Fed, FirstProduct, Looked, Projection, Same
from torch import Tensor, nn

WITHOUT_ATTENTION = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")
LABEL_STEP = 2**17  # channels of one projection stay below; float32 holds the labels of 127 projections exactly


class CannotRecordError(Exception):
    """The model does not fit this way of recording; the text says why."""


def is_rotary(module_or_class: Any) -> bool:
    cls = module_or_class if isinstance(module_or_class, type) else type(module_or_class)
    return "Rotary" in cls.__name__


@contextlib.contextmanager
def _rotary_on_cpu(module: Any) -> Iterator[None]:
    """Build the rotary classes of a file on the CPU, with all else on the meta device: their buffers are wanted."""
    changed = []
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module) and is_rotary(cls) and "__init__" in vars(cls):
            original = cls.__init__

            def build(self: Any, *args: Any, __original: Any = original, **kwargs: Any) -> None:
                with torch.device("cpu"):
                    __original(self, *args, **kwargs)

            changed.append((cls, original))
            cls.__init__ = build
    tables = {name: value for name, value in vars(module).items() if name == "create_sinusoidal_positions"}
    for name, table in tables.items():

        def fill(*args: Any, __table: Any = table, **kwargs: Any) -> Any:
            with torch.device("cpu"):
                return __table(*args, **kwargs)

        setattr(module, name, fill)
    try:
        yield
    finally:
        for name, table in tables.items():
            setattr(module, name, table)
        for cls, original in changed:
            cls.__init__ = original


def model_classes(config: Any) -> list[type]:
    """The classes of a file that are built from this config alone and may hold its layers: the bare models first."""
    found = []
    module = modeling_file(config)
    for cls in vars(module).values():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__):
            continue
        taken = list(inspect.signature(cls.__init__).parameters.values())[1:]
        needed = [p.name for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        annotation = str(taken[0].annotation) if taken else ""
        built = getattr(cls, "config_class", None) is type(config) or type(config).__name__ in annotation
        if built and needed == ["config"] and not cls.__name__.endswith(("PreTrainedModel", "RotaryEmbedding")):
            given = inspect.signature(cls.forward).parameters
            rank = ("inputs_embeds" not in given, "hidden_states" not in given, "For" in cls.__name__)
            found.append((rank, len(cls.__name__), cls))
    return [cls for *_, cls in sorted(found, key=lambda each: each[:2])]


class Recorder:
    """A model built without numbers, of which single layers can be run."""

    def __init__(self, config: Any, cls: type) -> None:
        self.config = config
        config._attn_implementation = "eager"
        with torch.device("meta"), _rotary_on_cpu(modeling_file(config)):
            self.model: Any = cls(config).eval()
        self.path, self.layers = self._layers(self.model)
        self.fed = Fed()
        self._replace()

    def _layers(self, model: nn.Module) -> tuple[str, nn.ModuleList]:
        lists = [
            (name, part)
            for name, part in model.named_modules()
            if isinstance(part, nn.ModuleList) and any("Attention" in type(m).__name__ for m in part.modules())
            if "vision" not in name
        ]
        if not lists:
            raise CannotRecordError("no list of layers with attention")
        lists.sort(key=lambda each: (each[0].count("."), each[0] != "layers"))
        return lists[0]

    def _replace(self) -> None:
        """Projections, norms and tables by ours; what is left on the meta device and small, by zeros."""
        number = 0
        for parent in list(self.model.modules()):
            if is_rotary(parent):
                continue
            for name, child in list(parent.named_children()):
                kind = type(child).__name__
                channels = getattr(child, "out_features", None) or getattr(child, "nf", None)
                if isinstance(child, nn.Linear) or ("Linear" in kind and channels):
                    parent._modules[name] = Projection(0, channels, self.fed)
                elif "Norm" in kind or ("Mamba" in kind and "Layer" not in kind):  # a mixer beside attention is slow
                    parent._modules[name] = Same(child)
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
                    if value is not None and value.is_meta and value.numel() < 2**22:
                        empty = torch.zeros(value.shape, dtype=value.dtype)
                        store[name] = nn.Parameter(empty, requires_grad=False) if store is part._parameters else empty

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
        return any("Attention" in type(part).__name__ for part in self.layers[index].modules())

    def query(self, index: int, rows: int, row: Callable[[int, int], Tensor]) -> Tensor:
        """The query of the first head, [rows, 2 tokens, head_dim], at positions 0 and 1."""
        self.fed.rows, self.fed.row = rows, row
        width = next(
            value
            for key in ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
            if isinstance(value := getattr(self.config, key, None), int)
        )
        mode = FirstProduct()

        def enter(*_: Any) -> None:
            mode.inside = True

        def leave(*_: Any) -> None:
            mode.inside = False

        handles = []
        for name, part in self.layers[index].named_modules():
            if any(word in type(part).__name__ for word in ("Indexer", "Compressor")):  # they have queries of their own
                handles += [part.register_forward_pre_hook(leave), part.register_forward_hook(enter)]
            elif "Attention" in type(part).__name__ and not any(word in name for word in ("indexer", "compressor")):
                handles.append(part.register_forward_pre_hook(enter))
        owner = self.model.get_submodule(self.path.rpartition(".")[0])
        attribute = self.path.rpartition(".")[2]
        kept = [part if i == index else Same(part) for i, part in enumerate(self.layers)]
        owner._modules[attribute] = nn.ModuleList(kept)
        arguments = {"inputs_embeds": torch.zeros(rows, 2, width)}
        parameters = inspect.signature(self.model.forward).parameters
        if "inputs_embeds" not in parameters:
            arguments = {"hidden_states": torch.zeros(rows, 2, width)} if "hidden_states" in parameters else {
                "input_ids": torch.zeros(rows, 2, dtype=torch.long)
            }  # fmt: skip
        if "use_cache" in parameters:
            arguments["use_cache"] = False
        try:
            with torch.no_grad(), mode:
                self.model(**arguments)
        except CaptureError as captured:
            query = captured.args[0]
        except Exception as error:
            raise CannotRecordError(f"{type(error).__name__}: {str(error)[:160]}") from error
        else:
            raise CannotRecordError("the layer multiplied no queries with keys")
        finally:
            for handle in handles:
                handle.remove()
            owner._modules[attribute] = self.layers
        return first_head(query, rows)

    def frequencies(self) -> list[tuple[Tensor, float]]:
        """Every inv_freq of the model's rotary modules, with its attention factor."""
        found = []
        for part in self.model.modules():
            if not is_rotary(part):
                continue
            for name, value in part._buffers.items():
                if value is not None and name.endswith("inv_freq") and "original" not in name:
                    factor = getattr(part, name.replace("inv_freq", "attention_scaling"), 1.0)
                    found.append((value, factor))
        return found


def first_head(query: Tensor, rows: int) -> Tensor:
    """[rows, heads, 2, D] or [rows·heads, 2, D] to [rows, 2, D]."""
    if query.dim() == 5:
        query = query.flatten(1, 2)
    if query.dim() == 3:
        query = query.view(rows, -1, *query.shape[1:])
    if query.shape[-2] != 2 and query.shape[1] == 2:
        query = query.transpose(1, 2)
    if query.dim() != 4 or query.shape[0] != rows or query.shape[2] != 2:
        raise CannotRecordError(f"a query of shape {tuple(query.shape)} is not read")
    return query[:, 0]


@dataclass
class Pairs:
    """Which channels a layer rotates, one-hot inputs at position 1."""

    pairs: list[tuple[int, int]]
    angles: list[float]
    scale: float
    """Length of a rotated one-hot input: the attention factor, times any scale of the query."""

    @property
    def distances(self) -> set[int]:
        return {b - a for a, b in self.pairs}


def measure(recorder: Recorder, index: int) -> Pairs | None:
    """The pairs of input channels that one layer rotates and their angle at position 1; None if it rotates nothing."""

    def labels(number: int, channels: int) -> Tensor:
        named = torch.arange(channels, dtype=torch.float32) + number * LABEL_STEP
        return torch.stack((torch.ones(channels), named))

    seen = recorder.query(index, 2, labels)
    ones, named = seen[0, 0].double(), seen[1, 0].double()
    if (ones == 0).any():
        raise CannotRecordError("a channel of the query comes from no projection")
    source = (named / ones).round().long()
    channels = sorted(source.tolist())
    if len(set(channels)) != len(channels):
        raise CannotRecordError("two channels of the query come from one of a projection")
    place = {label: i for i, label in enumerate(channels)}

    def one_hot(number: int, width: int) -> Tensor:
        rows = torch.zeros(len(channels), width)
        for i, label in enumerate(channels):
            if label // LABEL_STEP == number:
                rows[i, label % LABEL_STEP] = 1
        return rows

    moved = recorder.query(index, len(channels), one_hot)  # [input, token, output]
    order = torch.tensor([place[label] for label in source.tolist()])
    matrix = torch.zeros(len(channels), len(channels), dtype=torch.float64)
    matrix[:, order] = moved[:, 1].double()  # outputs back to the order of the inputs
    rest = torch.zeros_like(matrix)
    rest[:, order] = moved[:, 0].double()
    off = (matrix - torch.diag(matrix.diag())).abs() > 1e-12
    pairs, angles = [], []
    for a in range(len(channels)):
        partners = off[a].nonzero().flatten().tolist()
        if len(partners) > 1:
            raise CannotRecordError("a channel is mixed with more than one other: no rotation")
        if partners and partners[0] > a:
            pairs.append((a, partners[0]))
            angles.append(float(torch.atan2(matrix[a, partners[0]], matrix[a, a])))
    return Pairs(pairs, angles, float(matrix[pairs[0][0]].norm())) if pairs else None


def record_layer(recorder: Recorder, index: int) -> dict[str, Any] | None:
    """A layer as class_defaults.json has it."""
    measured = measure(recorder, index)
    if measured is None:
        return None
    angles = torch.tensor(measured.angles, dtype=torch.float64)
    for buffer, factor in sorted(recorder.frequencies(), key=lambda each: abs(each[1] - measured.scale)):
        inv_freq, scaling = buffer, factor
        turning = inv_freq[inv_freq != 0].double()
        if len(turning) != len(angles):
            continue
        if torch.allclose(turning, angles, rtol=1e-4):
            break
        if torch.allclose(turning.sort().values, angles.sort().values, rtol=1e-4):
            # The model gives its frequencies to pairs in an order of its own.
            inv_freq = inv_freq.sort().values[angles.argsort().argsort()]
            break
    else:
        raise CannotRecordError("no inv_freq of a rotary module gives the measured angles")
    rotary_dim = 2 * len(inv_freq)
    if measured.distances == {1}:
        pairing = "interleaved"
    elif measured.distances == {rotary_dim // 2}:
        pairing = "half"
    else:
        raise CannotRecordError(f"pairs at distances {sorted(measured.distances)} have no name")
    return {
        "inv_freq": [float(f) for f in inv_freq],
        "attention_factor": float(scaling),
        "pairing": pairing,
        "rotary_dim": rotary_dim,
        "rotary_offset": min(a for a, _ in measured.pairs),
    }


def record(model_type: str, config: Any = None) -> dict[str, Any]:
    """A row of class_defaults.json.

    Raises:
        CannotRecordError: the model does not fit; the message says why.
        KeyError: the installed transformers does not have the model_type.
    """
    config = config_of(model_type) if config is None else config
    try:
        written, classes = plain(config), model_classes(config)
    except Exception as error:
        raise CannotRecordError(f"{type(error).__name__}: {str(error)[:160]}") from error
    reasons = []
    for cls in classes:
        try:
            layers, kinds = _record_layers(Recorder(copy.deepcopy(config), cls))
        except Exception as error:
            name = "" if isinstance(error, CannotRecordError) else f"{type(error).__name__}: "
            reasons.append(f"{cls.__name__}: {name}{' '.join(str(error).split())[:120]}")
            continue
        return {"model_type": model_type, "config": written, "layers": layers, "layer_kinds": kinds}
    raise CannotRecordError(reasons[0] if reasons else "no class of its file is built from this config alone")


def _record_layers(recorder: Recorder) -> tuple[dict[str, Any], list[int | None]]:
    by_signature: dict[str, int] = {}
    layers: dict[int, dict[str, Any] | None] = {}
    kinds: list[int | None] = []
    for index in range(len(recorder.layers)):
        if not recorder.has_attention(index):
            kinds.append(None)
            continue
        signature = recorder.signature(index)
        if signature not in by_signature:
            row = record_layer(recorder, index)
            by_signature[signature] = next((i for i, known in layers.items() if known == row), index)
            layers.setdefault(by_signature[signature], row)
        kinds.append(by_signature[signature])
    return {str(index): row for index, row in layers.items()}, kinds
