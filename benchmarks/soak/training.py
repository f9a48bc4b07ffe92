"""The training of one rank, a byte-level GPT: ``python -m benchmarks.soak.training FOLDER STEPS``."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import shardlib as sl
from shardlib.data.bytes import batch_at, load_bytes
from shardlib.models import gpt
from shardlib.tree import leaves_of

RANKS = "1:4"
_CONFIG = gpt.GPTConfig(vocab=256, layers=2, width=64, heads=4, sequence=64, dropout=0.1)
_ROWS = 12  # that many micro-batches, which 1, 2, 3 and 4 ranks divide
EVERY = 20  # steps between checkpoints


def losses_of(supervisor: int, attempt: str) -> str:
    """The name of the file of one attempt's losses."""
    return f"losses-{supervisor}-{attempt}"


def train(folder: Path, steps: int) -> str:
    """Train from the newest checkpoint to step ``steps``; returns the SHA-256 of the parameters.

    Rank 0 writes each step's loss to a file of the attempt's own.
    """
    mesh, text = sl.make_mesh(), load_bytes()
    params = sl.shard(gpt.init(_CONFIG), mesh, sl.chain(sl.zero(2), sl.reproducible(_ROWS)))
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(1e-3))
    state, step = sl.make_train_step(gpt.make_loss(_CONFIG), params, tx, rng=0)
    name = folder / losses_of(os.getppid(), os.environ["TORCHELASTIC_RESTART_COUNT"]) if mesh.rank == 0 else os.devnull
    with open(name, "w") as losses, sl.checkpoint.Manager(folder, every=EVERY) as manager:
        if manager.latest():
            state = manager.restore(state)
        while state.step < steps:
            batch = batch_at(text, _ROWS, _CONFIG.sequence, seed=0, step=state.step, rank=mesh.rank, ranks=mesh.size)
            state, metrics = step(state, batch)
            print(state.step, float(metrics["loss"]).hex(), file=losses, flush=True)
            manager.step(state)
    found = hashlib.sha256()
    for leaf in leaves_of(sl.unshard(state.params)):
        found.update(leaf.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    sha = train(Path(sys.argv[1]), int(sys.argv[2]))
    if os.environ["RANK"] == "0":
        (Path(sys.argv[1]) / "sha256").write_text(sha)
