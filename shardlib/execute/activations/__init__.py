"""What checkpointed blocks are recomputed from, and where it is kept between forward and backward."""
