"""A codec that loses nothing: training with it must equal training without one."""

from dataclasses import dataclass

import torch

from shardlib.collectives.codecs.base import TwoPhase
from shardlib.collectives.codecs.integers import BoundPadded
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


class ExactWire(BoundPadded):
    """Rows padded to a multiple of 3; errors are zero."""

    def __init__(self, rows, feedback):
        super().__init__(rows, feedback, 3)
        self.widths = (self.row * rows.dtype.itemsize,) * 2

    def encode(self, error, x):
        assert not error.any()
        sent = x.view(self.rows.ways, -1).clone().view(torch.uint8)
        x.zero_()
        return sent

    def add(self, messages):
        return self.rows.unpadded(self._sum(messages))

    def add_encode(self, messages, error):
        assert not error.any()
        return self._sum(messages).view(torch.uint8)

    def decode(self, messages, out=None):
        assert out is None
        return self._values(messages).reshape(-1)[: self.rows.elements]

    def _values(self, messages):
        return messages.reshape(-1).clone().view(self.rows.dtype).view(len(messages), self.row)

    def _sum(self, messages):
        total = self._values(messages).sum(0)
        return total / self.rows.ways if self.rows.mean else total


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
