"""Deferred initialisation: records an initialiser on fake tensors, then replays it leaf by leaf.

The recording costs no memory. The replay runs the same operations in the same order on real tensors, so random numbers are
the same, and drops each tensor after its last use, so that at any time only one leaf and its intermediates are alive. A leaf
that an initialiser of `shardlib.init` returned is not made at all: the replay hands on its `Draw`, from which a rank draws
its shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.common._compat import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    OperatorMode,
    pytree,
    storage_id,
)
from shardlib.errors import TreeError
from shardlib.init.draws import Draw
from shardlib.tree import Tree, flatten


@dataclass(frozen=True)
class _Ref:
    """A reference to a recorded tensor in the arguments of a recorded call."""

    number: int


@dataclass
class _Recorded:
    """A recorded operation.

    Attributes:
        op: the operation.
        arguments: args and kwargs, flattened; tensors as `_Ref`s.
        structure: the tree structure of the arguments.
        results: numbers of the tensors that it returned.
        generators: states to set the default generators to first; None to go on from their present states.
    """

    op: Any
    arguments: list[Any]
    structure: Any
    results: list[int]
    generators: list[torch.Tensor] | None


class _Recorder(OperatorMode):
    """Records every operation on (or creation of) fake tensors, and numbers the tensors and their storages."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.calls: list[_Recorded] = []
        self.number_of: dict[int, int] = {}
        self.storage_of: list[int] = []
        self.made: list[torch.Tensor] = []  # by number. Tensors, and their storages, are kept so that ids stay unique.
        self._keep: list[Any] = []
        self._storages: dict[int, int] = {}
        self._states: list[torch.Tensor] | None = None
        self._fake = fake

    def _take(self, op: Any, args: Any, kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten((args, kwargs))
        arguments = [self._reference(value) if isinstance(value, torch.Tensor) else value for value in flat]
        with self._fake:
            out = op(*args, **kwargs)
        results = [self._number(value) for value in pytree.tree_flatten(out)[0] if isinstance(value, torch.Tensor)]
        self.calls.append(_Recorded(op, arguments, structure, results, self._seeded(op)))
        return out

    def _seeded(self, op: Any) -> list[torch.Tensor] | None:
        """The default generators' states before a random operation, if the initialiser has set them since the previous one.

        Fake operations do not advance a generator, so a state that differs was set, by torch.manual_seed for example.
        """
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return None
        states = _generator_states()
        if self._states is not None and all(map(torch.equal, states, self._states)):
            return None
        self._states = states
        return states

    def _reference(self, value: torch.Tensor) -> Any:
        # A real tensor was made outside the initialiser, and is a constant.
        return _Ref(self._number(value)) if isinstance(value, FakeTensor) else value

    def _number(self, value: torch.Tensor) -> int:
        if id(value) not in self.number_of:
            storage = storage_id(value.untyped_storage())
            self._keep.append(value.untyped_storage())
            self.made.append(value)
            self.number_of[id(value)] = len(self.storage_of)
            self.storage_of.append(self._storages.setdefault(storage, len(self._storages)))
        return self.number_of[id(value)]


class Deferred:
    """A recorded initialiser. ``tree`` has fake leaves of the right shapes; `replay` makes the real leaves."""

    def __init__(self, tree: Tree, recorder: _Recorder) -> None:
        self.tree = tree
        self._recorder = recorder

    def replay(self, paths: Mapping[int, str], take: Callable[[str, torch.Tensor | Draw], None]) -> None:
        """Run the recording.

        Args:
            paths: number of a leaf in flattening order -> its path.
            take: called with each leaf's path and value after the last write to the leaf's memory. The value is a `Draw` for
                a leaf that was drawn and not changed later.
        """
        recorder = self._recorder
        last_use: dict[int, int] = {}
        for step, call in enumerate(recorder.calls):
            for number in [*call.results, *(a.number for a in call.arguments if isinstance(a, _Ref))]:
                last_use[recorder.storage_of[number]] = step
        wanted: dict[int, list[tuple[str, int]]] = {}
        for index, leaf in enumerate(flatten(self.tree)[1]):
            if not isinstance(leaf, FakeTensor):
                take(paths[index], leaf.detach())  # made outside the initialiser
                continue
            number = recorder.number_of[id(leaf)]
            wanted.setdefault(recorder.storage_of[number], []).append((paths[index], number))
        drawn = self._drawn()
        for storage in drawn.keys() & wanted.keys():
            for path, _ in wanted[storage]:
                take(path, drawn[storage])
        ending: dict[int, list[int]] = {}
        for storage, step in last_use.items():
            ending.setdefault(step, []).append(storage)
        live: dict[int, dict[int, torch.Tensor]] = {}
        with torch.no_grad():
            for step, call in enumerate(recorder.calls):
                if any(recorder.storage_of[number] in drawn for number in call.results):
                    continue
                self._run(call, live)
                for storage in ending.get(step, ()):
                    for path, number in wanted.get(storage, ()) if storage in live else ():
                        take(path, live[storage][number])
                    live.pop(storage, None)

    def _drawn(self) -> dict[int, Draw]:
        """Storage -> draw, of storages that hold just the result of one draw, or a copy of it, and that no other call
        uses."""
        storage_of, calls = self._recorder.storage_of, self._recorder.calls
        draws: dict[int, Draw] = {}
        copies: list[tuple[int, int]] = []  # (target, source) storages of copies of draws
        needed: set[int] = set()  # storages that other calls read or write
        for call in calls:
            used = [storage_of[a.number] for a in call.arguments if isinstance(a, _Ref)]
            results = [storage_of[number] for number in call.results]
            if call.op is torch.ops.shardlib.fresh.default:
                args, kwargs = pytree.tree_unflatten(call.arguments, call.structure)
                kind, numbers, seed, first, shape = args
                draw = Draw(kind, tuple(numbers), seed, first, tuple(shape), kwargs["dtype"])
                draws[results[0]] = draw
            elif call.op is torch.ops.aten.copy_.default and len(used) == 2 and self._copies(call, draws.get(used[1])):
                draws[used[0]] = draws[used[1]]
                copies.append((used[0], used[1]))
            elif used and call.op is not torch.ops.aten.detach.default:
                needed |= {*results, *used}
        # To make the target of a copy for real, its source must be made for real too.
        needed |= {source for target, source in copies if target in needed}
        return {storage: draw for storage, draw in draws.items() if storage not in needed}

    def _copies(self, call: _Recorded, draw: Draw | None) -> bool:
        """Whether a copy fills a whole storage with ``draw``, in the same dtype, shape and order."""
        if draw is None:
            return False
        out = self._recorder.made[call.results[0]]
        return (
            out.dtype is draw.dtype
            and tuple(out.shape) == draw.shape
            and out.is_contiguous()
            and out.untyped_storage().nbytes() == out.nbytes
        )

    def _run(self, call: _Recorded, live: dict[int, dict[int, torch.Tensor]]) -> None:
        storage_of = self._recorder.storage_of

        def real(value: Any) -> Any:
            return live[storage_of[value.number]][value.number] if isinstance(value, _Ref) else value

        if call.generators is not None:
            _set_generator_states(call.generators)
        args, kwargs = pytree.tree_unflatten([real(value) for value in call.arguments], call.structure)
        out = call.op(*args, **kwargs)
        tensors = [value for value in pytree.tree_flatten(out)[0] if isinstance(value, torch.Tensor)]
        for number, tensor in zip(call.results, tensors, strict=True):
            live.setdefault(storage_of[number], {})[number] = tensor


def _generator_states() -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpu]


