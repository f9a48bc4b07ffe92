"""Measurements against peers: ``python -m benchmarks`` lists them."""
