"""The trained leaves of a plan by number, and the runs of them that lie side by side in buckets."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

from shardlib.plan.buckets import Bucket
from shardlib.plan.claims import LeafInfo
from shardlib.plan.placement import Placement


class Numbering:
    """Numbers that are the same on every mesh.

    Args:
        buckets: those of one part of a plan.
        trained: the trained ones of all ranks.
        placements: of all leaves, in the tree's order.
    """

    def __init__(
        self, buckets: tuple[Bucket, ...], trained: tuple[Bucket, ...], placements: tuple[Placement, ...]
    ) -> None:
        self._buckets, self._everyones, self._placements = buckets, trained, placements

    @cached_property
    def infos(self) -> dict[str, LeafInfo]:
        """Path -> what the leaf is as a whole; of the trained leaves of all ranks, in the tree's order."""
        trained = {path for bucket in self._everyones for path in bucket.paths}
        return {
            leaf.path: LeafInfo(leaf.path, leaf.compute.shape, leaf.compute.dtype, leaf.aliases)
            for leaf in self._placements
            if leaf.path in trained
        }

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Path -> number, of the trained leaves of all ranks."""
        return {path: number for number, path in enumerate(self.infos)}

    def runs(self, choice: Callable[[LeafInfo], bool]) -> tuple[Bucket, ...]:
        """The trained leaves that are chosen: runs of them in their buckets, each a bucket of its own."""
        return tuple(part for bucket in self._buckets if bucket.trainable for part in self._runs(bucket, choice))

    def _runs(self, bucket: Bucket, choice: Callable[[LeafInfo], bool]) -> list[Bucket]:
        chosen = [choice(self.infos[path]) for path in bucket.paths]
        starts = [i for i, taken in enumerate(chosen) if taken and not (i and chosen[i - 1])]
        stops = [i + 1 for i, taken in enumerate(chosen) if taken and not (chosen[i + 1 :] or [False])[0]]
        return [bucket.part(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def part_named(self, name: object) -> tuple[str, Bucket] | None:
        """The bucket that ``name`` is of, and what part of it, when it is the name of a bucket or of a run of its leaves."""
        if name in self._bucket_of:
            return str(name), self._bucket_of[str(name)]
        found = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name) if isinstance(name, str) else None
        if found is None or found[1] not in self._bucket_of:
            return None
        return found[1], self._bucket_of[found[1]].part(int(found[2]), int(found[3]))

    def span(self, part: Bucket) -> tuple[str, int, int]:
        """The bucket that ``part`` is a part of, and from where to where it lies in what one rank owns of that."""
        bucket = self._bucket_with[part.paths[0]]
        first = bucket.paths.index(part.paths[0])
        start = sum(bucket.chunks[:first])
        return bucket.name, start, start + part.owned

    @cached_property
    def _bucket_of(self) -> dict[str, Bucket]:
        return {bucket.name: bucket for bucket in self._buckets}

    @cached_property
    def _bucket_with(self) -> dict[str, Bucket]:
        return {path: bucket for bucket in self._buckets for path in bucket.paths}
