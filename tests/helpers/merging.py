"""Limits up to which small units are merged."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from helpers import USERS_MERGED
from shardlib.common.thresholds import Threshold
from shardlib.plan import bucketing

USERS = USERS_MERGED()  # the limit of the library, which tests do not have by default


def merging(most: int) -> AbstractContextManager[object]:
    """A context in which neighbouring units are merged up to so many bytes, 0 for none. The tests' default is 0."""
    return mock.patch.object(bucketing, "MERGED", Threshold(most))
