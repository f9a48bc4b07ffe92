"""The search for a plan: all meshes and transforms of a space, on a described machine, without a rank."""

from shardlib.search.space import Choice, Space
from shardlib.search.value import Found, Rejected, Search
from shardlib.search.verb import search_plan

__all__ = ["Choice", "Found", "Rejected", "Search", "Space", "search_plan"]
