"""What operators cost: floating-point operations, bytes and launches, and the bytes of live tensors."""

from __future__ import annotations

import importlib
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from shardlib.common._compat import OperatorMode, graph_task, storage_id
from shardlib.execute.phases import Phase
from shardlib.tree import leaves_of, tensors_of

# Floating-point operations of operators, by the shapes of their arguments.
# A multiplication and an addition are two operations. Counted are matrix products, also those inside of fused operators.
# Torch's own table is extended by the operators that it leaves out or miscounts, and shardlib's operations add theirs where
# they are defined (`shardlib.kernels.common.flops.counted`). Causal attention counts in full, as is the convention.


aten: Any = torch.ops.aten


class Flops(NamedTuple):
    """The floating-point operations of one operator.

    Attributes:
        done: how many it does.
        again: how many of these compute what was computed before: the scores of fused attention, in backward.
    """

    done: int
    again: int = 0


def flops_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Flops | None:
    """The operations of a dispatched operator; None if it contains no product."""
    packet = _IN_PLACE.get(operator.overloadpacket, operator.overloadpacket)
    if further := _FURTHER.get(packet):
        done = further(*args)
    elif count := _torchs().flop_registry.get(packet):
        done = count(*args, **kwargs, out_val=result)
    else:
        return None
    return Flops(
        done, _scores_again(operator, args, done) if attends(operator) and "backward" in operator.name() else 0
    )


def _torchs() -> Any:
    """Torch's counter, which is imported where somebody counts: its import takes a third of a second."""
    return importlib.import_module("torch.utils.flop_counter")


def attends(operator: Any) -> bool:
    """Whether an operator is fused attention."""
    return "attention" in operator.name()


def _scores_again(operator: Any, args: Sequence[Any], done: int) -> int:
    """The first of the five products of fused attention's backward computes the scores again: three have the width of
    queries, and two that of values."""
    if operator.namespace != "aten":
        return done // 5
    _, query, _, value, *_ = args
    width = query.shape[-1]
    return done * width // (3 * width + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    return _torchs().sdpa_flop_count(query.shape, key.shape, value.shape)


def _scores_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> int:
    return _torchs().sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """``[R, k] · [E, k, n]``, ``[m, R] · [R, n]`` or ``[E, m, k] · [k, R]`` by ranges of R, or ``[E, m, k] · [E, k, n]``."""
    own = a.shape[0] if a.dim() > b.dim() else 1  # each column of the second meets one matrix of the first
    return 2 * a.numel() * b.shape[-1] // own


