"""Two plans that should train alike and do not: which operation is the first to differ. And the laws of one plan."""

from shardlib.debug.bisect import Bisection, bisect
from shardlib.debug.check import Check, Law, check
from shardlib.debug.finding import PHASES, Difference, Finding

__all__ = ["PHASES", "Bisection", "Check", "Difference", "Finding", "Law", "bisect", "check"]
