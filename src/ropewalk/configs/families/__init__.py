"""Models that need other code than `Architecture`. Each file has a subclass that overrides some of its methods."""
