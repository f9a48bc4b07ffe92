"""LayerNorm and RMSNorm, alone or of a sum."""

from shardlib.kernels.norm.op import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
