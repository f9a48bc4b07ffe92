"""Messages between `launch` and its ranks: pickled dictionaries over one socket per rank, each preceded by its length."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("q")


class Connection:
    """One end of the connection between `launch` and a rank."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._arrived = bytearray()
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message; returns once the socket has taken it. Threads may send at the same time."""
        packed = pickle.dumps(message)
        with self._sending:
            self.socket.sendall(_LENGTH.pack(len(packed)) + packed)

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for bytes (on a blocking socket) and return the messages that they complete; None when the peer has closed."""
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
