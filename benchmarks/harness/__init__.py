"""How benchmarks are run, timed and written."""
