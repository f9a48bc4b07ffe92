"""`QuantizedMatrix`: a layer's weight, or those of its experts, in 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.quantize import Blockwise, quantize
from shardlib.kernels.thin_matmul.arguments import Matrix
from shardlib.kernels.thin_matmul.op import grouped_thin_matmul, thin_matmul
from shardlib.kernels.thin_matmul.reference import whole


@dataclass(frozen=True, eq=False)
class QuantizedMatrix(Matrix):
    """A layer's weight, quantised blockwise: ``F.linear`` takes it in place of the weight, and nothing else does.

    Of the weights of experts, which have a further dimension before the others, it is `grouped_matmul` that takes them.
    """

    requires_grad = False

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int = 8, block: int = 128) -> QuantizedMatrix:
        """``weight`` in blocks of at most ``block`` elements: the most that divide the inputs.

        Args:
            weight: ``[outputs, inputs]``, or ``[experts, outputs, inputs]``.

        Raises:
            ValueError: another number of dimensions, or inputs that are no multiple of 16.

        >>> from shardlib.kernels.thin_matmul import QuantizedMatrix
        >>> matrix = QuantizedMatrix.of(torch.ones(8, 48), bits=4)
        >>> matrix.form.block, matrix.nbytes
        (16, 288)
        >>> torch.nn.functional.linear(torch.ones(48), matrix)
        tensor([48., 48., 48., 48., 48., 48., 48., 48.])
        """
        if weight.dim() not in (2, 3) or weight.shape[-1] % 16:
            raise ValueError(
                f"a weight {tuple(weight.shape)} is not quantised: take a matrix whose inputs are a multiple of 16, or those "
                "of experts"
            )
        inputs = weight.shape[-1]
        form = Blockwise(bits, min(block, inputs & -inputs))
        values, scales = quantize(weight.detach().float().flatten(), form)
        return cls(values, scales, form, weight.shape, weight.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dense(self) -> torch.Tensor:
        """The weight that the values stand for, of the same shape."""
        return whole(self)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to(self, device: torch.device) -> QuantizedMatrix:
        """The same on ``device``."""
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return thin_matmul(*args, **(kwargs or {}))
        if func is grouped_matmul:
            return grouped_thin_matmul(*args, **(kwargs or {}))
        raise TypeError(
            f"{getattr(func, '__name__', func)} of a QuantizedMatrix: F.linear alone takes it, and product(rows, weight) of "
            "experts; weight.dense() is a tensor"
        )
