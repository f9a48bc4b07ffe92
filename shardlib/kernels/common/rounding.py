"""Keep fp32 activations in bf16 for the backward pass, rounded at random so that gradients are right on average.

A number between two neighbours in bf16 becomes the upper one with the probability of its distance to the lower one: its
expectation is the number itself, where rounding to nearest would be off the same way at every step (stochastic rounding,
as in arXiv 1502.02551, section 3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardlib._compat import saving_hooks, storage_id
from shardlib.kernels.common.recompute import can_hook


def kept_in_bf16(parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Within, what operations keep of fp32 tensors for their backward is kept in bf16; not of ``parameters``.

    What several operations keep is rounded once. Other hooks on saved tensors go on as before. Where there can be no hooks
    (`can_hook`) everything is kept as it is.
    """
    return _rounding(parameters) if can_hook() else contextlib.nullcontext()


@contextlib.contextmanager
def _rounding(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    pack, unpack = saving_hooks() or (_same, _same)
    # Views: what only stands for a parameter gives the tensor itself then. Held, as memory that is given back and taken
    # again would make other tensors exempt.
    views = [parameter.view_as(parameter) for parameter in parameters]
    exempt = {storage_id(view.untyped_storage()) for view in views}
    seen: dict[Any, tuple[torch.Tensor, Any]] = {}  # with the tensor, whose memory must not be used again meanwhile

    def save(tensor: torch.Tensor) -> Any:
        if tensor.dtype != torch.float32 or storage_id(tensor.untyped_storage()) in exempt:
            return pack(tensor)
        # Views that cover the same numbers are one to keep, whatever their shapes.
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.flatten()
        where = (tensor.data_ptr(), tensor.numel()) if dense else (tensor.data_ptr(), tensor.size(), tensor.stride())
        if where not in seen:
            seen[where] = (tensor, pack(stochastically_rounded(flat)))
        stride = tensor.stride() if dense else tensor.new_empty(tensor.shape, device="meta").stride()
        return _Rounded(seen[where][1], tensor.size(), stride)

    def restore(saved: Any) -> torch.Tensor:
        return saved.tensor(unpack) if isinstance(saved, _Rounded) else unpack(saved)

    with saved_tensors_hooks(save, restore):
        yield
    del views


def stochastically_rounded(x: torch.Tensor) -> torch.Tensor:
    """``x``, fp32 and contiguous, in bf16: one of its two neighbours there, and on average ``x``.

    Drawn from torch's own generator. What is not finite stays so.
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
    return round_to_bf16(x.detach(), noise).to(torch.bfloat16)


def round_to_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """``x`` (fp32) up or down to a bf16 number, still fp32: by random ``bits`` below 2^16, up with odds of what is cut off.

    In magnitude; what is not finite stays.
    """
    # The lower 16 bits are what bf16 leaves out: noise of as many carries into the upper ones as often as it should.
    cut = (x.view(torch.int32) + bits.to(torch.int32)) & -(1 << 16)
    return torch.where(x.isfinite(), cut.view(torch.float32), x)


class _Rounded(NamedTuple):
    """A view of numbers that are kept in bf16."""

    packed: Any
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return unpack(self.packed).float().as_strided(self.size, self.stride)


def _same(value: Any) -> Any:
    return value
