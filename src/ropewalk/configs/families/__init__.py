"""Families of models with exceptions: one file each, with a subclass of `Architecture` and its source."""
