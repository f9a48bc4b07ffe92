"""Memory beside a rank's shards, measured in real processes: at most 64 MB in a restore, and flat over many saves."""

import pytest
import torch
from helpers.profile import NIGHTLY

import shardlib as sl
from shardlib.tree import leaves_of

# Elements of one leaf, of 300 MB nightly. AdamW's moments are twice as much; decoded moments in 8 bits would be, too.
ELEMENTS = 75_000_000 if NIGHTLY else 24_000_000
BUFFER = 64 * 2**20
# Of what is neither shards nor buffer: threads' stacks, parts of torch that are used for the first time, ...
SLACK = 24 * 2**20
LAYOUTS = {
    "in place": (sl.zero(3), lambda: sl.optim.adamw(1e-2)),
    "16 bits": (sl.chain(sl.zero(1), sl.precision("bf16")), lambda: sl.optim.adamw(1e-2)),
    "moments in 8 bits": (sl.zero(3), lambda: sl.optim.adamw8bit(1e-2)),
}


def start(mesh, transform, tx, value):
    """A state of one leaf."""
    params = sl.shard(lambda: {"w": torch.full((ELEMENTS // 1000, 1000), value)}, mesh, transform)
    state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), params, tx)
    return state


def resident(kind):
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since `reset`."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))


def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def saved(mesh, folder):
    state = start(mesh, sl.zero(3), sl.optim.adamw(1e-2), 1.5)
    for tree in (state.opt.inner.mu, state.opt.inner.nu):
        for flat in tree.values():
            flat.fill_(0.25)
    sl.checkpoint.save(folder, state)


def restored(mesh, folder):
    """Bytes that a restore takes beside the state, for each layout; and whether the values are there."""
    found = {}
    for name, (transform, tx) in LAYOUTS.items():
        state = start(mesh, transform, tx(), 0.5)
        # Memory that was never written to is not there yet.
        for tensor in leaves_of(state.opt):
            tensor.fill_(1)
        reset()
        before = resident("VmRSS")
        state = sl.checkpoint.restore(folder, state)
        found[name] = resident("VmHWM") - before
        mu, *_ = state.opt.inner.mu.values()
        mu = mu.unpacked() if hasattr(mu, "unpacked") else mu
        assert all(flat.eq(1.5).all() for flat in state.params.buffers.values()) and mu.eq(0.25).all()
        del state, mu
    return found


@pytest.mark.timeout(600)
def test_a_restore_takes_a_buffer_beside_the_shards(tmp_path):
    sl.launch(saved, tmp_path, mesh={"data": 2})
    for found in sl.launch(restored, tmp_path, mesh={"data": 2}):
        print({name: f"{taken / 2**20:.0f} MB" for name, taken in found.items()})
        # A leaf's moments, decoded as a whole, would be far above.
        assert 4 * ELEMENTS // 2 > BUFFER // 2 and all(taken < BUFFER + SLACK for taken in found.values()), found


def many_saves(mesh, folder, saves):
    """Bytes of this process after a few saves, and after all."""
    params = sl.shard({"w": torch.ones(200, 1000)}, mesh, stage=2)
    state, step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), params, sl.optim.adamw(1e-2))
    with sl.checkpoint.Manager(folder, keep=1, every=1) as manager:
        for number in range(saves):
            state, _ = step(state, torch.ones(1000))
            manager.step(state)
            if number == 9:
                manager.wait()
                early = resident("VmRSS")
    return early, resident("VmRSS")


@pytest.mark.timeout(600)
def test_memory_is_flat_over_many_saves(tmp_path):
    saves = 200 if NIGHTLY else 30
    for early, late in sl.launch(many_saves, tmp_path, saves, mesh={"data": 2}):
        print(f"{early / 2**20:.1f} MB after 10 saves, {late / 2**20:.1f} MB after {saves}")
        # A snapshot that is kept would be 1.2 MB a save on each rank.
        assert late - early < 8 * 2**20
