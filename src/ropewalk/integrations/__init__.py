"""Doors into other people's programs. Those that swap their rotation for ours say what they did, and can undo it."""
