"""What attends, without state: attention over rotated queries and keys, masks, Self-Extend, and a kernel for few tokens."""
