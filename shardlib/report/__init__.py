"""What a run shows: a live progress line, a loss plot, and the byte models to be measured against."""
