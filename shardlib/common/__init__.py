"""What any room may need: dtypes, devices, the disk, optional packages, private parts of torch."""
