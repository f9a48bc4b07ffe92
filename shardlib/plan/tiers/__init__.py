"""What every memory holds at its peak, and whether that fits."""
