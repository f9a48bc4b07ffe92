"""How far roundings move a result: each adds half a unit in the last place of what is rounded, and what was off before it
goes through the magnitudes of what follows. A sum whose terms cancel is as far off as its terms are.
"""

from typing import NamedTuple

import torch

# The roundings of one term in fp32 (in float64, if that is the dtype) and those of the sum that it goes into, which come
# with either sign: together under eight.
_IN_A_SUM = 8


class Rounding(NamedTuple):
    """To a kernel's dtype, and within its sums.

    Attributes:
        unit: of what is stored, relative.
        least: below which that is absolute.
        summed: of what is summed, relative.
        flushed: below which a power may be 0.
    """

    unit: float
    least: float
    summed: float
    flushed: float

    def stored(self, x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """Off ``x`` once rounded, of what was off by ``error``."""
        return error + self.unit * (x.abs() + error + self.least)


def rounding(dtype: torch.dtype) -> Rounding:
    """The rounding of a kernel whose inputs have ``dtype``."""
    kept, wide = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    return Rounding(kept.eps / 2, kept.smallest_normal, _IN_A_SUM * wide.eps / 2, wide.smallest_normal)
