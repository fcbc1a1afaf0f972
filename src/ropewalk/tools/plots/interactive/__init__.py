"""The explorer: an interactive HTML page that compares ropes and shows every pair."""

from __future__ import annotations

from ropewalk.tools.plots.interactive.page import explorer as explorer
