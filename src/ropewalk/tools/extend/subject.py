"""A loaded model, and what `measure` has it do: copy a passage from afar, and read a short text."""

from __future__ import annotations

import hashlib
import inspect
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk._checks import error, error_from, missing_package
from ropewalk.integrations.transformers import accelerate, restore
from ropewalk.tools.diff.lengths import stated_length
from ropewalk.tools.extend.plan import method_of, scaled, scheme_of

WHO = "ropewalk extend --measure"
PASSAGE = 128
"""The tokens of a passage that is copied."""
METHODS = ("llama3", "yarn", "linear", "ntk")
SELF_EXTEND = "self_extend"
"""The method that no engine has. Its factor is the size of a group."""

_NUMBERS = 2**25  # the most logits or scores of a chunk: 128 MiB in float32


class Subject:
    """A model of transformers, and the language reference that every Python contains, in its tokens.

    Args:
        source: a folder, a file of weights (GGUF), a config.json beside the weights, or a hub id in the cache.
        dtype: "float32", "bfloat16" or "float16".
        device: as in `torch.device`, or "auto" for a model on several GPUs.

    Attributes:
        ropes: the ropes of the text model.
        stated: the longest length that its config states, in tokens.
        factor: the factor of the config's own scheme; 1.0 if it has none.
        methods: the methods that can be measured: all, or that of the config.
        tokens: the text, from which passages are taken.
        layer, kind: the first layer that rotates and sees the whole text, and its kind, None if all are of one kind.

    Raises:
        RopeError: the model cannot be loaded; or has no rope that could be scaled, or none whose layers see farther
            than a window.
    """

    def __init__(self, source: str | Path, *, dtype: str, device: str) -> None:
        self.network, self._tokenizer = _load(source, getattr(torch, dtype), device)
        config = self.network.config.get_text_config()
        self.ropes = ropewalk.from_config(config)
        if (stated := stated_length(self.ropes)) is None:
            raise error(WHO, "the config must state a length in tokens", "none", "Add max_position_embeddings.")
        self.stated = stated
        own = scheme_of(self.ropes)
        if own is not None and method_of(own) not in METHODS:
            must, fix = "the scheme of the config must be one that another factor extends", "Choose another model."
            raise error(WHO, must, own.rope_type, fix)
        self.factor: float = getattr(own, "factor", 1.0)
        self.methods: tuple[str, ...] = METHODS if own is None else (method_of(own),)
        windows = [window if window and window <= stated else None for window in self.ropes.windows]
        self._local = [i for i, window in enumerate(windows) if window]  # layers that do not see the whole text
        far = [i for i, rope in enumerate(self.ropes.layers) if rope is not None and i not in self._local]
        if not far:
            must, fix = "a layer that rotates must see the whole text", "No scheme makes this model see farther."
            raise error(WHO, must, "only layers with windows", fix)
        several = len(set(self.ropes.layer_kinds)) > 1
        self.layer, self.kind = far[0], self.ropes.layer_kinds[far[0]] if several else None
        kinds = getattr(config, "layer_types", None) or ()
        if self._local and len(kinds) != len(windows):
            raise error(WHO, "the config must have layer_types", "windows without them", "This model is not supported.")
        self._windows = dict(zip(kinds, windows, strict=True)) if self._local else {}
        self._start = self.encode("x", add_special_tokens=True)[: -len(self.encode("x"))]
        self.tokens = self.encode("\n\n".join(topics[name] for name in sorted(topics)))
        self.digest = hashlib.sha256(repr(self.tokens).encode()).hexdigest()
        self._words = sorted(set(self.tokens))
        self._each = 1 if self._windows else 2  # passages of each kind for a seed; a window of text triples their cost
        self._rotates: tuple[Any, ...] | None = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def _rotate(self, method: str = "none", factor: float = 1.0, window: int = 0) -> None:
        """Rotate in this way from now on; as the config says if the method is "none".

        Args:
            method: one of `METHODS`, `SELF_EXTEND` or "none".
            factor: its factor, or the size of a group.
            window: the distance that Self-Extend leaves alone.
        """
        if self._rotates == (method, factor, window):
            return
        if self._rotates is not None:
            restore(self.network)
            self._rotates = None

        def changed(rope: ropewalk.Rope) -> Any:
            if method == SELF_EXTEND:
                return ropewalk.SelfExtend(rope, int(factor), window)
            return scaled(rope, method, factor, self.stated)

        layers: list[Any] = [
            rope if rope is None or method == "none" or i in self._local else changed(rope)
            for i, rope in enumerate(self.ropes.layers)
        ]
        if len({rope for rope in self.ropes.layers if rope is not None}) == 1:  # one module may serve all layers
            layers = [None if rope is None else layers[self.layer] for rope in layers]
        kinds = {kind: rope for kind, rope in zip(self.ropes.layer_kinds, layers, strict=False) if rope is not None}
        accelerate(self.network, rope=kinds or next(filter(None, layers)))
        self._rotates = method, factor, window

    def _rows(self, seed: int) -> tuple[list[list[int]], list[int]]:
        """Return passages, the random ones first, and a part of the text that fills windows.

        A random passage has tokens of the text, so that all of them are common.
        """
        draw = random.Random(seed)
        rows = [[draw.choice(self._words) for _ in range(PASSAGE)] for _ in range(self._each)]
        starts = [draw.randrange(len(self.tokens) - PASSAGE) for _ in range(self._each)]
        rows += [self.tokens[start : start + PASSAGE] for start in starts]
        window = max((window for window in self._windows.values() if window), default=0)
        start = draw.randrange(max(1, len(self.tokens) - window))
        return rows, self.tokens[start : start + window]

    @torch.inference_mode()
    def copy(self, distance: int, seed: int, *way: Any, seen: bool = True) -> list[float]:
        """Return the shares of the tokens of a random and of a real passage that the model copies across a hole.

        The passage is at the first positions, and again `distance` tokens later. There are no tokens between, except
        that a model with windows has a window of text before the second passage. No layer with a window sees across.

        Args:
            distance: the distance of the passages in tokens, at least `PASSAGE`.
            seed: the choice of the passages.
            way: the arguments of `_rotate`.
            seen: whether the first passage is the same. If not, the shares are those that the model guesses.
        """
        self._rotate(*way)
        rows, between = self._rows(seed)
        first = rows if seen else self._rows(-1 - seed)[0]
        between = between[: distance - PASSAGE]
        tokens = torch.tensor([[*self._start, *a, *between, *b] for a, b in zip(first, rows, strict=True)])
        far = len(self._start) + distance - len(between)
        positions = torch.cat(
            [torch.arange(len(self._start) + PASSAGE), torch.arange(far, far + len(between) + PASSAGE)]
        )
        device = self.network.device
        out = self.network(
            input_ids=tokens.to(device),
            position_ids=positions.expand(len(rows), -1).to(device),
            attention_mask=self._mask(positions, len(rows)),
            logits_to_keep=PASSAGE,
            use_cache=False,
        )
        right = out.logits[:, -PASSAGE:-1].argmax(-1).cpu() == torch.tensor(rows)[:, 1:]
        return [float(part.float().mean()) for part in right.split(self._each)]

    def _mask(self, positions: Tensor, rows: int) -> Any:
        """Return a mask in which windows count positions. transformers counts tokens, and so would skip the hole."""
        device, dtype = self.network.device, self.network.dtype
        if not self._windows:  # without any mask, transformers would take the hole for the end of a text
            return torch.ones(rows, len(positions), dtype=torch.long, device=device)
        distance = positions[:, None] - positions
        return {
            kind: torch.where(
                (distance >= 0) & (distance < (window or len(positions) + positions[-1])), 0.0, torch.finfo(dtype).min
            )
            .to(device, dtype)
            .expand(rows, 1, -1, -1)
            for kind, window in self._windows.items()
        }

    def loss(self, length: int, seed: int, *way: Any) -> float:
        """Return the mean loss of a part of the text, in nats per token."""
        start = random.Random(seed).randrange(max(1, len(self.tokens) - length))
        return float(self.read(self.tokens[start : start + length], *way).mean())

    @torch.inference_mode()
    def read(self, tokens: list[int], *way: Any) -> Tensor:
        """Return the loss of each token of a text but the first, in nats, read in chunks through a cache."""
        from transformers import DynamicCache

        self._rotate(*way)
        text, device = torch.tensor([*self._start, *tokens]), self.network.device
        config = self.network.config.get_text_config()
        scores = config.num_attention_heads * len(text) if SELF_EXTEND in way else 0  # which it keeps
        width = max(64, min(1024, _NUMBERS // max(config.vocab_size, scores)))
        name = "cache" if "cache" in inspect.signature(self.network.forward).parameters else "past_key_values"
        cache = {name: DynamicCache(config=config), "use_cache": True}
        losses: list[Tensor] = []
        for chunk in torch.split(text, width):
            out = self.network(input_ids=chunk[None].to(device), **cache)
            at = sum(len(part) for part in losses)
            targets, logits = text[at + 1 : at + 1 + len(chunk)], out.logits[0].float().cpu()
            logits = logits[: len(targets)]
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        return torch.cat(losses)[max(0, len(self._start) - 1) :]


def _load(source: str | Path, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Return the model and its tokenizer. The blocks of a GGUF file become plain weights."""
    try:
        import transformers
    except ImportError as e:
        raise missing_package(WHO, "transformers", "extend") from e
    path = Path(source)
    options: dict[str, Any] = {"local_files_only": True}
    where = path.parent if path.is_file() else path if path.is_dir() else source
    for_model: dict[str, Any] = {"dtype": dtype, **({"device_map": "auto"} if device == "auto" else {})}
    if path.suffix == ".gguf":
        options["gguf_file"] = path.name
        if hasattr(transformers, "GgufConfig"):
            for_model["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        network: Any = transformers.AutoModelForCausalLM.from_pretrained(where, **for_model, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        return (network if device == "auto" else network.to(device)).eval(), tokenizer
    except Exception as e:  # transformers and the libraries under it raise anything
        fix = "Pass a folder with weights and tokenizer, a GGUF file, or a model in the cache of the hub."
        raise error_from(f"{WHO}: {source} cannot be loaded", e, fix) from e
