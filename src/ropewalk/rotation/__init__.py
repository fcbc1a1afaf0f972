"""Rotate q and k by given cos and sin. This package knows nothing of schemes, sequence lengths, packing or models."""
