"""Text as bytes, and batches that depend on nothing but a seed and a step."""
