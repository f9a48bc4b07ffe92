"""Moments in 8 bits are restored a part at a time: as if decoded as a whole, and every byte that is read was predicted."""

import pytest
import torch
from helpers.saved import CountedReads

import shardlib as sl
from shardlib.common import thresholds
from shardlib.kernels.adamw8 import SIGNED, UNSIGNED
from shardlib.optim.base import Packed
from shardlib.tree import leaves_of

SHAPES = {"a": (70, 100), "b": (33,), "c": (9, 31, 40), "d": (5000,)}


def start(mesh, tx, fill=None):
    torch.manual_seed(7)
    params = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    state, _ = sl.make_train_step(lambda p, x: p["a"].sum(), sl.shard(params, mesh, stage=1), tx)
    for index, leaf in enumerate(leaves_of((state.opt.inner.mu, state.opt.inner.nu)) if fill else ()):
        leaf.copy_(torch.linspace(fill, 1 + index, leaf.numel()))
    return state


@pytest.mark.parametrize("parts", [1 << 30, 1 << 20, 1 << 17])
@pytest.mark.parametrize("ranks", [1, 3])
def test_parts_are_as_the_whole(tmp_path, monkeypatch, ranks, parts):
    """Of 512 elements, where leaves and blocks begin inside a part, or of more."""
    sl.simulate(lambda mesh: sl.checkpoint.save(tmp_path, start(mesh, sl.optim.adamw(1e-2), 0.1)), mesh={"data": 2})

    def run(mesh):
        state, plain = start(mesh, sl.optim.adamw8bit(1e-2)), start(mesh, sl.optim.adamw(1e-2))
        plain = sl.checkpoint.restore(tmp_path, plain)
        with thresholds.small(parts):
            predicted = sl.checkpoint.bytes_to_read(tmp_path, state)
            before = counted.bytes
            state = sl.checkpoint.restore(tmp_path, state)
            read = counted.bytes - before
        packed = 0
        for name, coding in (("mu", SIGNED), ("nu", UNSIGNED)):
            for bucket, found in getattr(state.opt.inner, name).items():
                wanted = getattr(plain.opt.inner, name)[bucket]
                if isinstance(found, Packed):
                    codes, scales = coding.encode(wanted)
                    assert torch.equal(found.codes, codes) and torch.equal(found.scales, scales)
                    packed += 1
        assert packed == 2 * len(state.opt.inner.mu)
        return predicted, read

    counted = CountedReads(monkeypatch)
    (predicted, read), *others = sl.simulate(run, mesh={"data": ranks})
    assert others or predicted == read


def test_what_a_checkpoint_lacks_stays(tmp_path):
    state = start(sl.make_mesh(), sl.optim.adamw8bit(1e-2))
    for moment in (*state.opt.inner.mu.values(), *state.opt.inner.nu.values()):
        moment.pack(torch.linspace(0.1, 2, moment.like.numel()))
    before = [leaf.clone() for leaf in leaves_of(state.opt)]
    sl.checkpoint.save(tmp_path, start(sl.make_mesh(), sl.optim.sgd(1e-2)))
    state = sl.checkpoint.restore(tmp_path, state, partial=["opt/*"])
    assert all(torch.equal(one, other) for one, other in zip(before, leaves_of(state.opt), strict=True))
