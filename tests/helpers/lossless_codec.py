"""A codec that loses nothing: training with it must equal training without one."""

from dataclasses import dataclass

import torch

from shardlib.collectives.codecs.two_phase import BoundTwoPhase, TwoPhase
from shardlib.plan.claims import Reduce
from shardlib.plan.transform import Transform


@dataclass(frozen=True)
class Exact(TwoPhase):
    """Values as their own bytes, for sums and for gathers."""

    feedback: bool = True
    itemsize: int = 4
    wide = True

    def bind(self, rows):
        return ExactWire(rows, self.feedback)

    def size(self, elements):
        return elements * self.itemsize

    def pack(self, x):
        return x.view(torch.uint8)

    def unpack(self, message, out):
        out.copy_(message.clone().view(out.dtype))  # the rows of no elements begin at a byte each


class ExactWire(BoundTwoPhase):
    """Rows padded to a multiple of 3; errors are zero, and there are no scales."""

    def __init__(self, rows, feedback):
        super().__init__(rows, feedback, 3, (0, torch.uint8), rows.row(3) * rows.dtype.itemsize)

    def _encode(self, residual, x):
        assert not residual.any()
        sent = x.view(self.rows.ways, -1).clone().view(torch.uint8)
        x.zero_()
        return sent[:, :0], sent

    def _sum(self, scales, values):
        total = self._values(values).sum(0)
        return total / self.rows.ways if self.rows.mean else total

    def _sum_encode(self, scales, values, residual):
        assert not residual.any()
        return values[0, :0], self._sum(scales, values).view(torch.uint8)

    def _decode(self, scales, values, out):
        assert out is None
        return self._values(values).reshape(-1)

    def _values(self, values):
        return values.reshape(-1).clone().view(self.rows.dtype).view(len(values), self.row)


@dataclass(frozen=True)
class Travelling(Transform):
    """A transform: gradients, and parameters where they are split over the axis, travel by `Exact`."""

    axis: str
    weights: bool = False
    itemsize: int = 4

    @property
    def name(self):
        return f"travelling({self.axis!r})"

    def claims(self, sizes, leaves):
        codec = Exact(itemsize=self.itemsize)
        yield Reduce(self.axis, codec=codec, gathered=codec if self.weights else None)
