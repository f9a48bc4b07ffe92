"""What any room may need: names of dtypes, and waiting for the disk."""
