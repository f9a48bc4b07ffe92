"""Storages of one device as they come and go in a step, each with a name."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import OperatorMode, storage_id
from shardlib.mesh.transport.activity import here
from shardlib.optim.train_state import TrainState
from shardlib.report.profile.timeline import Part, StepTimeline
from shardlib.tree import flatten, leaves_of

_GRADIENT = "the gradient of "


class Name(NamedTuple):
    """What some bytes are for.

    Attributes:
        kind: one of `shardlib.report.profile.memory.KINDS`. "gathered" parameters and "gradients" are of units, "activations"
            are what forward computes, "computed again" what a checkpoint does, "backward" what backward computes beside
            gradients of parameters; "other" is what the step makes for itself.
        of: the leaf's path, the unit, the block's unit with the name of the value (`sl.nn.checkpoint_name`) if it has one, or
            what a message is for.
    """

    kind: str
    of: str


class Change(NamedTuple):
    """Bytes that came to be, or, below 0, went.

    Attributes:
        when: seconds from the beginning of the step; 0 for what was there.
        part: the part of the step that ran.
    """

    when: float
    name: Name
    bytes: int
    part: Part


Known = Iterator[tuple[str, str, torch.Tensor, int]]  # kind, name, a tensor, and how many bytes of its storage


def leaves_of_state(state: TrainState) -> Known:
    """Every leaf of a state, those in flat buffers by their own paths."""
    plan = state.params.plan
    for bucket in plan.buckets:
        if bucket.name in state.params.in_memory:
            buffer = state.params.in_memory[bucket.name]
            for path, elements in zip(bucket.paths, bucket.segment_sizes(bucket.param_level), strict=True):
                yield "parameters", path, buffer, elements * buffer.itemsize
    flat = {bucket.name: bucket for bucket in plan.trained}
    for path, leaf in tensors_of(state.opt._asdict()):
        name = max((name for name in flat if path.endswith(f"/{name}")), key=len, default=None)
        if name is None or leaf.numel() != flat[name].owned:
            yield "optimizer", path, leaf, leaf.nbytes
            continue
        what = path.removesuffix(f"/{name}")
        for leaf_path, elements in zip(flat[name].paths, flat[name].segment_sizes(flat[name].levels), strict=True):
            yield "optimizer", f"{what}/{leaf_path}", leaf, elements * leaf.itemsize
    for path, leaf in tensors_of(state.comm):
        yield "residuals", path, leaf, leaf.nbytes
    for path, leaf in tensors_of(state.buffers):
        yield "buffers", path, leaf, leaf.nbytes


def tensors_of(tree: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a pytree with their paths."""
    paths, leaves, _ = flatten(tree)
    return [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]


class Names(OperatorMode):
    """Notes storages of one device as they come and go, with names.

    Args:
        units: what buckets are called in the names of their gathers.
    """

    def __init__(self, timeline: StepTimeline, device: torch.device, units: set[str]) -> None:
        super().__init__()
        self._timeline, self._device, self._units = timeline, device, units
        self.changes: list[Change] = []
        self._alive: dict[int, list[tuple[Name, int]]] = {}  # identity of a storage -> its names with their bytes
        self._made: dict[int, int] = {}  # identity of a storage that the step has made -> the number of that change

    def know(self, leaves: Known) -> None:
        """Note tensors that are there."""
        for key, (storage, names) in self._by_storage(leaves).items():
            if key not in self._alive:
                self._alive[key] = []
                weakref.finalize(storage, self._free, key)
                for name, count in names:
                    self._add(key, name, count)

    def kept(self, leaves: Known) -> list[Change]:
        """The changes, with what the step has made for the state after it under the names of that state's leaves."""
        changes = [[change] for change in self.changes]
        for key, (_, names) in self._by_storage(leaves).items():
            number = self._made.get(key)
            if number is not None and self.changes[number].name.kind in ("update", "other"):
                changes[number] = [self.changes[number]._replace(name=name, bytes=count) for name, count in names]
        return list(itertools.chain(*changes))

    def _by_storage(self, leaves: Known) -> dict[int, tuple[torch.UntypedStorage, list[tuple[Name, int]]]]:
        """Identity of a storage -> it, and its names with their bytes. What it has beyond its leaves is the last one's:
        padding, or what that is a view of."""
        found: dict[int, tuple[torch.UntypedStorage, list[tuple[Name, int]]]] = {}
        left: dict[int, int] = {}  # bytes without a name
        for kind, of, tensor, count in leaves:
            if self._counts(tensor):
                storage = tensor.untyped_storage()
                key = storage_id(storage)
                named = min(count, left.setdefault(key, storage.nbytes()))
                found.setdefault(key, (storage, []))[1].append((Name(kind, of), named))
                left[key] -= named
        for key, unnamed in left.items():
            name, count = found[key][1][-1]
            found[key][1][-1] = name, count + unnamed
        return found

    def named(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Meet a value that the model names."""
        held = self._alive.get(storage_id(x.untyped_storage())) if self._counts(x) else None
        if held and held[0][0].kind in ("activations", "computed again"):
            (before, count), part = held[0], self._timeline.now
            after = Name(before.kind, f"{before.of}: {name}")
            held[0] = after, count
            self.changes += [self._change(before, -count, part), self._change(after, count, part)]
        return x

    def _take(self, operator: Any, args: Any, kwargs: Any) -> Any:
        for value in leaves_of((args, kwargs)):
            self._meet(value, made=False)
        result = operator(*args, **kwargs)
        for value in leaves_of(result):
            self._meet(value, made=True)
        return result

    def _meet(self, value: Any, made: bool) -> None:
        """Note what an operator has made; what it was given and nobody has made is there anyway, as constants are that a loss
        function closes over, and so are views of it."""
        if not isinstance(value, torch.Tensor) or not self._counts(value):
            return
        storage = value.untyped_storage()
        if (key := storage_id(storage)) not in self._alive:
            self._alive[key] = []
            if made:
                self._made[key] = len(self.changes)
                self._add(key, self._name(), storage.nbytes())
            weakref.finalize(storage, self._free, key)

    def _counts(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.device.type == self._device.type

    def _name(self) -> Name:
        """The name of what is made now: by what an exchange or a unit's gradient is for, or by the part of the step."""
        path, part = here().path, self._timeline.now
        if path in self._units:
            return Name("gathered", path)
        if path.startswith(_GRADIENT):
            return Name("gradients", path.removeprefix(_GRADIENT))
        if part.kind == "compute":
            kind = {"forward": "activations", "recompute": "computed again"}.get(part.way, part.way)
            return Name(kind, part.name)
        if part.kind == "optimizer" or path == "the optimizer":
            return Name("update", part.name or "the optimizer")
        return Name("messages", path) if path or part.kind in ("communication", "wait") else Name("other", part.kind)

    def _add(self, key: int, name: Name, count: int) -> None:
        self._alive[key].append((name, count))
        self.changes.append(self._change(name, count, self._timeline.now))

    def _free(self, key: int) -> None:
        part = self._timeline.now
        self._made.pop(key, None)
        self.changes += [self._change(name, -count, part) for name, count in self._alive.pop(key)]

    def _change(self, name: Name, count: int, part: Part) -> Change:
        return Change(time.perf_counter() - self._timeline.began, name, count, part)
