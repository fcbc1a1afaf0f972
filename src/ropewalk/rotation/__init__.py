"""Rotate q and k by given cos and sin. This package depends on no scheme, length, packing or model."""
