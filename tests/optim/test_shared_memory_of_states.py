"""Transformations whose states share memory with what an update writes to in place: the numbers of a pure function."""

import pytest
import torch

import shardlib as sl
from shardlib.tree import tree_map

PARAMS = {"w": torch.arange(12.0, dtype=torch.float64).view(4, 3), "b": torch.ones(3, dtype=torch.float64)}
LAYOUTS = [
    ({"data": 1}, sl.zero(0)),
    ({"data": 2}, sl.zero(1)),
    ({"data": 2}, sl.zero(3)),
    ({"data": 2}, sl.chain(sl.zero(2), sl.offload())),
]


def copy_if(copied, tree):
    return tree_map(torch.clone, tree) if copied else tree


def pulled_back(copied):
    """SGD that is pulled back to the first parameters and to those before the last step, which its state holds."""

    def init(params, shards):
        return {"first": copy_if(copied, params), "last": copy_if(copied, params)}

    def update(grads, state, params, *, shards):
        def change(g, p, first, last):
            return -0.1 * (g + 0.5 * (p - first) + 0.3 * (p - last))

        moves = tree_map(change, grads, params, state["first"], state["last"])
        return moves, {**state, "last": copy_if(copied, params)}

    return sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)


def two_means(copied):
    """Two running means that begin with the same zeros, the first of which is the update."""

    def init(params, shards):
        zeros = tree_map(torch.zeros_like, params)
        return {"mean": zeros, "square": copy_if(copied, zeros)}

    def update(grads, state, params, *, shards):
        mean = tree_map(lambda m, g: 0.9 * m + g, state["mean"], grads)
        square = tree_map(lambda s, g: 0.5 * s + g * g, state["square"], grads)
        return copy_if(copied, mean), {"mean": mean, "square": square}

    return sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)


def followed(copied):
    """Adafactor writes over the updates that it is given."""
    return sl.optim.chain(two_means(copied), sl.optim.adafactor(0.1))


def loss_fn(params, batch):
    return ((batch @ params["w"] + params["b"]) ** 2).mean()


def start(mesh, transform, optimizer):
    return sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, transform), optimizer)


def trained(mesh, transform, optimizer):
    state, step = start(mesh, transform, optimizer)
    for number in range(4):
        state, _ = step(state, torch.full((2, 4), 0.1 + number, dtype=torch.float64))
    return sl.unshard(state.params)


@pytest.mark.parametrize(("mesh", "transform"), LAYOUTS, ids=str)
@pytest.mark.parametrize("make", [pulled_back, two_means, followed])
def test_training_is_that_of_copies(make, mesh, transform):
    wanted, got = (sl.simulate(trained, transform, make(copied), mesh=mesh)[0] for copied in (True, False))
    assert all(torch.equal(got[name], wanted[name]) for name in PARAMS)


def test_each_of_two_means_is_restored(tmp_path):
    """A fresh state is filled in place."""

    def save(mesh):
        state, step = start(mesh, sl.zero(1), two_means(True))
        state, _ = step(state, torch.ones(2, 4, dtype=torch.float64))
        sl.checkpoint.save(tmp_path, state)
        return state.opt.inner

    def load(mesh):
        state, _ = start(mesh, sl.zero(1), two_means(False))
        return sl.checkpoint.restore(tmp_path, state).opt.inner

    wanted, got = sl.simulate(save, mesh={"data": 2}), sl.simulate(load, mesh={"data": 2})
    for one, other in zip(wanted, got, strict=True):
        for kind in ("mean", "square"):
            assert all(torch.equal(one[kind][name], other[kind][name]) for name in one[kind])
        assert any(one["mean"][name].ne(one["square"][name]).any() for name in one["mean"])
