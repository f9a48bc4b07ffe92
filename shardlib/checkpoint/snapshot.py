"""A copy of fragments in host memory, which a background thread can save while the next steps change the state."""

from __future__ import annotations

import torch

from shardlib.checkpoint.decoding import Saving
from shardlib.checkpoint.fragments import Fragment
from shardlib.common.devices import pins
from shardlib.common.pages import pages

_ALIGNMENT = 64  # bytes


class Snapshot:
    """Host memory for copies of fragments. It is allocated once and reused; pinned, where fragments lie on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, fragments: Saving) -> tuple[list[Fragment], torch.Event | None]:
        """The fragments with copies of their data, and an event after which copies from a device are complete.

        The copies are the values at the time of the call, whatever happens to the originals afterwards. They overwrite those
        of the call before.
        """
        places, total = [], 0
        for fragment in fragments.outlines:
            places.append(total)
            size = fragment.data.numel() * fragment.data.element_size()
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        device = next((fragment.data.device for fragment in fragments.outlines if pins(fragment.data.device)), None)
        if self._memory.numel() < total:
            self._memory = pages(total, pinned=device is not None)
        copies = []
        for fragment, at in zip(fragments, places, strict=True):
            data = fragment.data.detach()
            host = self._memory[at : at + data.numel() * data.element_size()].view(data.dtype)
            copies.append(fragment._replace(data=host.copy_(data, non_blocking=device is not None)))
        if device is None:
            return copies, None
        # A later step's kernels come after the copies on the same stream; only the thread that saves has to wait for them.
        event = torch.Event(device)
        event.record()
        return copies, event
