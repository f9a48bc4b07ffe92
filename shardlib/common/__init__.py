"""What any room may need: names of dtypes, facts of devices, and waiting for the disk."""
