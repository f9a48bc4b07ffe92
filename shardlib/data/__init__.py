"""Text as bytes, and batches that depend only on a seed and a step."""
