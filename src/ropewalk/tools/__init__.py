"""Programs: the command line, the demo and the benchmark. Besides public names, they use only `_checks` for errors."""
