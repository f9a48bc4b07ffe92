"""Helpers of the tests: small models, comparison of trees, measurement from outside, real processes."""

from shardlib.common.thresholds import Threshold
from shardlib.plan import units

# Tests have small models, of whose many units they tell: none are merged unless a test says so (see `helpers.merging`).
USERS_MERGED, units.MERGED = units.MERGED, Threshold(0)
