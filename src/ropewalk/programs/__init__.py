"""Programs: the command line, the demo and the benchmark. They use only public names of ropewalk."""
