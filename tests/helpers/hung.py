"""Real ranks of which one does not join the others: `python -m helpers.hung FOLDER CASE PORT [CASE PORT ...]`.

All cases run at once. Their ranks are forked from this process, which has imported all, and find each other at the store of
PORT. What a rank prints goes to FOLDER/CASE-RANK; a line of JSON for each case says how its ranks ended.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import shardlib as sl
from helpers.models import mlp, regression_batch
from shardlib.mesh.transport import activity, watch

TIMEOUT = 10.0  # seconds for a collective: long enough for a rank that has to wait for the processor
LOSS, PARAMS = mlp([8, 16, 4])


def train(mesh, at_step_3):
    """Train at stage 3. In step 3 rank 1 does something else."""
    state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=3), sl.optim.sgd(0.1))
    while state.step < 6:
        if state.step == 3 and mesh.rank == 1:
            at_step_3()
        state, _ = step(state, regression_batch(4, 8, 4))


def sleeping():
    train(sl.make_mesh(timeout=TIMEOUT), lambda: time.sleep(600))


def returning():
    train(sl.make_mesh(timeout=TIMEOUT), lambda: sys.exit(0))


def raising():
    def run():
        raise ValueError("a bad sample")

    train(sl.make_mesh(timeout=TIMEOUT), run)


def killed():
    train(sl.make_mesh(timeout=TIMEOUT), lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped():
    train(sl.make_mesh(timeout=TIMEOUT), lambda: os.kill(os.getpid(), signal.SIGSTOP))


def branching():
    """Rank 3 calls another axis' collective than the others, which then do something else."""
    mesh = sl.make_mesh(data=2, model=2, timeout=TIMEOUT)
    for call in range(3):
        axis = "model" if (mesh.rank, call) == (3, 2) else "data"
        mesh.group(axis).all_reduce(torch.ones(5)).wait()
    signal.pause()


def differing():
    """Rank 1's call is of another size."""
    mesh = sl.make_mesh(timeout=TIMEOUT)
    own = torch.ones(3 + mesh.rank)
    mesh.group("data").all_gather(own.new_empty(2 * len(own)), own).wait()


def receiving():
    """Rank 1 waits for a second message, which rank 0 does not send."""
    mesh = sl.make_mesh(pipe=2, timeout=TIMEOUT)
    for number in range(2):
        if mesh.rank == 1:
            mesh.group("pipe").recv(torch.empty(3), 0, tag=number).wait()
        elif number == 0:
            mesh.group("pipe").send(torch.ones(3), 1, tag=number).wait()
    signal.pause()


def on_a_device():
    """A rank goes on after a collective that its device waits in."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    watch.begin(ends=True, timeout=TIMEOUT / 5)
    mesh = sl.make_mesh()
    ones = torch.ones(3)
    mesh.group("data").all_reduce(ones).wait()
    if mesh.rank == 0:
        with activity.naming("layers/7"):
            call = activity.here().series("data", (0, 1)).call("all_reduce", ones)
        activity.here().follow(call, dist.all_reduce(ones, async_op=True).is_completed)
    signal.pause()


RANKS = {"sleeping": 3, "branching": 4, "returning": 3, "raising": 3, "killed": 3, "stopped": 3}


def main(folder, cases):
    torch.set_num_threads(1)
    watch._GRACE = 1.0
    began, children = time.monotonic(), {}
    for case, port in cases.items():
        for rank in range(ranks := RANKS.get(case, 2)):
            if (child := os.fork()) == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
                for stream in (1, 2):
                    os.dup2(os.open(folder / f"{case}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
                globals()[case]()
                return
            children[child] = case, rank
    ends = {case: {} for case in cases}
    while children:
        child, status = os.wait()
        case, rank = children.pop(child)
        ends[case][rank] = os.waitstatus_to_exitcode(status), time.monotonic() - began
        if case == "stopped" and len(ends[case]) == 2:
            os.kill(next(child for child, (case, _) in children.items() if case == "stopped"), signal.SIGKILL)
    for case, of_ranks in ends.items():
        print(json.dumps({"case": case, "ends": [of_ranks[rank] for rank in sorted(of_ranks)]}))


if __name__ == "__main__":
    _, folder, *cases = sys.argv
    main(Path(folder), dict(zip(cases[::2], cases[1::2])))
