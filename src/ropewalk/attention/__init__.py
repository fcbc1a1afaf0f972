"""Attention over rotated queries and keys: masks, PyTorch's kernels, KV caches and Self-Extend."""
