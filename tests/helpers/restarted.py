"""Three ranks that torchrun starts and restarts: one is killed in step 2, and one sleeps in step 4, once each.

``torchrun ... -m helpers.restarted FOLDER``
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import shardlib as sl
from helpers.models import mlp, regression_batch, share

STEPS, TIMEOUT = 6, 8.0
LOSS, PARAMS = mlp([8, 16, 4])
BATCHES = [regression_batch(6, 8, 4, seed=seed) for seed in range(STEPS)]


def train(mesh, loss_fn, folder):
    """From the newest checkpoint to the last step; yields each step's number and loss."""
    state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, stage=3), sl.optim.adamw(0.01))
    with sl.checkpoint.Manager(folder, every=1) as manager:
        if manager.latest():
            state = manager.restore(state)
        while state.step < STEPS:
            number = state.step
            state, metrics = step(state, share(BATCHES[number], mesh.rank, mesh.size))
            yield number, float(metrics["loss"])
            manager.step(state)


def main(folder):
    torch.set_num_threads(1)
    mesh = sl.make_mesh(timeout=TIMEOUT)

    def faulty(params, batch):
        for rank, done, name, fault in (
            (1, 2, "killed", lambda: os.kill(os.getpid(), signal.SIGKILL)),
            (2, 4, "slept", lambda: time.sleep(600)),
        ):
            if mesh.rank == rank and steps == done and not (folder / name).exists():
                (folder / name).touch()
                fault()
        return LOSS(params, batch)

    latest = sl.checkpoint.latest(folder / "checkpoints")
    steps = sl.checkpoint.step_of(latest) if latest else 0
    with open(folder / f"losses-{mesh.rank}", "a") as losses:
        for number, loss in train(mesh, faulty, folder / "checkpoints"):
            print(number, loss.hex(), file=losses, flush=True)
            steps = number + 1
    with open(folder / f"restarts-{mesh.rank}", "w") as file:
        file.write(os.environ["TORCHELASTIC_RESTART_COUNT"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
