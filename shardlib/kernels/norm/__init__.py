"""LayerNorm and RMSNorm, alone or of a sum."""

from shardlib.kernels.norm.op import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
