"""The exchanges of an update that is made bucket by bucket: all ranks make them, up to the first that one of them cannot."""

from __future__ import annotations

import contextlib

import torch

from shardlib.collectives.attempts import Stopped
from shardlib.collectives.primitives import sum_over
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming


class Exchanges:
    """What ranks tell each other before each exchange of an update, and at its end: whether one of them has failed.

    It is one number, whose memory is there from the beginning. So a rank that has failed for want of memory needs none to
    stop the others, who would wait for it in an exchange that it has no memory for.

    Args:
        axes: the axes along which all ranks make the same exchanges.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh, self._axes, self._open = mesh, axes, False
        self._failed = torch.zeros(1, device=mesh.device)

    def begin(self) -> None:
        """Begin an update."""
        self._open = True

    def require_all(self) -> None:
        """Return once no rank has failed before its next exchange; the memory for it is there. Collective in an update.

        Raises:
            Stopped: another rank has failed.
        """
        if self._open:
            self._tell(False)

    def end(self) -> None:
        """End an update whose exchanges are made. Collective.

        Raises:
            Stopped: another rank has failed.
        """
        self.require_all()
        self._open = False

    def fail(self) -> None:
        """End an update that has failed on this rank: stop the others, unless it was they who stopped this one."""
        if self._open:
            with contextlib.suppress(Stopped):
                self._tell(True)

    @naming("the agreement to go on with an update")
    def _tell(self, failed: bool) -> None:
        sum_over(self._mesh, self._axes, self._failed.fill_(failed))
        if self._failed.item():
            self._open = False
            raise Stopped