def _set_generator_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def defer(init_fn: Callable[[], Tree]) -> Deferred:
    """Record ``init_fn`` on fake tensors.

    Raises:
        TreeError: the initialiser reads values of the tensors it makes (``.item()``, a branch on data); or it is a module,
            or a function that cannot be called without arguments.
    """
    _require_initialiser(init_fn)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder(fake)
    try:
        with recorder:
            tree = init_fn()
    except DataDependentOutputException as error:
        raise TreeError(
            f"the initialiser reads a value it has not computed yet ({error}); make the parameters first and pass the pytree "
            "to sl.shard"
        ) from error
    # Some leaves, such as nn.Parameter, are made without an operation: take the tensors that they wrap.
    return Deferred(pytree.tree_map(lambda leaf: _plain(leaf, recorder), tree), recorder)


def _plain(leaf: Any, recorder: _Recorder) -> Any:
    if not isinstance(leaf, FakeTensor) or id(leaf) in recorder.number_of:
        return leaf
    with recorder:
        return leaf.detach()


def _require_initialiser(init_fn: Any) -> None:
    if isinstance(init_fn, torch.nn.Module):
        raise TreeError(
            f"{type(init_fn).__name__} is a module, not a pytree of tensors: shard the params of apply, params = "
            "sl.from_module(module)"
        )
    try:
        inspect.signature(init_fn).bind()
    except TypeError as error:
        raise TreeError(
            f"{getattr(init_fn, '__name__', init_fn)} was passed for parameters and must make them without arguments, but "
            f"{error}; pass a lambda that has them"
        ) from None
    except ValueError:
        return  # a function without a signature
