"""Operations on flat tensors of one shape, the steps of optimizers and sums over elements: their checks and dispatch.

A step is a record (a NamedTuple) of tensors and factors, which all its implementations take: plain torch, a Triton kernel
(`shardlib.kernels.common.tiles.by`), and a C function (`CompiledSteps`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import choose, load, on

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)


class StepFields(NamedTuple):
    """A step's fields by kind: the tensors, those of them that may be None, and the numbers or records of numbers."""

    tensors: tuple[str, ...]
    optional: tuple[str, ...]
    factors: tuple[str, ...]


@functools.cache
def fields_of(record: Any) -> StepFields:
    """The fields of a step's record, in order."""
    kinds = get_type_hints(record)
    optional = tuple(name for name, kind in kinds.items() if kind == torch.Tensor | None)
    tensors = tuple(name for name, kind in kinds.items() if kind == torch.Tensor or name in optional)
    return StepFields(tensors, optional, tuple(name for name in kinds if name not in tensors))


def factors_of(step: Any) -> list[Any]:
    """The numbers among a step's factors, in order, those of records too."""
    factors = (getattr(step, name) for name in fields_of(step.__class__).factors)
    return [number for factor in factors for number in (factor if isinstance(factor, tuple) else (factor,))]


def run(function: str, step: Any, using: str | None, *, mixed: bool = False, old: Any = None) -> None:
    """Checks the tensors of a step, and runs it by the implementation that takes them.

    Args:
        function: its name in the operation's implementations.
        mixed: whether kernels take states of any dtype of `FLOATS`, and a ``grad`` of another; else fp32 alone.
        old: a record of the values before a step that writes them elsewhere. Where an implementation works in place alone,
            they are copied first.

    Raises:
        ValueError: shapes or devices differ.
        TypeError: a dtype is not supported, or ``using`` names a kernel that does not take these tensors.
    """
    fields, like = fields_of(step.__class__), step._fields[0]
    tensors = {name: getattr(step, name) for name in fields.tensors}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None or name not in fields.optional}
    before = {} if old is None else old._asdict()
    tensors |= {f"old.{name}": tensor for name, tensor in before.items()}
    check(tensors, like, ("grad",) if mixed else ())
    if mixed and not step.grad.is_contiguous():
        tensors["grad"] = step.grad.contiguous()
        step = step._replace(grad=tensors["grad"])
    with on(step[0].device):
        operation = step.__class__.__module__.rpartition(".")[2]
        serves = serving(operation, tensors, like, FLOATS if mixed else FLOATS[:1], using)
        if before and getattr(serves, "READS_OLD", False):
            getattr(serves, function)(step, old)
            return
        for name, value in before.items():
            tensors[name].copy_(value)
        getattr(serves, function)(step)


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
            if tensor.dtype != torch.float64:
                raise TypeError(f"scale is {tensor.dtype}: make it float64")
            continue
        if tensor.shape != first.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {like} {tuple(first.shape)}")
        if name == "copy" or tensor.dtype != first.dtype:
            allowed = NARROW if name == "copy" else (first.dtype, *(FLOATS if name in read else ()))
            if tensor.dtype not in allowed:
                raise TypeError(f"{name} is {tensor.dtype}, {like} {first.dtype}: cast it to one of {allowed}")


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


class CompiledSteps(native.Compiled):
    """Steps by C functions, each called as the step is, without the last underscore.

    ``class cpu(CompiledSteps, mixed=("lion_",), lion_=LionStep)`` names the steps' records. A C function takes the tensors in
    order, the number of elements, the factors, ``scale``, and a number of threads or a stream. A copy, and the param and the
    grad of a mixed step, are followed by their dtype's number. A mixed step in C++ first takes the states as they were.
    """

    signatures: dict[str, str]

    READS_OLD = False  # whether steps read states elsewhere than they write them
    _mixed: tuple[str, ...] = ()
    _records: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, mixed: tuple[str, ...] = (), **records: Any) -> None:
        super().__init_subclass__()
        if records:
            cls._mixed, cls._records = mixed, records
        cls.READS_OLD = bool(cls._mixed) and not cls.of_gpus
        cls.signatures = {}
        for function, record in cls._records.items():
            setattr(cls, function, cls._step(function, record))

    @classmethod
    def _step(cls, function: str, record: Any) -> Callable[..., None]:
        name, mixed = function.rstrip("_"), function in cls._mixed
        fields, kinds = fields_of(record), get_type_hints(record)
        scaled = "scale" in fields.tensors
        buffers = [each for each in fields.tensors if each != "scale"]
        typed = {"copy", *(("param", "grad") if mixed else ())}
        states = [each for each in buffers if each not in ("grad", "copy")] if mixed and not cls.of_gpus else []
        numbers = sum(len(getattr(kinds[each], "_fields", (each,))) for each in fields.factors)
        letters = "p" * len(states) + "".join("pi" if each in typed else "p" for each in buffers) + "l" + "f" * numbers
        scale, where = ("p", "p") if cls.of_gpus else ("f", "i")
        cls.signatures = {**cls.signatures, name: letters + scale * scaled + where}

        def call(step: Any, old: Any = None) -> None:
            values: list[Any] = [getattr(old or step, each) for each in states]
            for each in buffers:
                tensor = getattr(step, each)
                values.append(tensor)
                if each in typed:
                    values.append(-1 if tensor is None else native.DTYPES[tensor.dtype])
            values += (step[0].numel(), *factors_of(step))
            if scaled:
                values.append(step.scale if cls.of_gpus else 1.0 if step.scale is None else float(step.scale))
            getattr(cls.library(), name)(*values, cls.runs_on(step[0].device))

        return call
