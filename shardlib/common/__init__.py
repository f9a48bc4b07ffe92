"""What any room may need: names of dtypes, facts of devices, waiting for the disk, and private parts of torch."""
