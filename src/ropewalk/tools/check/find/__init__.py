"""The first stage: load the target, and find out how to call it."""
