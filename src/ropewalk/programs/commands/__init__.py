"""The commands of the command line: one file each. Whatever needs torch is imported inside its command."""
