"""One folder per operation: a plain reference, implementations, and the dispatch that chooses among them."""
