"""What is learned: a byte-level GPT trained by methods that differ, and the loss that each ends at."""
