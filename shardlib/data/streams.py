"""Batches of iterable datasets that save a state of their own (``state_dict``, ``load_state_dict``), sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shardlib.collectives import primitives
from shardlib.common.devices import pins
from shardlib.data.curriculum import Curriculum
from shardlib.data.loader import Share, share_of, workers_generator
from shardlib.data.pace import Pace
from shardlib.data.rows import collated, require_functions, to_device
from shardlib.errors import BatchError
from shardlib.optim.checks import is_step


def streams(
    datasets: Sequence[Iterable[Any]],
    where: Any,
    batch: int,
    *,
    over: Sequence[str] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    map: Callable[[Any, int], Any] | None = None,
    ahead: bool = False,
) -> Streams:
    """An iterable over this rank's share of batches whose rows come from several iterable datasets, as many from each.

    Every global batch has batch / len(datasets) rows of each dataset, in order. Each rank reads only the datasets whose rows
    are its own. So all meshes whose number of sharing ranks divides the number of datasets see the same global batches, and a
    state saved on one goes on on another. A dataset that ends begins again, with ``set_epoch(epoch)`` before if it has that.

    For a state to be saved, each dataset, or its iterator, has ``state_dict()`` and ``load_state_dict(state)``, as for
    torchdata's StatefulDataLoader; Hugging Face's ``IterableDataset`` does. Without it, one loop can read them.

    Args:
        datasets: the same on every rank; a rank iterates over its own alone. ``dataset.shard(...)`` or lists of files make
            several of one.
        where, over, collate, map: as in `loader`.
        batch: rows of the global batch, a multiple of the number of datasets.
        ahead: whether a process reads ahead.

    Raises:
        BatchError: numbers that do not divide; an object that cannot be iterated over; a dataset without samples; a
            ``collate`` or ``map`` that is no function.

    >>> class Numbers:  # a dataset with a state
    ...     def __init__(self, start):
    ...         self.start, self.at = start, 0
    ...     def __iter__(self):
    ...         while True:
    ...             self.at += 1
    ...             yield self.start + self.at - 1
    ...     def state_dict(self):
    ...         return self.at
    ...     def load_state_dict(self, state):
    ...         self.at = state
    >>> batches = sl.data.streams([Numbers(0), Numbers(100)], sl.make_mesh(), batch=4)
    >>> next(iter(batches)).tolist()
    [0, 1, 100, 101]
    >>> batches.state_dict()
    {'samples': 4, 'streams': [{'epoch': 0, 'inner': 2}, {'epoch': 0, 'inner': 2}]}
    """
    share = share_of(where, over)
    if not hasattr(datasets, "__len__"):
        kind = type(datasets).__name__
        raise BatchError(f"streams: {kind} is no list of datasets: pass [dataset], or several parts of it")
    if not is_step(batch):
        what = "; rows change in sl.data.loader alone" if isinstance(batch, (Pace, Curriculum)) else ""
        raise BatchError(f"streams: batch={batch!r}: give a number of rows, an integer of at least 1{what}")
    count = len(datasets)
    if not count or count % share.count or batch % count:
        raise BatchError(
            f"streams: {count} datasets, {share.count} ranks that share a batch, batches of {batch} rows: the datasets must "
            "be a multiple of the ranks, and the rows of the datasets"
        )
    wrong = [type(dataset).__name__ for dataset in datasets if not hasattr(dataset, "__iter__")]
    if wrong:
        raise BatchError(f"streams: {', '.join(wrong)} cannot be iterated over; with an index use sl.data.loader")
    require_functions("streams", collate, map)
    return Streams(datasets, share, batch, collate or collated, map, ahead)


class Streams:
    """An iterable over this rank's share of batches, from `streams`. A loop goes on where the last one stopped.

    Attributes:
        samples: the number of samples consumed, over all ranks.
    """

    samples: Any

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        share: Share,
        batch: int,
        collate: Callable[[list[Any]], Any],
        change: Callable[[Any, int], Any] | None,
        ahead: bool,
    ) -> None:
        self.samples = 0
        self._share, self._batch, self._count, self._ahead = share, batch, len(datasets), ahead
        each = len(datasets) // share.count
        self._own = range(share.index * each, (share.index + 1) * each)
        self._datasets = [datasets[index] for index in self._own]
        self._states: list[Any] = [None] * each
        self._rows, self._collate, self._change = batch // len(datasets), collate, change

    def state_dict(self) -> dict[str, Any]:
        """The samples consumed, and the state of every dataset, equal on all ranks. Every rank must call it.

        Raises:
            BatchError: a dataset saves no state.
        """
        states = dict(zip(self._own, self._states))
        for others in primitives.all_gather_object(self._share.mesh, self._share.axes, states):
            states |= others
        without = [str(index) for index, state in states.items() if state is not None and state["inner"] is None]
        if without:
            raise BatchError(
                f"streams: datasets {', '.join(without)} have no state_dict(), nor have their iterators: give them both "
                "state_dict and load_state_dict"
            )
        return {"samples": self.samples, "streams": [states[index] for index in range(self._count)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, on the same or another number of ranks.

        Raises:
            BatchError: the state is of another number of datasets, or is not what `state_dict` returns.
        """
        if not isinstance(state, Mapping) or not {"samples", "streams"} <= state.keys():
            raise BatchError(f"streams: {state!r} is no state of streams: give what state_dict() returned")
        if len(state["streams"]) != self._count:
            raise BatchError(f"streams: a state of {len(state['streams'])} datasets, and these are {self._count}")
        self.samples, self._states = state["samples"], [state["streams"][index] for index in self._own]

    def __iter__(self) -> Iterator[Any]:
        self._require_going_on()
        step = self.samples // self._batch
        reading = _Reading(self._datasets, self._states, self._rows, self._collate, self._change, step)
        batches = DataLoader(
            reading,
            batch_size=None,
            num_workers=int(self._ahead),
            pin_memory=pins(self._share.mesh.device),
            generator=workers_generator(0, self._share, self.samples),
        )
        for batch, states in batches:
            self.samples, self._states = self.samples + self._batch, states
            yield to_device(batch, self._share.mesh.device)

    def _require_going_on(self) -> None:
        """Raise `BatchError` for datasets that were read before and would begin again. An iterator goes on, in this
        process."""
        begun = [
            str(index)
            for index, dataset, state in zip(self._own, self._datasets, self._states)
            if state is not None and state["inner"] is None and (self._ahead or not isinstance(dataset, Iterator))
        ]
        if begun:
            raise BatchError(
                f"streams: datasets {', '.join(begun)} have no state_dict(), and would begin again in a second loop: take "
                "the batches of all loops from one iterator, rows = iter(batches), or give them both state_dict and "
                "load_state_dict"
            )


