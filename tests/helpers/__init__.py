"""Helpers of the tests: small models, comparison of trees, measurement from outside, real processes."""
