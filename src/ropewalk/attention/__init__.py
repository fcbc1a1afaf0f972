"""What attends, without state: attention over rotated queries and keys, masks, Self-Extend, a kernel for few tokens."""
