"""Paths tell the leaves of a tree apart, or the tree is refused."""

import pytest
import torch

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.tree import flatten

NESTED = {"a": {"b": torch.ones(2)}, "a/b": torch.full((2,), 5.0)}
NUMBERS = {0: torch.ones(2), "0": torch.full((2,), 5.0)}


def loss_fn(params, batch):
    return sum((leaf * batch).sum() for leaf in flatten(params)[1])


@pytest.mark.parametrize(
    "given, keys", [(NESTED, r"a/b: \['a'\]\['b'\] and \['a/b'\]"), (NUMBERS, r"0: \[0\] and \['0'\]")]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda given: sl.shard(given, sl.make_mesh(), stage=3),
        lambda given: sl.make_plan(given, sl.abstract_mesh(data=2)),
        lambda given: sl.value_and_grad(loss_fn)(given, torch.ones(2)),
        lambda given: sl.make_train_step(loss_fn, given, sl.optim.sgd(0.1)),
        lambda given: sl.make_train_step(
            lambda params, buffers, batch: (params["w"].sum(), buffers),
            {"w": torch.ones(1)},
            sl.optim.sgd(0.1),
            buffers=given,
        ),
    ],
    ids=["shard", "make_plan", "value_and_grad", "make_train_step", "buffers"],
)
def test_leaves_of_one_path_are_refused(call, given, keys):
    with pytest.raises(TreeError, match=f"(?s)one path.*{keys}.*Rename a key"):
        call(given)


def test_a_module_whose_names_hold_slashes():
    inner = torch.nn.ModuleDict({"b": torch.nn.Linear(2, 2, bias=False)})
    module = torch.nn.ModuleDict({"a": inner, "a/b": torch.nn.Linear(2, 2, bias=False)})
    with pytest.raises(TreeError, match="a/b/weight"):
        sl.shard(sl.from_module(module)[1], sl.make_mesh(), stage=3)


def test_means_of_one_path():
    def scores(params, batch):
        return {"a": {"b": sl.Mean(batch.sum(), 1)}, "a/b": sl.Mean(batch.sum(), 2)}

    params = {"w": torch.ones(2)}
    with pytest.raises(TreeError, match="a/b"):
        sl.make_eval_step(scores, params)(params, torch.ones(2))


def test_slashes_and_numbers_that_collide_with_nothing_are_fine():
    params = {"a/b": torch.ones(2), "a": {"c": torch.ones(2)}, 1: torch.ones(2), "0": torch.ones(2)}
    loss, grads = sl.value_and_grad(lambda p, b: sum((leaf * b).sum() for leaf in flatten(p)[1]))(params, torch.ones(2))
    assert float(loss) == 8 and torch.equal(grads["a/b"], torch.ones(2))
