"""Real gloo processes that live for the whole test session and run one function after another."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import cloudpickle

from helpers import gpu

TIMEOUT = 40.0  # seconds for one collective
_HARDLY = 1 / 60  # of the patience, as processor time of all
_IMPORTED_ONCE = ("shardlib", "helpers.decoders")  # which take most of a process's start


class Pool:
    """``run(fn, *args, mesh=...)`` is like `shardlib.simulate`, on some or all of the processes."""

    def __init__(self, size, timeout=TIMEOUT, patience=TIMEOUT + 20, device="cpu"):
        """``timeout`` is that of a collective; a function that has not come back is stopped after ``patience`` seconds in
        which the processes hardly computed: on a busy machine they may take longer, and do not hang.

        ``device`` is that of the meshes: "cpu", "cuda" (all processes share the GPUs), or "rig" for `helpers.rig`.
        """
        self.size, self._timeout, self._patience, self._device = size, timeout, patience, device
        self._ends = []  # of a connection with each process
        self._parent = None

    def run(self, fn, *args, mesh):
        """The ranks' values. What a rank raised is raised here, with the other ranks' outcomes as a note."""
        outcomes = self.outcomes(fn, *args, mesh=mesh)
        failed = [(rank, value) for rank, (good, value) in enumerate(outcomes) if not good]
        if failed:
            failed[0][1].add_note(f"ranks that raised: {[rank for rank, _ in failed]} of {len(outcomes)}")
            raise failed[0][1]
        return [value for _, value in outcomes]

    def outcomes(self, fn, *args, mesh):
        """``(True, value)`` or ``(False, error)`` per rank."""
        if not self._ends:
            self._start()
        message = cloudpickle.dumps((fn, args, dict(mesh)))
        answers = [None] * self.size

        def ask(rank):
            end = self._ends[rank]
            try:
                end.write(struct.pack("q", len(message)) + message)
                end.flush()
                answers[rank] = _receive(end)
            except OSError:
                answers[rank] = _ended()

        threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        least = _HARDLY * self._patience
        computed, late = -least, [*range(self.size)]
        while late and (now := self._computed()) >= computed + least:
            computed, deadline = now, time.monotonic() + self._patience
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            late = [rank for rank, answer in enumerate(answers) if answer is None]
        if late:
            self.stop()
            raise TimeoutError(
                f"ranks {late} of {self.size} did not answer, and hardly computed for {self._patience:g} s: a hang"
            )
        return [answer for answer in answers if answer != "not part of the mesh"]

    def _computed(self):
        """Seconds of processor time of all processes."""
        children = Path(f"/proc/{self._parent.pid}/task/{self._parent.pid}/children")
        times = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in children.read_text().split()
        )
        return sum(int(fields[11]) + int(fields[12]) for fields in times) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        if self._parent:
            os.killpg(self._parent.pid, signal.SIGKILL)
            self._parent.wait()
        self._ends, self._parent = [], None

    def _start(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        here = Path(__file__).resolve()
        environment = (gpu.shown() if self._device == "cuda" else os.environ) | {
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(here.parents[1]), *filter(None, sys.path)]),
        }
        pairs = [socket.socketpair() for _ in range(self.size)]
        theirs = [their.fileno() for _, their in pairs]
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "helpers.pool", str(self._timeout), self._device, *map(str, theirs)],
            env=environment,
            pass_fds=theirs,
            start_new_session=True,
        )
        for ours, their in pairs:
            their.close()
            self._ends.append(ours.makefile("rwb"))
            ours.close()
        # Starting may take long on a busy machine, and is no hang: the clock runs from here.
        for end in self._ends:
            _receive(end)


def _ended():
    return False, RuntimeError("the process ended")


def _send(stream, value):
    message = cloudpickle.dumps(value)
    stream.write(struct.pack("q", len(message)) + message)
    stream.flush()


def _receive(stream):
    header = stream.read(8)
    if len(header) < 8:
        return _ended()
    return pickle.loads(stream.read(struct.unpack("q", header)[0]))


def _fork(timeout, device, ends):
    """One process a connection, each of which takes its imports over from this one."""
    os.dup2(2, 1)  # under pytest's workers what tests print would mix with what those say to each other
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    gc.freeze()  # which stays as it is: no collection looks through it
    for rank, end in enumerate(ends):
        if os.fork() == 0:
            for other in {*ends} - {end}:  # the tests' process sees a connection's end when this one has ended
                os.close(other)
            os.environ["RANK"] = str(rank)
            with socket.socket(fileno=end) as ours, ours.makefile("rwb") as connection:
                _serve(timeout, device, connection)
            return
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


def _serve(timeout, device, connection):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from shardlib.common.environment import within
    from shardlib.mesh.mesh import as_mesh

    if device == "rig":
        from helpers import rig

        rig.start()  # before torch's engine of gradients, which makes its threads once for all devices
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    _send(connection, (True, "ready"))
    meshes = {}
    while header := connection.read(8):
        fn, args, shape = pickle.loads(connection.read(struct.unpack("q", header)[0]))
        key = tuple(shape.items())
        if key not in meshes:  # every process makes every group, members or not
            ranks = torch.arange(torch.Size(shape.values()).numel()).view(*shape.values())
            meshes[key] = DeviceMesh(device, ranks, mesh_dim_names=tuple(shape))
        if meshes[key].get_coordinate() is None:
            answer = "not part of the mesh"
        else:
            try:
                mesh = as_mesh(meshes[key])
                with within(mesh=mesh):
                    answer = True, fn(mesh, *args)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = False, error
        _send(connection, answer)


if __name__ == "__main__":
    _fork(float(sys.argv[1]), sys.argv[2], [int(end) for end in sys.argv[3:]])
