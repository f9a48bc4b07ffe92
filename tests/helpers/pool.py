"""Real gloo processes that live for the whole test session and run one function after another."""

from __future__ import annotations

import os
import pickle
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


class Pool:
    """``run(fn, *args, mesh=...)`` is like `shardlib.simulate`, on some or all of the processes."""

    def __init__(self, size, timeout=TIMEOUT, patience=TIMEOUT + 20, device="cpu"):
        """``timeout`` is that of a collective; after ``patience`` a function that has not come back is stopped.

        ``device`` is that of the meshes: "cpu", "cuda" (all processes share the GPUs), or "rig" for `helpers.rig`.
        """
        self.size, self._timeout, self._patience, self._device = size, timeout, patience, device
        self._processes = []

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
        if not self._processes:
            self._start()
        message = cloudpickle.dumps((fn, args, dict(mesh)))
        answers = [None] * self.size

        def ask(rank):
            process = self._processes[rank]
            process.stdin.write(struct.pack("q", len(message)) + message)
            process.stdin.flush()
            answers[rank] = _receive(process.stdout)

        threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._patience
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, answer in enumerate(answers) if answer is None]
        if late:
            self.stop()
            raise TimeoutError(f"ranks {late} of {self.size} did not answer within {self._patience:g} s: a hang")
        return [answer for answer in answers if answer != "not part of the mesh"]

    def stop(self):
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def _start(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        here = Path(__file__).resolve()
        for rank in range(self.size):
            seen = gpu.shown() if self._device == "cuda" else os.environ
            environment = seen | {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(here.parents[1]), *filter(None, sys.path)]),
            }
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "helpers.pool", str(self._timeout), self._device],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        # Starting may take long on a busy machine, and is no hang: the clock runs from here.
        for process in self._processes:
            _receive(process.stdout)


def _send(stream, value):
    message = cloudpickle.dumps(value)
    stream.write(struct.pack("q", len(message)) + message)
    stream.flush()


def _receive(stream):
    header = stream.read(8)
    if len(header) < 8:
        return False, RuntimeError("the process ended")
    return pickle.loads(stream.read(struct.unpack("q", header)[0]))


def _serve(timeout, device):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from shardlib.mesh.mesh import as_mesh, current_mesh

    if device == "rig":
        from helpers import rig

        rig.start()  # before torch's engine of gradients, which makes its threads once for all devices
    torch.set_num_threads(1)
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what tests print must not mix with answers
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    _send(answers, (True, "ready"))
    meshes = {}
    while header := requests.read(8):
        fn, args, shape = pickle.loads(requests.read(struct.unpack("q", header)[0]))
        key = tuple(shape.items())
        if key not in meshes:  # every process makes every group, members or not
            ranks = torch.arange(torch.Size(shape.values()).numel()).view(*shape.values())
            meshes[key] = DeviceMesh(device, ranks, mesh_dim_names=tuple(shape))
        if meshes[key].get_coordinate() is None:
            answer = "not part of the mesh"
        else:
            try:
                mesh = as_mesh(meshes[key])
                token = current_mesh.set(mesh)
                answer = True, fn(mesh, *args)
                current_mesh.reset(token)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = False, error
        _send(answers, answer)


if __name__ == "__main__":
    _serve(float(sys.argv[1]), sys.argv[2])
