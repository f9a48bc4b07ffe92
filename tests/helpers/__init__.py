"""Helpers of the tests: small models, comparison of trees, measurement from outside, real processes."""

from shardlib.common.thresholds import Threshold
from shardlib.plan import bucketing

# Tests have small models, of whose many units they tell: none are merged unless a test says so (see `helpers.merging`).
USERS_MERGED, bucketing.MERGED = bucketing.MERGED, Threshold(0)
