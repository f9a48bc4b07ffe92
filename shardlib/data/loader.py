"""Batches of a map-style dataset, the same global batches on any mesh, with one number as their whole state."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardlib.collectives import primitives
from shardlib.common.devices import pins
from shardlib.common.thresholds import Threshold
from shardlib.data.curriculum import Curriculum, as_curriculum
from shardlib.data.order import Epochs, Order, Shuffled, Unshuffled
from shardlib.data.pace import Pace
from shardlib.data.rows import Fetch, as_dataset, fetch_of, no_rows, require_functions, to_device
from shardlib.errors import BatchError, MeshError, TreeError
from shardlib.execute.batches import batch_index
from shardlib.mesh.mesh import Mesh, as_mesh
from shardlib.optim.checks import is_count, is_step
from shardlib.optim.train_state import TrainState
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded

# Indices are computed for some batches at once: 4,096 of one epoch cost 0.8 ms, and 64 cost 0.17 ms.
_INDICES = Threshold(4096)
# Axes whose use needs no plan to be known, being the defaults of transforms: whether the batch varies over them.
_KNOWN = {"data": True, "model": False, "pipe": False, "seq": False}


def loader(
    dataset: Any,
    where: Any,
    batch: int | Pace | Curriculum,
    *,
    seed: int = 0,
    samples: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    drop_last: bool = False,
    over: Sequence[str] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    map: Callable[[Any, int], Any] | None = None,
    workers: int = 0,
    pin: bool | None = None,
) -> Loader:
    """An iterable over this rank's share of the batches of a map-style dataset, shuffled anew in every epoch.

    The n-th sample of the stream is a function of (seed, n) alone, and batches hold samples one after another, which the
    ranks share in order. So all meshes see the same global batches. Epochs follow each other without a gap: a batch may hold
    the end of one and the beginning of the next, and every epoch has every sample once.

    The whole state is the number of samples consumed, `Loader.samples`. A loader that starts from it (``samples=``) goes on
    with the next sample, on any number of ranks and with any size of batches. Every rank makes the loader, with the same
    arguments.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__`` (a list, torch's and Hugging Face's datasets); tensors or NumPy
            arrays, or a dictionary of them, with a row for each sample; `tokens`, `packed`, `mixture`.
        where: the state, or the sharded parameters, whose plan says which ranks share a batch; or a mesh, on which ranks
            along "data" have rows of their own and ranks along "model", "pipe" and "seq" have the same.
        batch: rows of the global batch, a multiple of the number of ranks that share it; or what each step reads, from
            `curriculum`, or a pace of rows alone.
        samples: the number of samples consumed before.
        shuffle: whether each epoch has an order of its own; False for the order of the dataset.
        epochs: the end of the stream; None for one without end. The last batch then has the rows that are left. Ranks' shares
            of it differ by at most one row, and may have no rows. An epoch of a curriculum by difficulty ends when all
            samples that may be drawn by then have been.
        drop_last: whether a last batch with fewer rows is left out, as plans with micro-batches need it.
        over: the axes of a mesh over which the batch varies, where their names do not say it.
        collate: from a list of samples to a batch; by default torch's ``default_collate``, to which lists of numbers in a
            sample are rows of a tensor.
        map: ``map(batch, step)`` -> batch, where ``step`` is the number of batches before this one; called after the
            curriculum has cut the batch.
        workers: processes that read ahead, as in torch's ``DataLoader``, which runs them. What a dataset draws at random in
            them depends on the seed, the rank's share and the sample at which the loop begins.
        pin: whether batches go through pinned memory; by default if the mesh is on a GPU. Batches arrive on its device.

    Raises:
        BatchError: a dataset without length or samples; a batch that does not divide over the ranks; counts out of range;
            a ``collate`` or ``map`` that is no function.
        MeshError: a mesh with axes of which it is not known whether the batch varies over them.
        RankMismatch: ranks with other arguments; names them.

    >>> batches = sl.data.loader(list(range(10)), sl.make_mesh(), batch=4, seed=1)
    >>> first, second, third = (batch.tolist() for _, batch in zip(range(3), batches))
    >>> sorted(first + second + third[:2])  # an epoch; third[2:] begins the next one
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> batches.samples
    12
    """
    dataset, share, plan = as_dataset(dataset), share_of(where, over), as_curriculum(batch)
    order, end = _order(dataset, plan, Key(seed).seed, shuffle, epochs)
    check_rows(plan.rows, share)
    if drop_last and end is not None and end < plan.rows(0):
        raise BatchError(
            f"loader: drop_last=True leaves out the only batch, of {end} samples for {plan.rows(0)} rows: use smaller batches"
        )
    if not is_count(workers):
        raise BatchError(f"loader: workers={workers!r}: 0 for none, or the number of processes that read ahead")
    require_functions("loader", collate, map)
    pinned = pins(share.mesh.device) if pin is None else pin
    # Every epoch that the batches reach into costs a computation of its own.
    ahead = min(_INDICES() * share.count, len(dataset))
    rows = _Rows(fetch_of(dataset, collate), plan, map)
    made = Loader(order, share, plan.rows, end, drop_last, rows, ahead, workers, pinned, seed).seek(samples)
    primitives.require_equal(
        share.mesh,
        "data loaders",
        {
            "samples in the dataset": len(dataset),
            "seed": seed,
            "shuffle": shuffle,
            "the next indices": order.indices(made.samples + np.arange(4)),
            "batch": plan.rows,
            "length": plan.length,
            "surplus": plan.surplus,
            "samples that may be drawn": plan.limits,
            "samples": made.samples,
            "epochs": epochs,
            "drop_last": drop_last,
        },
        "Make the loader with the same dataset and arguments on every rank.",
    )
    return made


class Loader:
    """An iterable over this rank's share of batches, from `loader`.

    A loop goes on where the last one stopped; after one that came to the end it raises `BatchError`, until `seek`. What
    workers have read ahead does not count: `samples` are those in the batches that were handed out.

    Attributes:
        samples: the number of samples consumed, over all ranks.
    """

    samples: int

    def __init__(
        self,
        order: Order,
        share: Share,
        batch: Pace,
        end: int | None,
        drop_last: bool,
        rows: _Rows,
        ahead: int,
        workers: int,
        pin: bool,
        seed: int,
    ) -> None:
        self._order, self._share, self._batch, self._end, self._drop_last = order, share, batch, end, drop_last
        self._rows, self._ahead, self._workers, self._pin, self._seed = rows, ahead, workers, pin, seed

    def seek(self, samples: int) -> Self:
        """Go on after ``samples`` samples, and return this loader. Costs the same for any number.

        Raises:
            BatchError: a number that is negative, or beyond the last epoch.
        """
        if not is_count(samples) or (self._end is not None and samples > self._end):
            most = "" if self._end is None else f", and the last of {self._end}"
            raise BatchError(f"loader: samples={samples!r}: the first is 0{most}; give an integer")
        self.samples, self._over = operator.index(samples), False
        return self

    def state_dict(self) -> dict[str, int]:
        """``{"samples": samples}``, equal on all ranks."""
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            BatchError: it is not what `state_dict` returns.
        """
        if not isinstance(state, Mapping) or "samples" not in state:
            raise BatchError(f"loader: {state!r} is no state of a loader: give what state_dict() returned")
        self.seek(state["samples"])

    def __iter__(self) -> Iterator[Any]:
        if self._over:
            raise BatchError(
                f"loader: its last loop came to the end, at sample {self._end}, and another one has no batches: give epochs= "
                "their number, or begin again by seek(0)"
            )
        start = self.samples
        batches = DataLoader(
            self._rows,
            sampler=self._shares(start),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=self._workers,
            pin_memory=self._pin,
            generator=workers_generator(self._seed, self._share, start),
        )
        for batch in batches:
            if self.samples != start:
                raise BatchError(
                    f"loader: this loop stands at sample {start}, and another loop or seek() moved the loader to "
                    f"{self.samples}: end one before the other"
                )
            start += self._rows_from(start)
            self.samples = start
            yield to_device(batch, self._share.mesh.device)
        self._over = True

    def _rows_from(self, start: int) -> int:
        """The rows of the global batch that begins with sample ``start``."""
        rows = self._batch(self._batch.step_at(start))
        return rows if self._end is None else min(rows, self._end - start)

    def _shares(self, start: int) -> Iterator[tuple[int, np.ndarray, bool]]:
        """For each batch from sample ``start`` on: its step, the indices of this rank's rows, and whether there are any."""
        index, count = self._share.index, self._share.count
        while self._end is None or start < self._end:
            batch, rows = self._batch(self._batch.step_at(start)), self._rows_from(start)
            if self._end is not None and rows < batch:
                if self._drop_last:
                    return
                first, last = index * rows // count, (index + 1) * rows // count
                # A rank without rows reads one all the same, for dtypes and shapes.
                numbers = np.arange(start + first, start + max(last, first + 1))
                yield self._batch.step_at(start), self._order.indices(np.minimum(numbers, self._end - 1)), last > first
                return
            own = start + index * (batch // count) + np.arange(batch // count)
            together = self._alike(start, batch)
            numbers = own + np.arange(together)[:, None] * batch
            for indices in self._order.indices(numbers.reshape(-1)).reshape(numbers.shape):
                yield self._batch.step_at(start), indices, True
                start += batch

    def _alike(self, start: int, batch: int) -> int:
        """How many batches of ``batch`` rows follow each other from sample ``start`` on, as many as are computed at once."""
        most = max(1, self._ahead // batch)
        if self._end is not None:
            most = min(most, (self._end - start) // batch)
        until = self._batch.end_of_run(start)
        return most if until is None else min(most, -(-(until - start) // batch))


class _Rows(Dataset[Any]):
    """This rank's rows of a batch, from what `Loader._shares` says of it. Workers have a copy."""

    def __init__(self, fetch: Fetch, plan: Curriculum, change: Callable[[Any, int], Any] | None) -> None:
        self._fetch, self._plan, self._change = fetch, plan, change

    def __getitem__(self, wanted: tuple[int, np.ndarray, bool]) -> Any:
        step, indices, any_rows = wanted
        batch = self._fetch(indices)
        batch = self._plan.change(batch if any_rows else no_rows(batch), step)
        return batch if self._change is None else self._change(batch, step)


def _unchanged(batch: Any) -> Any:
    return batch


def _order(dataset: Any, plan: Curriculum, seed: int, shuffle: bool, epochs: int | None) -> tuple[Order, int | None]:
    """The dataset's own order (`mixture` has one), the curriculum's or that of the samples; and the number of samples in so
    many epochs."""
    if epochs is not None and not is_step(epochs):
        raise BatchError(f"loader: epochs={epochs!r}: use 1 or more, an integer, or None for a stream without end")
    own, name = getattr(dataset, "order", None), type(dataset).__name__
    if own is not None:
        if plan.index is not None:
            raise BatchError(f"loader: {name} has an order of its own, and so has a curriculum by difficulty: use one")
        if epochs is not None:
            raise BatchError(
                f"loader: epochs={epochs}, and {name} has an order of its own, without epochs: leave it out"
            )
        return own(seed, shuffle), None
    if plan.index is not None:
        order: Epochs = plan.order(dataset, seed, shuffle)
    else:
        order = Shuffled(len(dataset), seed) if shuffle else Unshuffled(len(dataset))
    return order, None if epochs is None else order.end(epochs)


def check_rows(rows: Pace, share: Share) -> None:
    """Refuse global batches that the ranks cannot share equally."""
    for start, batch in zip(rows.starts, rows.values):
        if batch % share.count:
            nearest = max(1, round(batch / share.count)) * share.count
            at = "" if len(rows.values) == 1 else f" at step {start}"
            axes = " × ".join(f"{axis}={share.mesh.shape[axis]}" for axis in share.axes)
            raise BatchError(
                f"loader: a global batch of {batch} rows{at} does not divide over {share.count} ranks ({axes}): use a "
                f"multiple of {share.count}, such as {nearest}"
            )


@dataclass(frozen=True)
class Share:
    """This rank's share of every batch: the ``index``-th of ``count`` equal runs of rows.

    Attributes:
        mesh: the mesh.
        axes: the axes over which the batch varies. Ranks that differ along other axes alone have the same rows.
        index: this rank's index among the ranks with different rows.
        count: the number of ranks with different rows.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    index: int
    count: int


def workers_generator(seed: int, share: Share, samples: int) -> torch.Generator:
    """What the random numbers of workers are seeded by, from sample ``samples`` on: equal on ranks that have the same rows,
    and different on others. (Torch's default generator would be advanced, and dropout with it.)"""
    return torch.Generator().manual_seed(Key(seed).fold_in(f"workers of share {share.index}").fold_in(samples).seed)


def share_of(where: Any, over: Sequence[str] | None) -> Share:
    """The share of this rank, as the plan of sharded parameters or a state says, or by the names of a mesh's axes. Arguments
    and errors as of `loader`."""
    params = where.params if isinstance(where, TrainState) else where
    if isinstance(params, Sharded):
        if over is not None:
            raise MeshError(
                f"loader: over={tuple(over)!r}, and the plan of the parameters says {params.plan.batch_axes}: leave `over` "
                "out, or pass the mesh"
            )
        plan, mesh = params.plan, params.mesh
        return Share(mesh, plan.batch_axes, batch_index(plan, mesh), plan.batch_ranks)
    if isinstance(params, (dict, list, tuple)):
        kind = type(params).__name__
        raise TreeError(f"loader: a plain {kind} does not say which rows are this rank's: pass the mesh or the state")
    mesh = as_mesh(params)
    if over is None:
        unknown = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in _KNOWN]
        if unknown:
            raise MeshError(
                f"loader: whether the batch varies over {', '.join(map(repr, unknown))} of {mesh} is not known: pass sharded "
                f"parameters, or name the axes: over={(*unknown, 'data')!r}, for example"
            )
    axes = tuple(axis for axis in mesh.shape if _KNOWN.get(axis)) if over is None else tuple(over)
    index, count = 0, 1
    for axis in axes:
        size = mesh.group(axis).size  # refuses an axis that the mesh does not have
        index, count = index * size + mesh.coords[axis], count * size
    return Share(mesh, axes, index, count)
