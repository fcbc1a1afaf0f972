"""Compiled code, and which of it may be used."""
