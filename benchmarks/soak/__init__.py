"""A training under `shardlib run` whose ranks are killed all along: ``python -m benchmarks soak --seconds 3600``."""
