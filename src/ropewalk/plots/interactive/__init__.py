"""The explorer: one page of HTML on which ropes are drawn over each other and looked at pair by pair."""

from __future__ import annotations

from ropewalk.plots.interactive.page import explorer as explorer