def _scaled(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _by_vector(matrix: torch.Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _onto_by_vector(_: Any, matrix: torch.Tensor, *__: Any) -> int:
    return 2 * matrix.numel()


def _outer_sum(_: Any, a: torch.Tensor, b: torch.Tensor, *__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _outer(_: Any, a: torch.Tensor, b: torch.Tensor, *__: Any) -> int:
    return 2 * math.prod((*a.shape, *b.shape))


def _convolution_backward(gradient: torch.Tensor, inp: torch.Tensor, weight: torch.Tensor, *more: Any) -> int:
    """Forward's product for each gradient that is asked for. Torch's table takes the weight of a group for that of all."""
    transposed, (of_input, of_weight, _) = more[4], more[7]
    rows, _, *positions = (inp if transposed else gradient).shape  # each meets every element of the weight
    return 2 * rows * math.prod(positions) * weight.numel() * (of_input + of_weight)


def _recurrent(inp: torch.Tensor, of_input: torch.Tensor, of_state: torch.Tensor, *_: Any) -> int:
    """A layer's products by the weights of its input and of its state, at every step of every row."""
    return 2 * math.prod(inp.shape[:-1]) * (of_input.numel() + of_state.numel())


def _recurrent_backward(*args: Any) -> int:
    return 2 * _recurrent(*args)


_FURTHER: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _scores,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _scores_backward,
    aten._scaled_dot_product_fused_attention_overrideable: _scores,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _scores_backward,
    aten._grouped_mm: _grouped,
    aten._scaled_mm_v2: _scaled,
    aten.mv: _by_vector,
    aten.dot: _by_vector,
    aten.vdot: _by_vector,
    aten.addmv: _onto_by_vector,
    aten.addbmm: _outer_sum,
    aten.addr: _outer,
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
# The table has no operators that add to their first argument in place: they count as those that do not.
_IN_PLACE = {getattr(aten, f"{name}_"): getattr(aten, name) for name in ("addmm", "baddbmm", "addmv", "addbmm", "addr")}


# Counting the bytes of live tensors that operations make.


class Stretch(NamedTuple):
    """A stretch of time in one phase.

    Attributes:
        rise: the most bytes that were alive at once, beyond those that were when the stretch began; at least 0.
        net: bytes alive at its end, beyond the same.
    """

    phase: Phase
    rise: int
    net: int


class LiveBytes(OperatorMode):
    """A mode that counts the storages that operations make, fake ones included, until they are freed. Re-entrant.

    Storages that existed before, and an operation's internal workspace, are not counted.

    Args:
        phase: returns the phase that runs.
    """

    def __init__(self, phase: Callable[[], Phase] = Phase) -> None:
        super().__init__()
        self._phase = phase
        self._numbers: dict[int, int] = {}  # identity of a live storage -> its number; −1 if it is not counted
        # The number of a storage, its bytes, negative if it was freed, and the phase in which it was made or freed.
        self._changes: list[tuple[int, int, Phase]] = []
        self._count = itertools.count()

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        for value in leaves_of((args, kwargs)):
            self._meet(value, made=False)
        result = func(*args, **kwargs)
        # A constant that the function closes over is fake from its first view on, whose storage then is another one.
        for value in leaves_of(result):
            self._meet(value, made=not func.is_view)
        return result

    @property
    def now(self) -> int:
        """Bytes of all counted storages that are alive."""
        return sum(change for _, change, _ in self._changes)

    @property
    def peak(self) -> int:
        """The most bytes of counted storages that were alive at once."""
        return max(itertools.accumulate((change for _, change, _ in self._changes), initial=0))

    def stretches(self, without: Iterable[torch.Tensor] = ()) -> list[Stretch]:
        """What happened, phase after phase, not counting the storages of the tensors in ``without``."""
        ignored = {self._numbers.get(storage_id(tensor.untyped_storage())) for tensor in without}
        counted = ((phase, change) for number, change, phase in self._changes if number not in ignored)
        found = []
        for phase, changes in itertools.groupby(counted, key=lambda change: change[0]):
            levels = list(itertools.accumulate((change for _, change in changes), initial=0))
            found.append(Stretch(phase, max(levels), levels[-1]))
        return found

    def _meet(self, value: Any, made: bool) -> None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type == "meta":
            return  # no storage of its own, or one without memory
        storage = value.untyped_storage()
        key = storage_id(storage)
        if key in self._numbers:
            return
        number, size = (next(self._count), storage.nbytes()) if made else (-1, 0)
        self._numbers[key] = number
        self._changes.append((number, size, self._phase()))
        weakref.finalize(storage, self._free, key, number, size)

    def _free(self, key: int, number: int, size: int) -> None:
        self._numbers.pop(key, None)
        self._changes.append((number, -size, self._phase()))


class WorkCount(OperatorMode):
    """A mode that counts work by the phase in which it is done.

    Args:
        phase: returns the phase that runs, or what else work is counted by; by default forward or backward of all.
        others: returns numbers that grow beside the work, by name. Their growth within the mode is counted by phase too.

    Attributes:
        done: phase -> "flops", floating-point operations of matrix products (`flops_of`), and "again", how many of
            these fused attention computes again; "launches", operators that compute tensors: neither views nor memory
            without values; "streamed", bytes that those which are no products read and write; and the others.
    """

    def __init__(
        self, phase: Callable[[], Hashable] | None = None, others: Callable[[], Mapping[Any, int]] = dict[Any, int]
    ) -> None:
        super().__init__()
        self._phase, self._others = phase or _way, others
        self.done: dict[Any, Counter[Any]] = {}

    @property
    def flops(self) -> tuple[int, int]:
        """Floating-point operations: of forward; of backward, with what it recomputes."""
        return self.both("flops")

    @property
    def streamed(self) -> tuple[int, int]:
        """Bytes that other operators read and write: of forward; of backward, with what it recomputes."""
        return self.both("streamed")

    @property
    def launches(self) -> tuple[int, int]:
        """Operators that compute: of forward; of backward, with what it recomputes."""
        return self.both("launches")

    def both(self, name: Any) -> tuple[int, int]:
        """What was done by one name in forward, and in backward."""
        forward, backward = (
            sum(done[name] for phase, done in self.done.items() if phase.backward == way) for way in (False, True)
        )
        return forward, backward

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = self._run(func, args, kwargs)
        done = self._now()
        count = flops_of(func, args, kwargs, result)
        if count:
            done["flops"] += count.done
            done["again"] += count.again
        if not (func.is_view or func.overloadpacket in _WITHOUT_VALUES):
            made = tensors_of(result)
            done["launches"] += bool(made)
            if made and not count:
                read = tensors_of((args, kwargs))
                done["streamed"] += sum(leaf.nbytes for leaf in (*read, *made))
        return result

    def _run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator."""
        return operator(*args, **kwargs)

    def __enter__(self) -> Self:
        self._before = dict(self._others())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._now()

    def _now(self) -> Counter[Any]:
        """What is done in the phase that runs. The others' growth since the last operator belongs to it."""
        done = self.done.setdefault(self._phase(), Counter())
        others = dict(self._others())
        if others != self._before:
            done.update({name: number - self._before.get(name, 0) for name, number in others.items()})
            self._before = others
        return done


def _way() -> Phase:
    return Phase(graph_task() != -1)


_WITHOUT_VALUES = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
}
