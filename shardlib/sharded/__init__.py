"""Sharded pytrees: made, gathered back, and moved between layouts."""
