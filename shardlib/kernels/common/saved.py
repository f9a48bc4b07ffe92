"""What autograd saves for backward in place of a value: a note of how it is computed, or the value in bf16.

`torch.utils.checkpoint` computes a whole segment of a model again. `recomputed` computes one cheap value again, such as the
output of a GeLU, whose input is saved for the GeLU's own backward anyway: no matrix product runs twice.

`kept_in_bf16` rounds fp32 activations stochastically, so that gradients are unbiased. Stochastic rounding (arXiv 1502.02551,
section 3) takes a number between two bf16 neighbours to the upper one with a probability proportional to its distance from
the lower one. Its expectation is the number itself, whereas rounding to nearest would repeat the same error at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardlib.common._compat import func_transform, saving_hooks, storage_id


def recomputed(
    value: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: Any
) -> contextlib.AbstractContextManager[None]:
    """A context in which operations save, in place of ``value`` or a view of it, a note of how it is computed.

    Backward calls ``function(*inputs)``, which must return ``value``, once per operation that saved it. Tensors among
    ``inputs`` are kept alive, which costs nothing where they are saved anyway. Other hooks on saved tensors still run.

    The value itself is saved inside `torch.func`'s transforms, which allow no hooks, and inside `torch.compile`, which
    chooses by itself what to recompute.
    """
    return _saving_notes(value, function, inputs) if can_hook() else contextlib.nullcontext()


def can_hook() -> bool:
    """Whether saved tensors can have hooks: not inside `torch.func`'s transforms, nor inside `torch.compile`."""
    return not torch.compiler.is_compiling() and func_transform() is None


@contextlib.contextmanager
def _saving_notes(
    value: torch.Tensor, function: Callable[..., torch.Tensor], inputs: tuple[Any, ...]
) -> Iterator[None]:
    pack, unpack = saving_hooks() or (_identity, _identity)
    storage = storage_id(value.untyped_storage())
    kept = [pack(each.detach()) if isinstance(each, torch.Tensor) else each for each in inputs]
    tensors = [isinstance(each, torch.Tensor) for each in inputs]

    def recompute() -> torch.Tensor:
        values = [unpack(each) if tensor else each for each, tensor in zip(kept, tensors)]
        with torch.no_grad():
            return function(*values)

    def save(tensor: torch.Tensor) -> Any:
        if storage_id(tensor.untyped_storage()) != storage:
            return pack(tensor)
        return _Note(recompute, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def restore(saved: Any) -> torch.Tensor:
        return saved.tensor() if isinstance(saved, _Note) else unpack(saved)

    with saved_tensors_hooks(save, restore):
        yield


class _Note(NamedTuple):
    """A saved view of a value that is computed again in backward."""

    recompute: Callable[[], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.recompute().as_strided(self.size, self.stride, self.offset)


def kept_in_bf16(parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """A context in which operations save fp32 tensors other than ``parameters`` in bf16 for their backward.

    A tensor that several operations save is rounded once. Other hooks on saved tensors still run. Where saved tensors
    cannot have hooks (`can_hook`), they are saved unchanged.
    """
    return _saving_in_bf16(parameters) if can_hook() else contextlib.nullcontext()


@contextlib.contextmanager
def _saving_in_bf16(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    pack, unpack = saving_hooks() or (_identity, _identity)
    # Taking a view turns a handle into the tensor that it stands for. The views stay alive until the context ends: if their
    # memory were freed and allocated again, other tensors would be exempt by its address.
    views = [parameter.view_as(parameter) for parameter in parameters]
    exempt = {storage_id(view.untyped_storage()) for view in views}
    seen: dict[Any, tuple[torch.Tensor, Any]] = {}  # holds each tensor, so that its address is not allocated again

    def save(tensor: torch.Tensor) -> Any:
        if tensor.dtype != torch.float32 or storage_id(tensor.untyped_storage()) in exempt:
            return pack(tensor)
        # Dense views of the same numbers share one rounded copy, whatever their shapes.
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.flatten()
        key = (tensor.data_ptr(), tensor.numel()) if dense else (tensor.data_ptr(), tensor.size(), tensor.stride())
        if key not in seen:
            seen[key] = (tensor, pack(stochastically_rounded(flat)))
        stride = tensor.stride() if dense else tensor.new_empty(tensor.shape, device="meta").stride()
        return _Rounded(seen[key][1], tensor.size(), stride)

    def restore(saved: Any) -> torch.Tensor:
        return saved.tensor(unpack) if isinstance(saved, _Rounded) else unpack(saved)

    with saved_tensors_hooks(save, restore):
        yield
    del views


def stochastically_rounded(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous fp32, as bf16: each number becomes one of its two neighbours, on average itself.

    The random bits come from torch's default generator. Infinities and NaN are unchanged.
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
    return round_to_bf16(x.detach(), noise).to(torch.bfloat16)


def round_to_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """``x`` (fp32) with magnitudes rounded to bf16 numbers, still fp32, by uniform random integers ``bits`` in [0, 2^16).

    A magnitude is rounded up with a probability equal to the fraction that is cut off. Infinities and NaN are unchanged.
    """
    # bf16 leaves out the lower 16 bits: adding 16 random bits carries into the upper ones with the right probability.
    cut = (x.view(torch.int32) + bits.to(torch.int32)) & -(1 << 16)
    return torch.where(x.isfinite(), cut.view(torch.float32), x)


class _Rounded(NamedTuple):
    """A saved view of numbers that are stored in bf16."""

    packed: Any
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return unpack(self.packed).float().as_strided(self.size, self.stride)


def _identity(value: Any) -> Any:
    return value
