"""Running the micro-batches of a step through one stage, or through many by a schedule."""
