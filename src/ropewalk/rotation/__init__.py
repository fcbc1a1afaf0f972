"""Rotate q and k by given cos and sin. This package is independent of schemes, packing and models."""
