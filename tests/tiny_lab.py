"""Tasks of the lab that train and measure in a second, for tests."""

from __future__ import annotations

import dataclasses

from ropewalk.tools.lab import tasks
from ropewalk.tools.lab.model import Size
from ropewalk.tools.lab.train import Recipe

_RECIPE = Recipe(steps=4, learning_rate=1e-3, warmup=2)
_TUNE = Recipe(steps=2, learning_rate=1e-3, warmup=1)

COPY = dataclasses.replace(
    tasks.COPY,
    size=Size(vocab_size=65, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2),
    trained=16,
    lengths=(3, 7, 15, 31, 63),
    recipe=_RECIPE,
    sequences=2,
    tune_recipe=_TUNE,
    tune_sequences=2,
    test_sequences=3,
    shortest=2,
)

TEXT = dataclasses.replace(
    tasks.TEXT,
    size=Size(vocab_size=256, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, tied=True),
    trained=32,
    lengths=(16, 32, 64, 128, 256),
    recipe=_RECIPE,
    sequences=2,
    tune_recipe=_TUNE,
    tune_sequences=2,
    test_sequences=3,
)
