"""The rules of torchtune, whose model builders have the numbers of their ropes in code."""

from __future__ import annotations

from ropewalk.engines._engine import Engine, Rounding, Rule

_FILE = "modules/position_embeddings.py"

TORCHTUNE = Engine(
    name="torchtune",
    version="0.6.1",
    rounding=Rounding(
        table="float32",
        rotation="float32",
        notes="Converters permute q and k of all models but Phi 3 and Qwen 2 to neighbouring channels.",
        source=_FILE,
        evidence="run",
    ),
    rules={"default": Rule(_FILE), "llama3": Rule("models/llama3_1/_position_embeddings.py")},
    files="torchtune",
    built_in=True,
    unknown="it has no such scaling",
    models={"qwen2": Rounding(source="models/qwen2/_positional_embeddings.py", evidence="run")},
)
