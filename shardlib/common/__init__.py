"""What any room may need: dtypes, devices, the disk, decisions made once, optional packages, private parts of torch."""