class _Reading(IterableDataset):
    """Batches of some datasets, each with the datasets' states after it. A worker has a copy."""

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        states: Sequence[Any],
        rows: int,
        collate: Callable[[list[Any]], Any],
        change: Callable[[Any, int], Any] | None,
        step: int,
    ) -> None:
        self._datasets, self._states, self._rows = datasets, states, rows
        self._collate, self._change, self._step = collate, change, step

    def __iter__(self) -> Iterator[tuple[Any, list[Any]]]:
        open_ = [_Stream(dataset, state) for dataset, state in zip(self._datasets, self._states)]
        step = self._step
        while True:
            batch = self._collate([stream.next() for stream in open_ for _ in range(self._rows)])
            yield batch if self._change is None else self._change(batch, step), [stream.state() for stream in open_]
            step += 1


class _Stream:
    """One dataset, begun again whenever it ends."""

    def __init__(self, dataset: Any, state: Any) -> None:
        self._dataset = dataset
        self._epoch = 0 if state is None else state["epoch"]
        self._begin(None if state is None else state["inner"])

    def _begin(self, inner: Any) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        on_dataset = hasattr(self._dataset, "load_state_dict")
        if inner is not None and on_dataset:
            self._dataset.load_state_dict(inner)
        self._iterator = iter(self._dataset)
        if inner is not None and not on_dataset:
            self._iterator.load_state_dict(inner)

    def next(self) -> Any:
        for _ in range(2):
            for sample in self._iterator:
                return sample
            self._epoch += 1
            self._begin(None)
        raise BatchError(f"streams: {type(self._dataset).__name__} has no samples")

    def state(self) -> dict[str, Any]:
        holder = self._dataset if hasattr(self._dataset, "load_state_dict") else self._iterator
        return {"epoch": self._epoch, "inner": holder.state_dict() if hasattr(holder, "state_dict") else None}
