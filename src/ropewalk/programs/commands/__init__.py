"""The commands of the command line, one file each. A command imports torch only when it runs, if it needs torch."""
