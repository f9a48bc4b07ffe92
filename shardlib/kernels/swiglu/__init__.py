"""SwiGLU."""

from shardlib.kernels.swiglu.op import swiglu

__all__ = ["swiglu"]
