"""`python -m ropewalk` is `ropewalk`."""

from ropewalk.cli import main

main()
