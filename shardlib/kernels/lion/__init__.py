"""Lion on flat tensors."""

from shardlib.kernels.lion.arguments import Old, factors_at
from shardlib.kernels.lion.op import lion_
from shardlib.kernels.lion.reference import changes

__all__ = ["Old", "changes", "factors_at", "lion_"]
