"""Adam's steps with a frozen variance, as the 1-bit optimizers take them."""

from shardlib.kernels.frozen_adam.op import fresh_step_, frozen_move, frozen_step_, local_momentum_, local_step_

__all__ = ["fresh_step_", "frozen_move", "frozen_step_", "local_momentum_", "local_step_"]
