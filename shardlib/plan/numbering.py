"""Numbers for the trained leaves of a plan, and the runs of leaves that lie side by side in buckets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

from shardlib.plan.buckets import Bucket
from shardlib.plan.claims import LeafInfo
from shardlib.plan.placement import Placement


class Numbering:
    """Numbers of trained leaves, the same on every mesh.

    Args:
        buckets: the buckets of a plan, or of one part of it.
        trained: the trained buckets of all ranks.
        placements: the placements of all leaves, in the tree's order.
    """

    def __init__(
        self, buckets: tuple[Bucket, ...], trained: tuple[Bucket, ...], placements: tuple[Placement, ...]
    ) -> None:
        self._buckets, self._everyones, self._placements = buckets, trained, placements

    @cached_property
    def infos(self) -> dict[str, LeafInfo]:
        """Path -> global shape and dtype of the leaf, for the trained leaves of all ranks, in the tree's order."""
        trained = {path for bucket in self._everyones for path in bucket.paths}
        return {
            leaf.path: LeafInfo(leaf.path, leaf.compute.shape, leaf.compute.dtype, leaf.aliases)
            for leaf in self._placements
            if leaf.path in trained
        }

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Path -> number, for the trained leaves of all ranks."""
        return {path: number for number, path in enumerate(self.infos)}

    def runs(self, choice: Callable[[LeafInfo], bool]) -> tuple[Bucket, ...]:
        """The runs of trained leaves that ``choice`` accepts, each as a bucket of its own."""
        return tuple(run for bucket in self._buckets if bucket.trainable for run in self._runs(bucket, choice))

    def _runs(self, bucket: Bucket, choice: Callable[[LeafInfo], bool]) -> list[Bucket]:
        chosen = [choice(self.infos[path]) for path in bucket.paths]
        starts = [i for i, taken in enumerate(chosen) if taken and not (i and chosen[i - 1])]
        stops = [i + 1 for i, taken in enumerate(chosen) if taken and not (chosen[i + 1 :] or [False])[0]]
        return [bucket.run(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def run_named(self, name: object) -> tuple[str, Bucket] | None:
        """The bucket and the run that ``name`` stands for; None when it is the name of neither a bucket nor a run."""
        if name in self._bucket_of:
            return str(name), self._bucket_of[str(name)]
        match = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name) if isinstance(name, str) else None
        if match is None or match[1] not in self._bucket_of:
            return None
        return match[1], self._bucket_of[match[1]].run(int(match[2]), int(match[3]))

    def run_along(self, path: Sequence[object]) -> tuple[str, Bucket] | None:
        """`run_named` of the last entry of a path that is such a name: a leaf may be a part of what stands for a run."""
        return next(filter(None, map(self.run_named, reversed(path))), None)

    def bucket_with(self, path: object) -> str | None:
        """The name of the bucket that holds the leaf at ``path``; None for what is no such path."""
        return self._bucket_with[str(path)].name if path in self._bucket_with else None

    def span(self, run: Bucket) -> tuple[str, int, int]:
        """The name of the bucket that holds ``run``, and the run's start and stop in one rank's elements of that bucket."""
        bucket = self._bucket_with[run.paths[0]]
        first = bucket.paths.index(run.paths[0])
        start = sum(bucket.chunks[:first])
        return bucket.name, start, start + run.owned

    @cached_property
    def _bucket_of(self) -> dict[str, Bucket]:
        return {bucket.name: bucket for bucket in self._buckets}

    @cached_property
    def _bucket_with(self) -> dict[str, Bucket]:
        return {path: bucket for bucket in self._buckets for path in bucket.paths}
