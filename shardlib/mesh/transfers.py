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
        event = self._event  # another thread may be waiting
        return event is None or event.query()

    def wait(self) -> None:
        """Return once the copy is complete, so that the host may read or write its memory."""
        if (event := self._event) is not None:
            event.synchronize()
        self._event = self._source = None

    def join(self) -> None:
        """Make what the device is given from now on, on the current stream, wait for the copy. Returns at once."""
        if (event := self._event) is not None:
            torch.accelerator.current_stream(event.device).wait_event(event)


class Transfers:
    """The copies of one rank. A copy comes after what the current stream was given before it.

    Where the device's memory is the host's, a copy is complete when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.Stream] = {}

    @property
    def apart(self) -> bool:
        """Whether the device has a memory of its own."""
        return pins(self._device)

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
