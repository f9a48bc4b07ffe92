"""Norms and products over the elements of all ranks, and what is written with them: SAM, and clips by other norms."""

import math

import optree
import pytest
import torch
from helpers.cuts import CUTS, tiny_blocks
from helpers.optimizer_cases import batches, model
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.optim.storing import optimizer_shards
from shardlib.sharded.tree import Sharded

opt = sl.optim
ORDERS = (1, 2, 3.5, math.inf)
RHO, RATE = 0.3, 0.1


def norms(params, grads):
    products = [opt.vdot(params, grads), opt.vdot(grads, grads)]
    of_leaves = {(ord, path): norm for ord in ORDERS for path, norm in opt.leaf_norms(grads, ord).items()}
    return [*products, *(opt.global_norm(grads, ord) for ord in ORDERS)], of_leaves, opt.global_norm(params)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_norms_count_every_element_once(cut, tie):
    shape, transform = CUTS[cut]
    _, params = tiny_blocks(vocab=30, tie=tie)

    def run(mesh):
        sharded = sl.shard(params, mesh, transform)
        doubled = {name: 2 * shard for name, shard in optimizer_shards(sharded).items()}
        return norms(sharded, Sharded(sharded.plan, sharded.mesh, "grad", doubled))

    once = {}
    for path, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params)):
        if not any(leaf is other for other in once.values()):
            once["/".join(map(str, path))] = leaf
    flat = torch.cat([leaf.reshape(-1).double() for leaf in once.values()])
    totals = [2 * flat.square().sum(), 4 * flat.square().sum(), *((2 * flat).norm(ord) for ord in ORDERS)]
    each = {(ord, path): (2 * leaf.double()).norm(ord) for ord in ORDERS for path, leaf in once.items()}
    wanted = totals, each, flat.norm()
    assert_close(norms(params, optree.tree_map(lambda leaf: 2 * leaf, params))[2], wanted[2], 1e-10)
    for found in sl.simulate(run, mesh=shape):
        assert_close(found, wanted, 1e-10)


def sam(loss_fn, params, given):
    """Parameters after steps of sharpness-aware minimisation."""
    grad_fn = sl.value_and_grad(loss_fn)
    for batch in given:
        _, grads = grad_fn(params, batch)
        by = RHO / opt.global_norm(grads)
        _, grads = grad_fn(opt.apply_updates(params, optree.tree_map(lambda g, by=by: g * by, grads)), batch)
        params = opt.apply_updates(params, optree.tree_map(lambda g: -RATE * g, grads))
    return params


@pytest.mark.parametrize("stage", range(4))
def test_sharpness_aware_steps_are_those_of_torch(stage):
    loss_fn, params = model()
    given = batches(3)
    module = {id(leaf): leaf.clone().requires_grad_() for leaf in optree.tree_leaves(params)}
    tree = optree.tree_map(lambda leaf: module[id(leaf)], params)
    for batch in given:
        grads = torch.autograd.grad(loss_fn(tree, batch), list(module.values()))
        norm = torch.nn.utils.get_total_norm(grads)
        with torch.no_grad():
            kept = [leaf.clone() for leaf in module.values()]
            torch._foreach_add_(list(module.values()), [RHO / norm * grad for grad in grads])
        grads = torch.autograd.grad(loss_fn(tree, batch), list(module.values()))
        with torch.no_grad():
            for leaf, old, grad in zip(module.values(), kept, grads):
                leaf.copy_(old - RATE * grad)

    def run(mesh):
        mine = [tuple(part.chunk(mesh.size)[mesh.rank] for part in batch) for batch in given]
        return sl.unshard(sam(loss_fn, sl.shard(params, mesh, sl.zero(stage)), mine))

    wanted = optree.tree_map(torch.Tensor.detach, tree)
    for found in sl.simulate(run, mesh={"data": 2}):
        assert_close(found, wanted, 1e-10)


@pytest.mark.parametrize("ord", ORDERS)
def test_clips_are_those_of_torch(ord):
    _, params = model()
    grads = optree.tree_map(lambda leaf: leaf.clone(), params)
    leaves = [torch.zeros_like(leaf).requires_grad_() for leaf in optree.tree_leaves(grads)]
    for leaf, grad in zip(leaves, optree.tree_leaves(grads)):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(leaves, 0.5, norm_type=ord)
    tx = opt.clip_by_global_norm(0.5, ord)
    clipped, _ = tx.update(grads, tx.init(grads))
    assert_close(optree.tree_leaves(clipped), [leaf.grad for leaf in leaves], 1e-5)  # torch adds 1e-6 to the norm


def test_adaptive_clips_are_those_of_the_paper():
    """Each unit by itself: arXiv 2102.06171, equation 3."""
    _, params = model()
    params = optree.tree_map(torch.clone, params)  # not tied
    grads = optree.tree_map(lambda leaf: leaf.flip(0) if leaf.dim() else leaf, params)

    def clip(weight, grad):
        rows = weight.shape[0] if weight.dim() > 1 else 1
        sizes = [leaf.reshape(rows, -1).norm(dim=1) for leaf in (weight, grad)]
        limit = 0.2 * sizes[0].clamp(min=1e-3)
        by = torch.where(sizes[1] > limit, limit / sizes[1], 1.0)
        return (grad.reshape(rows, -1) * by[:, None]).view_as(grad)

    tx = opt.adaptive_grad_clip(0.2)
    assert_close(tx.update(grads, tx.init(params), params)[0], optree.tree_map(clip, params, grads), 1e-12)


def test_what_has_no_norm_is_refused():
    def run(mesh):
        two, one = (sl.shard({"w": torch.ones(4)}, mesh, stage=stage) for stage in (2, 1))
        with pytest.raises(TreeError, match=r"vdot: .*give both in one layout"):
            opt.vdot(two, sl.shard({"w": torch.ones(4), "b": torch.ones(1)}, mesh, stage=1))
        with pytest.raises(TreeError, match="global_norm was given a part of a sharded tree"):
            opt.global_norm(one.tree)

    sl.simulate(run, mesh={"data": 2})
    with pytest.raises(ValueError, match="above 0, or math"):
        opt.global_norm({"w": torch.ones(2)}, 0)
