"""Profiles of train steps: clocks, counted operators, exchanges, memory by name, late ranks."""

from shardlib.report.profile.comm import Comm, comm
from shardlib.report.profile.memory import Memory, measure_peak, memory
from shardlib.report.profile.stragglers import Stragglers, stragglers
from shardlib.report.profile.value import Profile
from shardlib.report.profile.verb import profile

__all__ = ["Comm", "Memory", "Profile", "Stragglers", "comm", "measure_peak", "memory", "profile", "stragglers"]
