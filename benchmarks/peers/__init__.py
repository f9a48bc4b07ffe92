"""What is compared: shardlib's own settings, and one file per peer, each at the best setting we found for it."""
