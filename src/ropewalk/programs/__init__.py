"""What people run: the command line, the demo and the benchmark. They stand on the public names alone."""
