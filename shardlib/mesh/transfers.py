"""Copies between the device's memory and the host's, on streams of their own, while the device computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardlib.common.devices import pins


class Transfer:
    """A copy that may still be under way.

    Args:
        event: comes when the copy is complete; None for a copy that is.
        source: what is copied, whose memory is kept until then.
    """

    def __init__(self, event: torch.Event | None = None, source: torch.Tensor | None = None) -> None:
        self._event, self._source = event, source

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return once the copy is complete, so that the host may read or write its memory."""
        if self._event is not None:
            self._event.synchronize()
        self._event = self._source = None

    def join(self) -> None:
        """Make what the device is given from now on, on the current stream, wait for the copy. Returns at once."""
        if self._event is not None:
            torch.accelerator.current_stream(self._event.device).wait_event(self._event)


class Transfers:
    """The copies of one rank. A copy comes after what the current stream was given before it.

    Where the device's memory is the host's, and in a trace, a copy is complete when the call returns.

    Args:
        abstract: whether there are no ranks, so that nothing is copied.

    Attributes:
        apart: whether the device has a memory of its own.
    """

    def __init__(self, device: torch.device, abstract: bool = False) -> None:
        self._device = device
        self.apart = pins(device) and not abstract
        self._streams: dict[str, torch.Stream] = {}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Copy ``source`` to ``target``, one of which is in pinned memory and the other on the device."""
        return self.start(
            "up" if source.device.type == "cpu" else "down", lambda: target.copy_(source, non_blocking=True), source
        )

    def start(self, way: str, copies: Callable[[], object], source: torch.Tensor | None = None) -> Transfer:
        """Start ``copies()``, which all go one ``way``: "up" to the device, or "down" to the host."""
        if not self.apart:
            copies()
            return Transfer()
        if way not in self._streams:
            self._streams[way] = torch.Stream(device=self._device)
        stream = self._streams[way]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            copies()
            event = torch.Event(self._device)
            event.record(stream)
        return Transfer(event, source)
