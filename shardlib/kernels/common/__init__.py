"""What the operations share, and what an operation of a user's own needs.

- `differentiable`: a function with a forward and a backward kernel, right under every way to ask for its gradient, at every
  ZeRO stage (an `autograd.Function` in a loss is neither: parameters arrive there as handles).
- `opaque`: the same without gradients: one operator, which `torch.compile` does not look into.
- `counted`: how many floating-point operations they do, for profiles and plans.
- `check_tensors`: refuses arguments that are no dense tensors of a supported dtype on one device.

Name operators in a namespace of your own, ``"mylib::swish"``: a name without ``::`` is one of shardlib's.
"""

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.flops import counted
from shardlib.kernels.common.operators import differentiable, opaque

__all__ = ["check_tensors", "counted", "differentiable", "opaque"]
