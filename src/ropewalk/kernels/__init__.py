"""The compiled kernels for CPU and GPU, and the choice between them and plain PyTorch."""
