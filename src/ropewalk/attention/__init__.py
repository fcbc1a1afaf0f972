"""Attention around the rotation: masks, the kernels of PyTorch, a KV cache and Self-Extend."""
