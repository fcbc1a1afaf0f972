"""Models that need other code than `Architecture`. Each file has subclasses that override methods of `Architecture`."""
