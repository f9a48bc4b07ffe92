"""A small training whose ranks fail by themselves: `shardlib run ... -m helpers.supervised FOLDER FAULTS`."""

import json
import os
import sys
import time

import shardlib as sl
from helpers.bits import digest, whole
from helpers.models import mlp, regression_batch, share

STEPS, ROWS = 16, 12
LOSS, PARAMS = mlp([6, 12, 3])
BATCHES = [regression_batch(ROWS, 6, 3, seed=seed) for seed in range(STEPS)]


def train(mesh, folder, faults=(), record=None):
    """From the newest checkpoint to the last step; returns the SHA-256 of the state.

    Args:
        faults: rows of attempt, rank, step, and what happens in the middle of that step on that rank: the number of a signal
            to itself, a negative one to its parent, or the text of an exception.
        record: called with the step and its loss.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def loss(params, batch):
        for *where, what in faults:
            if where == [attempt, mesh.rank, at[0]]:
                if isinstance(what, str):
                    raise ValueError(what)
                os.kill(os.getppid() if what < 0 else os.getpid(), abs(what))
                while what < 0 and manager._signals.received is None:
                    time.sleep(0.01)  # the parent passes it on
        return LOSS(params, batch)

    at = [0]
    optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.01))
    parallel = sl.chain(sl.zero(3), sl.reproducible(ROWS))
    state, step = sl.make_train_step(loss, sl.shard(PARAMS, mesh, parallel), optimizer)
    with sl.checkpoint.Manager(folder, keep=100, every=4) as manager:
        if manager.latest():
            state = manager.restore(state)
        while state.step < STEPS:
            at[0] = state.step + 1
            state, metrics = step(state, share(BATCHES[state.step], mesh.rank, mesh.size))
            if record and mesh.rank == 0:
                record(state.step, float(metrics["loss"]).hex())
            manager.step(state)
    return digest(whole(state))


if __name__ == "__main__":
    mesh = sl.make_mesh()
    found = train(mesh, sys.argv[1], json.loads(sys.argv[2]), lambda step, loss: print(step, loss))
    if mesh.rank == 0:
        print("SHA-256", found)
