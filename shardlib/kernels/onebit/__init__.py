"""1-bit compression of flat buffers with error feedback."""

from shardlib.kernels.onebit.op import average, average_compress, compress, decompress
from shardlib.kernels.onebit.segments import Segments

__all__ = ["Segments", "average", "average_compress", "compress", "decompress"]
