"""Plain pytrees that functions are given again and again: planned once for each form, and never by another's plan."""

import sys

import pytest
import torch
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import TreeError


def loss_fn(params, batch):
    return sum((leaf * batch).sum() for leaf in torch.utils._pytree.tree_leaves(params)).square()


def by_autograd(params, batch):
    """Gradients on one device; those of leaves that are one tensor are that tensor's."""
    leaves = {id(leaf): leaf for leaf in torch.utils._pytree.tree_leaves(params)}
    fresh = {key: leaf.clone().requires_grad_() for key, leaf in leaves.items()}
    loss = loss_fn(torch.utils._pytree.tree_map(lambda leaf: fresh[id(leaf)], params), batch)
    grads = dict(zip(fresh, torch.autograd.grad(loss, list(fresh.values()))))
    return torch.utils._pytree.tree_map(lambda leaf: grads[id(leaf)], params)


@pytest.fixture
def planned(monkeypatch):
    """Counts the plans that are made."""
    made = []
    module = sys.modules[sl.shard.__module__]
    shard_by = module.shard_by
    monkeypatch.setattr(module, "shard_by", lambda *args: made.append(1) or shard_by(*args))
    return made


def forms():
    """Pytrees of which each differs from the one before in its form alone."""
    w, tied = torch.arange(4.0) + 1, torch.ones(4)
    yield {"a": w, "b": w + 1}
    yield {"a": w, "c": w + 1}
    yield [w, w + 1]
    yield [w[:2], w + 1]
    yield [w[:2].double(), w + 1]
    yield {"a": tied, "b": torch.ones(4)}
    yield {"a": tied, "b": tied}
    yield {"a": torch.ones(4), "b": torch.ones(4)}


def test_gradients_of_trees_of_changing_forms(planned):
    grad_fn, batch = sl.value_and_grad(loss_fn), torch.tensor(2.0)
    for number, params in enumerate(forms(), 1):
        for scale in (1.0, 3.0):  # other values in the same form
            scaled = {id(leaf): leaf * scale for leaf in torch.utils._pytree.tree_leaves(params)}
            params = torch.utils._pytree.tree_map(lambda leaf, scaled=scaled: scaled[id(leaf)], params)
            loss, grads = grad_fn(params, batch)
            assert_same(grads, by_autograd(params, batch))
            assert float(loss) == float(loss_fn(params, batch))
        assert len(planned) == number


def test_evaluations_of_plain_trees(planned):
    evaluate = sl.make_eval_step(loss_fn, {"a": torch.ones(3)})
    for number in range(3):
        assert float(evaluate({"a": torch.full((3,), float(number))}, torch.ones(()))) == 9 * number**2
    assert len(planned) == 1
    with pytest.raises(TreeError, match="sharded by another plan"):
        evaluate({"a": torch.ones(4)}, torch.ones(()))


def test_leaves_that_are_no_tensors_are_refused_in_any_call():
    grad_fn, params = sl.value_and_grad(loss_fn), {"a": torch.ones(3)}
    grad_fn(params, torch.ones(()))
    for wrong in (2.0, torch.eye(3).to_sparse()):
        with pytest.raises(TreeError, match="1 parameter leaves cannot be sharded"):
            grad_fn({"a": wrong}, torch.ones(()))
    grad_fn(params, torch.ones(()))


def test_an_initialiser_in_the_place_of_parameters():
    grad_fn = sl.value_and_grad(loss_fn)
    for _ in range(2):
        loss, _ = grad_fn(lambda: {"w": torch.ones(4)}, torch.tensor(2.0))
        assert float(loss) == 64.0
