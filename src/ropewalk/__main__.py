"""Run the `ropewalk` command as `python -m ropewalk`."""

from ropewalk.programs.cli import main

main()
