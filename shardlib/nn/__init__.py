"""What losses are made of: attention, sequence parts, losses, dropout, blocks."""
