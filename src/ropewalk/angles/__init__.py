"""The exact angles of positions: phases as integers, their cos and sin in PyTorch and in NumPy."""
