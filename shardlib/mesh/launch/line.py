"""What `launch` and its ranks tell each other, over a socket per rank: pickled dictionaries, each behind its length."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("q")


class Line:
    """One end of it."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._arrived = bytearray()
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message, waiting until it is gone. Threads may send at the same time."""
        packed = pickle.dumps(message)
        with self._sending:
            self.socket.sendall(_LENGTH.pack(len(packed)) + packed)

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for bytes, unless the socket does not block, and return the messages they complete; None at the end."""
        try:
            arrived = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not arrived:
            return None
        self._arrived += arrived
        messages = []
        while len(self._arrived) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._arrived)[0]
            if len(self._arrived) < end:
                break
            messages.append(pickle.loads(self._arrived[_LENGTH.size : end]))
            del self._arrived[:end]
        return messages
