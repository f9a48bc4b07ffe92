"""Limits up to which small units are merged."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from shardlib.common.thresholds import Threshold
from shardlib.plan import units


def merging(most: int) -> AbstractContextManager[object]:
    """A context in which neighbouring units are merged up to so many bytes, 0 for none. The tests' default is 0."""
    return mock.patch.object(units, "MERGED", Threshold(most))
