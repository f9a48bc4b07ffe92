"""The command line: one file per command, with its arguments and its ``run``."""
