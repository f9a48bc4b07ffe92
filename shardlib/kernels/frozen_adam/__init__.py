"""Adam's steps with a variance that no longer changes, as the 1-bit optimizers take them."""

from shardlib.kernels.frozen_adam.op import fresh_step_, frozen_move, frozen_step_, local_step_, own_momentum_

__all__ = ["fresh_step_", "frozen_move", "frozen_step_", "local_step_", "own_momentum_"]
