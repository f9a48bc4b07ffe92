"""A step as one graph: traced on fake tensors, changed by passes, each of which is one file, and run as it then is."""
