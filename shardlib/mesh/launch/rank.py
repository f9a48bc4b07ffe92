"""The process of one rank of `launch`."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
import traceback

import cloudpickle
import torch.distributed as dist

from shardlib.common.environment import settle
from shardlib.mesh.launch.connection import Connection
from shardlib.mesh.launch.orphans import end_with
from shardlib.mesh.mesh import make_mesh
from shardlib.mesh.transport.activity import here


def main(job: int, end: int, parent: int) -> None:
    """Run the pickled function in file ``job`` and send its value, or its traceback, over the socket ``end``.

    Args:
        job, end: file descriptors.
        parent: process id of `launch`'s process.
    """
    end_with(parent)
    connection = Connection(socket.socket(fileno=end))
    done = threading.Event()
    threading.Thread(target=_answer, args=(connection, done), daemon=True).start()
    try:
        with mmap.mmap(job, 0, access=mmap.ACCESS_READ) as pickled:
            fn, args, shape, timeout = cloudpickle.loads(pickled)
        mesh = make_mesh(timeout=timeout, **shape)
        settle(mesh=mesh)
        value = cloudpickle.dumps(fn(mesh, *args))
    except BaseException:
        sys.stdout.flush()
        connection.send(raised=traceback.format_exc(), at=time.time())
        # Skip torch's tear-down: it may wait for peers that will never answer.
        os._exit(1)
    sys.stdout.flush()
    connection.send(returned=value)
    done.wait()  # until all ranks have returned: a peer may still receive what this rank sent
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(connection: Connection, done: threading.Event) -> None:
    """Answer the parent's questions what this rank does, and set ``done`` when the parent says that all ranks have
    returned."""
    while (messages := connection.receive()) is not None:
        for message in messages:
            if "done" in message:
                done.set()
            else:
                connection.send(state=here().state())
