"""The commands of the command line, one file each. Commands that need torch import it only when they run."""
