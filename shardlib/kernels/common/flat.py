"""Operations on flat tensors of one shape, the steps of optimizers and sums over elements: their checks and dispatch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_type_hints

import torch

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import choose, load, on

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)


def run(
    operation: str,
    function: str,
    step: Any,
    like: str,
    using: str | None,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    read: tuple[str, ...] = (),
    old: Any = None,
) -> None:
    """Checks the tensors of a step, and runs it by the implementation that takes them.

    Args:
        function: its name in the operation's implementations.
        step: the record that they take; its tensors are checked as by `check`.
        like, read: see `check`. What is only read becomes contiguous.
        using, dtypes: see `serving`.
        old: a record of the values before a step that writes them elsewhere. Where an implementation works in place alone,
            they are copied first.
    """
    required, optional = _tensors_of(step.__class__)
    tensors = {name: step[at] for name, at in required}
    for name, at in optional:
        if step[at] is not None:
            tensors[name] = step[at]
    if old is not None:
        tensors |= {f"old.{name}": tensor for name, tensor in old._asdict().items()}
    check(tensors, like, read)
    for name in read:
        if not tensors[name].is_contiguous():
            tensors[name] = tensors[name].contiguous()
            step = step._replace(**{name: tensors[name]})
    with on(tensors[like].device):
        serves = serving(operation, tensors, like, dtypes, using)
        if old is not None and getattr(serves, "READS_OLD", False):
            getattr(serves, function)(step, old)
            return
        if old is not None:
            for name, value in old._asdict().items():
                tensors[name].copy_(value)
        getattr(serves, function)(step)


@functools.cache
def _tensors_of(record: Any) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The names and positions of a record's fields that are tensors, and of those that may be None too."""
    kinds = list(enumerate(get_type_hints(record).items()))
    required = [(name, at) for at, (name, kind) in kinds if kind == torch.Tensor]
    return required, [(name, at) for at, (name, kind) in kinds if kind == torch.Tensor | None]


def check(tensors: Mapping[str, torch.Tensor], like: str, read: tuple[str, ...] = ()) -> None:
    """Refuses tensors whose shapes or dtypes a kernel would read or write wrongly.

    Args:
        tensors: argument name -> tensor, all of one shape, but for ``scale``, a factor, which is 0-d.
        like: the name of the tensor whose dtype the others must have. That of ``copy`` is bf16 or fp16, of ``scale`` float64.
        read: names of tensors that are only read, which may have any dtype of `FLOATS`.

    Raises:
        ValueError: shapes or devices differ.
        TypeError: a dtype is not supported.
    """
    check_tensors("an optimizer's step", tensors)
    first = tensors[like]
    for name, tensor in tensors.items():
        if name == "scale":
            continue
        if tensor.shape != first.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {like} {tuple(first.shape)}")
        if name == "copy" or tensor.dtype != first.dtype:
            allowed = NARROW if name == "copy" else (first.dtype, *(FLOATS if name in read else ()))
            if tensor.dtype not in allowed:
                raise TypeError(
                    f"{name} is {tensor.dtype} beside {like} of {first.dtype}, not one of {allowed}: cast it"
                )
    scale = tensors.get("scale")
    if scale is not None and scale.dtype != torch.float64:
        raise TypeError(f"scale is {scale.dtype} on {scale.device}: make it float64 on {first.device}")


def serving(
    operation: str,
    tensors: Mapping[str, torch.Tensor],
    like: str,
    dtypes: tuple[torch.dtype, ...],
    using: str | None,
) -> Any:
    """The implementation for checked tensors: plain torch for dtypes and strides that kernels do not take.

    Args:
        dtypes: those of the tensor ``like`` that kernels take.
        using: names an implementation; None takes what `shardlib.kernels.common.dispatch.choose` prefers.

    Raises:
        TypeError: ``using`` names a kernel that does not take these tensors.
    """
    first = tensors[like]
    if first.dtype not in dtypes or not all(tensor.is_contiguous() for tensor in tensors.values()):
        if using not in (None, "reference"):
            raise TypeError(f"{first.dtype} or strided tensors are served by plain torch, not by {using}")
        using = "reference"
    choice = choose(operation, first.device) if using is None else load(operation, using, first.device)
    return choice.implementation
