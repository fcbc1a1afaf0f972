"""Run the `ropewalk` command as `python -m ropewalk`."""

from ropewalk.tools.cli import main

main()
