"""Rotate q and k by given cos and sin. Schemes, lengths, packing and models are unknown here."""
