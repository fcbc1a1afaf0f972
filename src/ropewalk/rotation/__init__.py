"""Turn: q and k by cos and sin. It knows nothing of schemes, lengths, packing or models."""
