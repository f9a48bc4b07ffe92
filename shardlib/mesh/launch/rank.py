"""One rank of `launch`, in a process of its own."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import cloudpickle
import torch
import torch.distributed as dist

from shardlib.mesh.launch.line import Line
from shardlib.mesh.launch.orphans import end_with
from shardlib.mesh.mesh import current_mesh, make_mesh
from shardlib.mesh.transport.process import waiting

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


def main(job: int, line: int, parent: int) -> None:
    """Run the pickled function of file ``job`` and tell ``parent`` over the socket ``line`` what came of it."""
    end_with(parent)
    told = Line(socket.socket(fileno=line))
    done = threading.Event()
    threading.Thread(target=_answer, args=(told, done), daemon=True).start()
    try:
        with mmap.mmap(job, 0, access=mmap.ACCESS_READ) as pickled:
            fn, args, shape, timeout = cloudpickle.loads(pickled)
        mesh = make_mesh(timeout=timeout, **shape)
        current_mesh.set(mesh)
        value = cloudpickle.dumps(fn(mesh, *args))
    except BaseException:
        sys.stdout.flush()
        told.send(raised=traceback.format_exc(), at=time.time())
        # Skip torch's tear-down: it may wait for peers that will never answer.
        os._exit(1)
    sys.stdout.flush()
    told.send(returned=value)
    done.wait()  # until all have: a peer may still receive what this one sent
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(line: Line, done: threading.Event) -> None:
    """Tell the parent what this rank does, whenever it asks, until it says that all are done."""
    while (messages := line.receive()) is not None:
        for message in messages:
            if "done" in message:
                done.set()
            else:
                line.send(does=_what_it_does(), wait=waiting[-1] if waiting else None)


def _what_it_does() -> str:
    """What the main thread waits in, and where the user's code called it."""
    what = f"waits in {waiting[-1][1]}" if waiting else "runs"
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == "<string>":
        return f"{what}, outside of the function that it was to run"
    return f"{what}\n{traceback.format_stack(frame, 1)[0].rstrip()}"
