"""One file per peer, each at the best setting we found for it."""
