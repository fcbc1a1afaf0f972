"""Doors into other people's programs: each swaps their rotation for ours, says what it did, and can undo it."""
