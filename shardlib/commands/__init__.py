"""One file per command: its arguments, and what it does."""
