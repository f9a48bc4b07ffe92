"""Running a loss function on sharded parameters: handles, lifetimes, and the reduction of gradients."""

from shardlib.execute.executor import Executor

__all__ = ["Executor"]
