"""Models that are odd in some way: one family, one file, each a subclass of `Architecture` with its source."""
