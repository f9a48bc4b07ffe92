"""One folder per operation: its function, a reference in plain torch, and one file per compiled implementation.

Functions take ``using``, the name of one implementation ("cpu", "cuda", "triton" or "reference"), for tests.
"""

from shardlib.kernels import common

__all__ = ["common"]
