"""A user's own optimizer: each parameter's step has a share of the parameter's own length (LARS, arXiv 1708.03888)."""

import optree
import pytest
import torch
from helpers.stages import in_halves, plan_of, train_stages
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import IllegalComposition


def lars(lr, momentum=0.9, locality=sl.optim.Locality.LEAF):
    """m ← momentum·m + g·‖p‖/‖g‖; p ← p − lr·m."""

    def init(params, shards):
        return optree.tree_map(torch.zeros_like, params)

    def update(grads, state, params, *, shards):
        squares = [lambda p, g: p.double().square().sum(), lambda p, g: g.double().square().sum()]
        lengths, slopes = shards.leaf_sums(squares, params, grads).sqrt()
        scaled = optree.tree_map(torch.clone, grads)
        for number, (part,) in shards.leaves(scaled):  # a view of what this rank holds of the parameter
            part.mul_(lengths[number] / slopes[number])
        state = optree.tree_map(lambda m, g: momentum * m + g, state, scaled)
        return optree.tree_map(lambda m: -lr * m, state), state

    return sl.optim.GradientTransformation(init, update, locality)


def loss_fn(params, x):
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x.square().mean()


def model():
    generator = torch.Generator().manual_seed(0)
    sizes = {"w": (5, 5), "b": (5,)}
    params = [{n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in sizes.items()} for _ in "ab"]
    return loss_fn, params, [torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(4)]


def one_device():
    """Losses and final parameters, parameter by parameter."""
    _, params, batches = model()
    leaves, structure = optree.tree_flatten(params)
    moments, losses = [torch.zeros_like(leaf) for leaf in leaves], []
    for batch in batches:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        losses.append(loss_fn(optree.tree_unflatten(structure, leaves), batch))
        grads = torch.autograd.grad(losses[-1], leaves)
        moments = [0.9 * m + g * (p.norm() / g.norm()) for m, g, p in zip(moments, grads, leaves)]
        leaves = [leaf - 0.1 * m for leaf, m in zip(leaves, moments)]
    return [loss.item() for loss in losses], optree.tree_unflatten(structure, [leaf.detach() for leaf in leaves])


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path, pool):
    expected, final = one_device()
    for half, _, losses, trained in in_halves(model, sl.chain(), lars(0.1), tmp_path, pool):
        assert losses == pytest.approx(expected[2 * half :][:2], rel=1e-10)
        if half == 1:
            assert_close(trained, final, 1e-10)
    plan = plan_of(model, sl.chain(), lars(0.1), 1)
    assert plan.bytes("optimizer") == 2 * (28 // 4 + 8 // 4) * 8 and "optimizer 144 B" in str(plan)  # padded


def test_what_it_did_not_declare_is_refused():
    tx = lars(0.1, locality=sl.optim.Locality.ELEMENTWISE)
    with pytest.raises(IllegalComposition, match=r"declares Locality\.ELEMENTWISE asks for sums over each parameter"):
        sl.simulate(lambda mesh: train_stages(mesh, model, sl.chain(), tx, None, 0), mesh={"data": 2})
