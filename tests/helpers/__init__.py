"""What several tests share: small models, comparison of trees, measurement from outside, real processes."""
