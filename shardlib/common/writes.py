"""Writes of a function to its inputs, those that no version counter sees among them: what sees them, and the error.

A tensor's version counts the writes to its memory, but neither those through ``.data``, nor those of operators that do not
say that they write (batch_norm's, to running statistics). An operation's operands show them all. What is written by
assignment to ``.data`` is no operation: `place_of` shows it, and is cheap enough for every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from shardlib.common._compat import (
    FakeTensor,
    OperatorMode,
    arguments_of,
    of_func,
    storage_id,
)
from shardlib.errors import HandleError

T = TypeVar("T")


class Observer(OperatorMode):
    """A mode that shows each operand that an operation is about to read, and each that it is about to write to:
    ``reads(tensor)`` and ``writes(tensor, name of the operator)``."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether what is compiled runs, and is compiled, within the mode."""
        return True

    def __init__(
        self, writes: Callable[[torch.Tensor, str], None], reads: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        super().__init__()
        self._writes, self._reads = writes, reads

    def _take(self, operator: Any, args: Any, kwargs: Any) -> Any:
        self.look(operator, args, kwargs)
        return operator(*args, **kwargs)

    def look(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at an operation before it runs; all operations and all of their operands pass here."""
        if self._reads is not None:
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(each, torch.Tensor):
                        self._reads(each)
        for tensor in targets(func, args, kwargs, torch.Tensor):
            self._writes(tensor, func.__name__.partition(".")[0])


def targets(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[T]) -> Iterator[T]:
    """The operands that an operator writes to, where they are tensors, or what stands for them."""
    positions, names, training = _writes_to(func)
    if not names:
        return

    def given(name: str) -> Any:
        return kwargs[name] if name in kwargs else args[positions[name]] if positions[name] < len(args) else None

    frozen = training and not given(training)
    for name in names:
        value = None if frozen and name in STATISTICS else given(name)
        several = value if isinstance(value, (list, tuple)) else [value]
        yield from (tensor for tensor in several if isinstance(tensor, kind))


@cache
def _writes_to(func: Any) -> tuple[dict[str, int], list[str], str]:
    """The positions of an operator's arguments, the names of those that it writes to, and that of the one which says whether
    it updates statistics ("" if it does in any case)."""
    arguments = arguments_of(func)
    positions = {name: position for position, (name, _) in enumerate(arguments)}
    updates = not func.__name__.partition(".")[0].endswith("backward")
    written = [name for name, says in arguments if says or (updates and name in STATISTICS)]
    return positions, written, "training" if "training" in positions else ""


# What operators of batch_norm write to, most of them without saying so.
STATISTICS = ("running_mean", "running_var")


def has_place(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own: not what stands for others (handles, those of torch.func), nor a sparse one."""
    # By the type: what stands for a parameter in a module's call answers isinstance as one.
    plain = type(tensor) in (torch.Tensor, FakeTensor) or issubclass(type(tensor), torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and not of_func(tensor)


def place_of(tensor: torch.Tensor) -> tuple[int, int | torch.SymInt]:
    """Where a tensor's elements begin: in which memory, at which byte. Assignment to ``.data`` changes it."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:  # without addresses
        return storage_id(tensor.untyped_storage()), tensor.storage_offset() * tensor.itemsize
    return 0, tensor.data_ptr()


def place_for(like: torch.Tensor | None) -> Callable[[torch.Tensor], Any]:
    """The quickest function that tells where tensors like this one begin: `place_of`, or their address."""
    addressed = type(like) is torch.Tensor and has_place(like) and not like.is_meta
    return torch.Tensor.data_ptr if addressed else lambda tensor: place_of(tensor) if has_place(tensor) else None


def owner_of(tensor: torch.Tensor, named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the contiguous tensor in whose memory ``tensor`` begins; None if it begins in none of theirs."""
    if not has_place(tensor):
        return None
    memory, start = place_of(tensor)
    for name, each in named:
        begins = place_of(each)
        if begins[0] == memory and 0 <= start - begins[1] < each.nbytes:
            return name
    return None


def written(writer: str, *paths: str) -> HandleError:
    """The error of a write to a parameter, one of ``paths``."""
    which = f"parameter {paths[0]}" if len(paths) == 1 else f"a parameter, one of {', '.join(paths)}"
    return HandleError(
        f"{writer} writes to {which} inside a function, whose parameters are inputs. "
        + (_MAX_NORM if writer in _RENORMS else _OUTPUTS)
    )


_RENORMS = ("max_norm=", "embedding_renorm_")
_MAX_NORM = (
    "Instead of using an embedding's max_norm, scale what is looked up: "
    "rows * (max_norm / rows.norm(dim=-1, keepdim=True).clamp(min=max_norm)).detach()"
)
_OUTPUTS = (
    "Return what changes: an average of parameters among make_train_step's buffers=, or by sl.optim.ema; a module's "
    "statistics by from_module(buffers=True). Or work on a copy: p.clone()"
)
