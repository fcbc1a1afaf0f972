"""`python -m ropewalk` is `ropewalk`."""

from ropewalk.programs.cli import main

main()
