"""The checkpoint of a block, by the policy that a plan names: what it keeps, and what recomputation repeats."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardlib.common._compat import (
    FUSED_ATTENTIONS,
    SELECTIVE_MODES,
    OperatorMode,
    TorchDispatchMode,
    no_modes,
    pytree,
    scaled_product,
    storage_id,
    transformed,
    version_of,
    without_modes,
    without_top_mode,
)
from shardlib.common.environment import Decision, environment, within
from shardlib.common.writes import STATISTICS
from shardlib.errors import HandleError
from shardlib.execute.handles import Handle
from shardlib.plan.recompute import Recompute
from shardlib.rng import restore_generators, states_of_generators

# A recompute policy that keeps named values (JAX's ``save_only_these_names``).
# Operations of a block are numbered in the order in which they run, which recomputation repeats. A value is named after it
# was made: the operation that made it is found by the value's memory, what it returned is kept, and recomputation takes
# that instead of computing it. Where no operation has made the value as it is (it was written to, as by an all-reduce), it
# is copied, and the copy is kept.


_UNCOUNTED = {torch.ops.aten.detach.default}  # a checkpoint itself detaches what backward saves


class _Made(NamedTuple):
    """A tensor that an operation of the block made.

    Attributes:
        storage: a weak reference to its memory.
        version: the number of writes to it when it was made.
        operation: the number of the operation.
        layout: the tensor's sizes, strides, offset and dtype.
    """

    storage: Callable[[], Any]
    version: int
    operation: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


class _Kept(NamedTuple):
    """What an operation returned, with its version when it was kept."""

    value: torch.Tensor
    version: int


class _Numbering(OperatorMode):
    """Numbers operations, and meets names."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def __enter__(self) -> Any:
        self._next, self._names = 0, 0
        self._within = within(names=self._meet)
        self._within.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._within.__exit__(*error)
        return super().__exit__(*error)

    def _take(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if operator in _UNCOUNTED:
            return operator(*args, **kwargs)
        number, self._next = self._next, self._next + 1
        return self._numbered(number, operator, args, kwargs)

    @abstractmethod
    def _numbered(self, number: int, operator: Any, args: Any, kwargs: Any) -> Any:
        """The result of the operation of this number."""

    @abstractmethod
    def _meet(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A value that the block names, as the block goes on with it."""


# The dispatch modes by which policies see what a block computes.
RECOMPUTE_MODES = (*SELECTIVE_MODES, _Numbering)


class Forward(_Numbering):
    """The first run of a block.

    Args:
        save: the names of what is kept.
        seen: the names that there are, which are added to.
    """

    def __init__(self, save: Iterable[str], seen: set[str]) -> None:
        super().__init__()
        self._save, self._seen = frozenset(save), seen
        self._made: dict[int, _Made] = {}
        self.functions: list[Any] = []
        self.kept: dict[int, _Kept] = {}
        self.copied: set[int] = set()  # numbers of the names whose values were copied

    def _numbered(self, number: int, operator: Any, args: Any, kwargs: Any) -> Any:
        given = {storage_id(t.untyped_storage()) for t in pytree.tree_leaves((args, kwargs)) if _is_plain(t)}
        result = operator(*args, **kwargs)
        # Of several results each would have to be kept.
        if _is_plain(result) and (key := storage_id(result.untyped_storage())) not in given:
            layout = tuple(result.size()), tuple(result.stride()), result.storage_offset(), result.dtype
            self._made[key] = _Made(weakref.ref(result.untyped_storage()), version_of(result), number, layout)
        self.functions.append(operator)
        return result

    def _meet(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self._seen.add(name)
        self._names += 1
        if name not in self._save:
            return x
        made = self._maker(x)
        if made is None:
            x = x.clone()
            self.copied.add(self._names)
            made = self._maker(x)
            assert made is not None
        sizes, strides, offset, dtype = made.layout
        with torch.no_grad(), without_top_mode():  # this is no operation of the block
            value = x.detach().view(dtype).as_strided(sizes, strides, offset)
        self.kept[made.operation] = _Kept(value, version_of(x))
        return x

    def _maker(self, x: torch.Tensor) -> _Made | None:
        made = self._made.get(storage_id(x.untyped_storage()))
        alive = made is not None and made.storage() is not None and made.version == version_of(x)
        return made if alive else None


class Again(_Numbering):
    """A run in backward, which takes what the first run kept."""

    def __init__(self, first: Forward) -> None:
        super().__init__()
        self._first = first

    def _numbered(self, number: int, operator: Any, args: Any, kwargs: Any) -> Any:
        earlier = self._first.functions[number : number + 1]
        if earlier != [operator]:
            raise HandleError(
                f"a block with remat(save=) ran {operator} in backward and {earlier[0] if earlier else 'nothing'} in "
                "forward; run the same in both, or leave out save="
            )
        kept = self._first.kept.get(number)
        if kept is None:
            return operator(*args, **kwargs)
        if version_of(kept.value) != kept.version:
            raise HandleError("a named value (sl.remat(save=)) was written to in place; name a copy, or write to one")
        return kept.value.detach()

    def _meet(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self._names += 1
        return x.clone() if self._names in self._first.copied else x


def contexts(save: Iterable[str], seen: set[str]) -> tuple[Forward, Again]:
    """The contexts of the first run of a block and of later ones."""
    first = Forward(save, seen)
    return first, Again(first)


@contextmanager
def noting(seen: set[str]) -> Iterator[None]:
    """A context in which values are named, and none is kept by its name."""

    def note(x: torch.Tensor, name: str) -> torch.Tensor:
        seen.add(name)
        return x

    with within(names=note):
        yield


def require_known(save: Iterable[str], seen: Iterable[str]) -> None:
    """Refuse names that no value has.

    Raises:
        HandleError: names the ones that there are.
    """
    if unknown := sorted(set(save) - set(seen)):
        raise HandleError(
            f"remat(save=...) names {', '.join(map(repr, unknown))}, and no block names a value so (sl.nn.checkpoint_name): "
            f"there {'are ' + ', '.join(map(repr, sorted(seen))) if seen else 'are no names'}"
        )


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


# Running statistics in a block that backward computes again: they are those of one pass.
# Operators of batch_norm write to them without a sign that autograd could see; the first run of a function shows whether it
# has any.


def updated_once(fn: Callable[..., Any], updates: Collection[str]) -> Callable[..., Any]:
    """``fn``, whose calls after the first one leave running statistics as they are.

    Args:
        updates: the operators by which the function around it updates them. Without any, no mode is entered, in which
            compiled functions would be compiled once more.
    """
    called = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if called and updates:
            with _Unchanged():
                return fn(*args, **kwargs)
        called = True
        return fn(*args, **kwargs)

    return run


class _Unchanged(TorchFunctionMode):
    """A mode in which copies of running statistics are updated. Where they are, their values make no difference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ARGUMENTS:
            given = dict(zip(_ARGUMENTS[func], args)) | kwargs
            if given.get("training", given.get("use_input_stats", func is F.instance_norm)):
                given |= {name: given[name].clone() for name in STATISTICS if given.get(name) is not None}
            return func(**given)
        return func(*args, **kwargs)


_AFFINE = "weight", "bias"
_ARGUMENTS = {
    F.batch_norm: ("input", *STATISTICS, *_AFFINE, "training", "momentum", "eps"),
    F.instance_norm: ("input", *STATISTICS, *_AFFINE, "use_input_stats", "momentum", "eps"),
    torch.batch_norm: ("input", *_AFFINE, *STATISTICS, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: ("input", *_AFFINE, *STATISTICS, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}


# Decisions of blocks (`shardlib.common.environment`), which are kept from a block's first run for its recomputation.


def decided_once(fn: Callable[..., Any], hidden_from: tuple[type[TorchDispatchMode], ...]) -> Callable[..., Any]:
    """``fn``, of which every call after the first takes over what the first one decided, in order.

    Args:
        hidden_from: dispatch modes that do not see how a decision is made: they count operations, and recomputation runs
            none of these.
    """
    kept: list[list[torch.Tensor]] = []
    runs = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        decides, number = runs == 1, 0
        around = environment().decides  # of a block that this one lies in, which may be in its recomputation

        def made(decide: Decision) -> list[torch.Tensor]:
            nonlocal number
            if decides:
                with without_modes(hidden_from):
                    kept.append(decide() if around is None else around(decide))
            number += 1
            return kept[number - 1]

        with within(decides=made):
            return fn(*args, **kwargs)

    return call


# Random numbers of blocks that are computed twice.


States = list[tuple[torch.Generator, torch.Tensor]]


class Draws:
    """The states of torch's generators before each block. They are kept once for blocks in which none is drawn from, so that
    host memory for them does not grow with the number of blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: States = []

    def repeated(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, of which every call after the first draws what the first one drew, and leaves generators as they are."""
        first: States = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not first:
                first.extend(self._noted())
                return fn(*args, **kwargs)
            present = states_of_generators(self._device)
            restore_generators(first)
            try:
                return fn(*args, **kwargs)
            finally:
                restore_generators(present)

        return call

    def _noted(self) -> States:
        present = states_of_generators(self._device)
        with no_modes():  # a trace has no values
            if not (self._last and all(map(_equal, present, self._last))):
                self._last = present
        return self._last


def _equal(state: tuple[torch.Generator, torch.Tensor], other: tuple[torch.Generator, torch.Tensor]) -> bool:
    return state[0] is other[0] and torch.equal(state[1], other[1])


# The order in which tensors are moved: that of their memory, so that they come back with the strides they had.


Layout = tuple[tuple[int, ...], tuple[int, ...]]


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """A tensor's elements in the order of memory, and the sizes and strides by which ``as_strided`` makes it of them again.

    What has gaps or shares elements is copied first, without them.
    """
    dense = tensor.detach()
    if not _is_dense(dense):
        dense = dense.contiguous()
    return dense.as_strided((dense.numel(),), (1,)), (tuple(dense.size()), tuple(dense.stride()))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps, in any order, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride()) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


# The checkpoint of a block, by the policy that a plan names.


def checkpointed(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    how: Recompute,
    names: set[str],
    draws: Draws,
    updates: Collection[str],
) -> Any:
    """``fn(*args, **kwargs)``, which backward computes again, with the same draws and decisions.

    Args:
        names: the names of values, which are added to where the policy keeps some by name.
        updates: see `updated_once`.

    Forward mode and `torch.func` keep everything: a recomputation would have neither their tangents nor their levels.
    """
    if transformed():
        with noting(names):
            return fn(*args, **kwargs)
    compiles = torch.compiler.is_compiling()  # torch's own way to keep generators' states is known to its compiler
    fn = fn if compiles else decided_once(updated_once(draws.repeated(fn), updates), RECOMPUTE_MODES)
    leaves, shape = pytree.tree_flatten((args, kwargs))
    # A checkpoint sees the tensors among its arguments alone: those in pytrees are given to it one by one.
    seen = [isinstance(leaf, torch.Tensor) and not isinstance(leaf, Handle) for leaf in leaves]
    others = [None if tensor else leaf for tensor, leaf in zip(seen, leaves)]

    def call(others: list[Any], *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        whole = [next(given) if tensor else other for tensor, other in zip(seen, others)]
        args, kwargs = pytree.tree_unflatten(whole, shape)
        return fn(*args, **kwargs)

    tensors = [leaf for tensor, leaf in zip(seen, leaves) if tensor]
    del args, kwargs, leaves  # what is kept elsewhere must not be kept here
    policy = _policy(how, names, compiles)
    return checkpoint(call, others, *tensors, use_reentrant=False, preserve_rng_state=compiles, **policy)


def policy_of(how: Recompute) -> Callable[..., CheckpointPolicy | bool] | None:
    """What decides by operation whether a result is kept; None where inputs of blocks and named values alone are."""
    if how.policy == "full":
        return None
    return _keep_dots if how.policy == "dots" else how.policy  # type: ignore[return-value]


def _policy(how: Recompute, names: set[str], compiles: bool) -> dict[str, Any]:
    if how.save:
        return {"context_fn": partial(contexts, how.save, names)}
    keeps = policy_of(how)
    if keeps is None:
        return {}

    def made() -> tuple[Any, Any]:
        first, again = create_selective_checkpoint_contexts(keeps)
        return first, again if compiles else _Once(again)

    return {"context_fn": made}


class _Once:
    """A policy's context for recomputation, which gives away what it kept: a further one computes everything.

    The second derivative of a block recomputes it a second time.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context, self._entered = context, nullcontext()  # type: AbstractContextManager[Any], AbstractContextManager[Any]

    def __enter__(self) -> None:
        self._entered, self._context = self._context, nullcontext()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


DOTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    scaled_product,
    *FUSED_ATTENTIONS,
}


def _keep_dots(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DOTS else CheckpointPolicy.PREFER_RECOMPUTE
