"""One folder per operation: its function, a reference in plain torch, and one file per compiled implementation."""
