"""Parameters as DTensors, in real processes: torch's own checkpoints and optimizers take them, and values come back."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.models import mlp
from helpers.trees import assert_same
from torch.distributed.tensor import DTensor, distribute_tensor

import shardlib as sl
from shardlib.errors import IllegalComposition, MeshError
from shardlib.tree import leaves_of

# Sizes that two ranks divide, and that they do not.
SHAPES = {"even": (8, 6), "odd": (7, 3), "vector": (4,), "tiny": (1,), "number": ()}
WHOLE = {name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1 for name, shape in SHAPES.items()}


def wholes(tree):
    return {name: leaf.full_tensor() for name, leaf in tree.items()}


def there_and_back(mesh, chain):
    params = sl.shard(WHOLE, mesh, chain)
    tree = sl.to_dtensors(params)
    assert all(isinstance(leaf, DTensor) for leaf in tree.values())
    assert_same(wholes(tree), WHOLE)
    assert_same(sl.unshard(sl.from_dtensors(tree, params)), WHOLE)
    changed = {name: leaf * 2 for name, leaf in tree.items()}
    assert_same(sl.unshard(sl.from_dtensors(changed, params)), {name: leaf * 2 for name, leaf in WHOLE.items()})
    mixed = {**tree, "even": WHOLE["even"] * 3}  # whole tensors too
    assert_same(sl.unshard(sl.from_dtensors(mixed, params))["even"], WHOLE["even"] * 3)
    sizes = {name: leaf.to_local().numel() for name, leaf in tree.items()}
    return {name: str(leaf.placements) for name, leaf in tree.items()}, sizes


def test_there_and_back(pool):
    (stage0, _), *_ = pool.run(there_and_back, sl.zero(0), mesh={"data": 2})
    assert set(stage0.values()) == {"(Replicate(),)"}
    (stage3, sizes), (_, others) = pool.run(there_and_back, sl.zero(3), mesh={"data": 2})
    assert stage3["even"] == stage3["odd"] == "(Shard(dim=0),)" and stage3["number"] == "(Replicate(),)"
    assert (sizes["even"], sizes["odd"], others["odd"]) == (24, 12, 9)  # no rank holds more than its piece


def sliced(mesh, chain):
    whole = {"up": torch.arange(32.0).reshape(8, 4), "down": torch.arange(32.0).reshape(4, 8)}
    params = sl.shard(whole, mesh, chain)
    tree = sl.to_dtensors(params)
    assert_same(wholes(tree), whole)
    assert_same(sl.unshard(sl.from_dtensors(tree, params)), whole)
    again = {name: distribute_tensor(whole[name], leaf.device_mesh, leaf.placements) for name, leaf in tree.items()}
    for name, leaf in tree.items():  # what torch gives this rank of a tensor placed so
        assert torch.equal(leaf.to_local(), again[name].to_local()), name
    return {name: str(leaf.placements) for name, leaf in tree.items()}


def test_slices_that_are_split_further(pool):
    """Dimension 0 is cut over "model" first, which is the later axis of the mesh."""
    chain = sl.chain(sl.tensor_slicing({"up": "column", "down": "row"}), sl.zero(3))
    [found, *_] = pool.run(sliced, chain, mesh={"data": 2, "model": 2})
    assert found["up"].startswith("(_StridedShard(dim=0") and found["up"].endswith("Shard(dim=0))")
    assert found["down"] == "(Shard(dim=0), Shard(dim=1))"


def saved_by_torch(mesh, folder, chain):
    params = sl.shard(WHOLE, mesh, chain)
    dcp.save(sl.to_dtensors(params), checkpoint_id=folder)
    empty = sl.shard({name: torch.zeros_like(leaf) for name, leaf in WHOLE.items()}, mesh, chain)
    tree = sl.to_dtensors(empty)
    dcp.load(tree, checkpoint_id=folder)
    assert_same(sl.unshard(sl.from_dtensors(tree, empty)), WHOLE)


def test_torchs_checkpoints_take_them(tmp_path):
    sl.launch(saved_by_torch, str(tmp_path), sl.zero(3), mesh={"data": 2})
    params = sl.shard({name: torch.zeros_like(leaf) for name, leaf in WHOLE.items()}, sl.make_mesh())
    assert_same(sl.unshard(sl.checkpoint.import_dcp(tmp_path, params)), WHOLE)


def stepped_by_torch(mesh):
    loss_fn, params = mlp([4, 8, 4])
    batch = torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    sharded = sl.shard(params, mesh, sl.zero(3))
    _, grads = sl.value_and_grad(loss_fn)(sharded, batch)
    whole_grads = leaves_of(sl.unshard(grads))
    tree = sl.to_dtensors(sharded)
    leaves = [leaf.requires_grad_() for leaf in leaves_of(tree)]
    for leaf, grad in zip(leaves, whole_grads, strict=True):
        leaf.grad = distribute_tensor(grad, leaf.device_mesh, leaf.placements)
    torch.optim.AdamW(leaves, lr=0.1).step()
    ours = sl.unshard(sl.from_dtensors(tree, sharded))

    theirs = [leaf.clone().requires_grad_() for leaf in leaves_of(params)]
    for leaf, grad in zip(theirs, whole_grads, strict=True):
        leaf.grad = grad
    torch.optim.AdamW(theirs, lr=0.1).step()
    assert_same(leaves_of(ours), [leaf.detach() for leaf in theirs])

    state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(0.1))
    state = sl.replace_params(state, sl.from_dtensors(tree, state))
    assert_same(sl.unshard(state.params), ours)
    step(state, batch)


def test_torchs_optimizers_step_on_them(pool):
    pool.run(stepped_by_torch, mesh={"data": 2})


def test_what_is_refused(tmp_path):
    with pytest.raises(MeshError, match="one rank alone"):
        sl.to_dtensors(sl.shard(WHOLE, sl.make_mesh()))
    with pytest.raises(MeshError, match="simulated ranks"):
        sl.simulate(lambda mesh: sl.to_dtensors(sl.shard(WHOLE, mesh)), mesh={"data": 2})
    with pytest.raises(IllegalComposition, match="parameters are in stages"):
        blocks = [{"w": torch.ones(4, 4)} for _ in range(2)]
        sl.simulate(lambda mesh: sl.to_dtensors(sl.shard(blocks, mesh, sl.pipeline())), mesh={"data": 1, "pipe": 2})
