"""Two real ranks that train and save at every step, and are killed at random times: `python -m helpers.killed FOLDER KILLS`.

Prints one line of JSON for each kill and at the end. The ranks are forked from this process, which has imported all.
"""

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import shardlib as sl
from helpers.models import mlp, regression_batch, share

STEPS, RANKS = 30, 2
LOSS, PARAMS = mlp([8, 16, 4])
BATCHES = [regression_batch(4, 8, 4, seed=seed) for seed in range(STEPS)]


def start(mesh):
    optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.01))
    return sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=3), optimizer)


def train(mesh, folder, record):
    """From the newest checkpoint to the last step; ``record(step, loss)`` after each."""
    state, step = start(mesh)
    with sl.checkpoint.Manager(folder, keep=2, every=1) as manager:
        if manager.latest():
            state = manager.restore(state)
        while state.step < STEPS:
            state, metrics = step(state, share(BATCHES[state.step], mesh.rank, mesh.size))
            record(state.step, float(metrics["loss"]).hex())
            manager.step(state)


def rank_main(rank, folder, attempt):
    """A rank's life. Its losses go to a file of its own, a line at a time."""
    errors = os.open(folder / f"errors-{attempt}-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    store = dist.FileStore(str(folder / f"store-{attempt}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    with open(folder / f"losses-{attempt}-{rank}", "w") as file:
        train(sl.make_mesh(), folder / "checkpoints", lambda step, loss: print(step, loss, file=file, flush=True))
    dist.destroy_process_group()


def forked(rank, folder, attempt):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        rank_main(rank, folder, attempt)
        status = 0
    finally:
        os._exit(status)


def ended(children, seconds):
    """Whether all children have ended within the time; and their statuses."""
    statuses, until = {}, time.monotonic() + seconds
    while len(statuses) < len(children) and time.monotonic() < until:
        for child in children:
            if child not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    statuses[child] = status
        time.sleep(0.002)
    return statuses


def main(folder, kills):
    torch.set_num_threads(1)
    draw = random.Random(kills)
    longest = 3.0
    for attempt in range(kills + 1):
        begun = time.monotonic()
        children = [forked(rank, folder, attempt) for rank in range(RANKS)]
        wait = draw.uniform(0, longest) if attempt < kills else 300
        statuses = ended(children, wait)
        if len(statuses) == RANKS:
            longest = max(0.3, min(longest, time.monotonic() - begun))
            print(json.dumps({"ended": list(statuses.values())}), flush=True)
            if attempt < kills:  # so quick that nothing was left to kill: the run begins anew
                for path in sl.checkpoint.complete(folder / "checkpoints"):
                    sl.checkpoint.remove(path)
            continue
        alive = [child for child in children if child not in statuses]
        for child in draw.sample(alive, draw.randint(1, len(alive))):
            os.kill(child, signal.SIGKILL)
        saving = any(path.suffix in (".partial", ".deleted") for path in (folder / "checkpoints").glob("*"))
        # The other rank notices, or is killed after a while by whoever supervises the run.
        left = ended(alive, 1.0)
        for child in alive:
            if child not in left:
                os.kill(child, signal.SIGKILL)
        ended([child for child in alive if child not in left], 60)
        newest = sl.checkpoint.latest(folder / "checkpoints")
        print(
            json.dumps({"killed": "in a save" if saving else "in a step", "newest": newest and newest.name}), flush=True
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
