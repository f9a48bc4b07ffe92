"""Profiles of train steps: clocks, counted operators, exchanges, memory by name, late ranks."""

from shardlib.report.profile.comm import Comm, Stragglers, comm, stragglers
from shardlib.report.profile.memory import Memory, memory
from shardlib.report.profile.value import Profile, profile

__all__ = ["Comm", "Memory", "Profile", "Stragglers", "comm", "memory", "profile", "stragglers"]
