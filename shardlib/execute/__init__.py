"""Running functions on sharded parameters: handles, lifetimes of gathered parameters, and the reduction of gradients."""

from shardlib.execute.executor import Executor

__all__ = ["Executor"]
