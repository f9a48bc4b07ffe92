"""Two plans that should train alike and do not: which operation is the first to differ."""

from shardlib.debug.bisect import Bisection, bisect
from shardlib.debug.finding import PHASES, Finding

__all__ = ["PHASES", "Bisection", "Finding", "bisect"]
