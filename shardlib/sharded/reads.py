"""Reads of parameters on disk while a function runs, which fail on all ranks or on none.

A rank that cannot read a unit goes on with zeros in its place, so that it takes part in all that other ranks wait for. At the
end the ranks tell each other, in an exchange that they make anyway where there is one, and all of them raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.collectives import primitives
from shardlib.collectives.attempts import error_of
from shardlib.collectives.primitives import sum_over
from shardlib.mesh.mesh import Mesh
from shardlib.sharded.tree import Sharded


class Reads:
    """The reads of one run of a function. What it finds is meaningless once one has failed."""

    def __init__(self, params: Sharded) -> None:
        self._mesh: Mesh = params.mesh
        self._files = None if params.on_disk is None else params.on_disk.files
        if self._files is not None:
            self._files.unread = None

    @property
    def failed(self) -> bool:
        """Whether this rank could not read a unit."""
        return self._files is not None and self._files.unread is not None

    def require(self, axes: Sequence[str]) -> None:
        """Raise the errors of any rank on all ranks along ``axes``. Collective over these, if parameters are on disk."""
        if self._files is None or self._mesh.alone:
            return
        failed = torch.tensor([float(self.failed)], device=self._mesh.device)
        sum_over(self._mesh, tuple(axes), failed)
        if failed.item():
            self.explain(axes)

    def explain(self, axes: Sequence[str]) -> None:
        """As `require`, where the ranks know that one of them differs from the others.

        Raises:
            StorageError: where a unit could not be read; names the file and the remedy.
            RankFailure: elsewhere; names the ranks, with their errors.
        """
        if self._files is None:
            return
        failure, self._files.unread = self._files.unread, None
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        everyone = primitives.all_gather_object(self._mesh, axes, (self._mesh.rank, text))
        problems = [(rank, problem) for rank, problem in everyone if problem]
        if problems:
            error = error_of(failure, problems, "parameters on disk could not be read")
            error.add_note(
                "Nothing was updated: the parameters and the state that were given can be saved, and used again"
            )
            raise error
