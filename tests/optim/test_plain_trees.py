"""Custom loops on plain trees: tied leaves are one parameter, integers are none, and fp32 masters are a train step's."""

import pytest
import torch
import torch.nn.functional as F
from helpers.trees import copy_of

import shardlib as sl
from shardlib.errors import IllegalComposition, TreeError

MAKE = {
    "sgd": lambda: sl.optim.sgd(0.5),
    "momentum": lambda: sl.optim.sgd(0.5, momentum=0.9),
    "adamw": lambda: sl.optim.adamw(0.1),
    "lamb": lambda: sl.optim.lamb(0.1),
}


def _tied():
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"emb": table, "head": table, "count": torch.arange(3)}


def _loss(params, batch):
    return F.cross_entropy(F.embedding(batch["tokens"], params["emb"]).tanh() @ params["head"].t(), batch["targets"])


def _batches(count=4):
    dice = torch.Generator().manual_seed(1)
    return [{name: torch.randint(6, (8,), generator=dice) for name in ("tokens", "targets")} for _ in range(count)]


def _loop(params, tx):
    state, grad_fn, losses = tx.init(params), sl.value_and_grad(_loss), []
    for batch in _batches():
        loss, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        params = sl.optim.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


@pytest.mark.parametrize("name", MAKE)
def test_tied_leaves_stay_one_parameter(name):
    losses, params = _loop(_tied(), MAKE[name]())
    wanted, sharded = _loop(sl.shard(_tied(), sl.make_mesh(), stage=2), MAKE[name]())
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert params["emb"] is params["head"]
    assert torch.equal(params["count"], torch.arange(3))
    assert torch.allclose(params["emb"], sl.unshard(sharded)["emb"], rtol=1e-12, atol=0)


def test_sgd_on_tied_leaves_is_torchs():
    table = torch.nn.Parameter(_tied()["emb"].clone())
    optimizer, wanted = torch.optim.SGD([table], 0.5, momentum=0.9), []
    for batch in _batches():
        optimizer.zero_grad()
        loss = _loss({"emb": table, "head": table}, batch)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert _loop(_tied(), MAKE["momentum"]())[0] == pytest.approx(wanted, rel=1e-12)


def test_a_global_norm_that_would_count_tied_leaves_twice_is_refused():
    for make in MAKE.values():  # in a chain that reads each leaf, such as LAMB's, too
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.1), make())
        with pytest.raises(
            TreeError, match=r"(?s)counts them twice.*emb and head.*sl\.shard\(params, sl\.make_mesh\(\)\)"
        ):
            _loop(_tied(), tx)
        _loop(sl.shard(_tied(), sl.make_mesh()), tx)


def test_leaves_that_begin_as_one_tensor_and_have_other_updates_part():
    begin = torch.zeros(2)
    params = {"a": begin, "b": begin}
    updates = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(100.0), sl.optim.sgd(1.0))
    moved = sl.optim.apply_updates(params, tx.update(updates, tx.init(params), params)[0])
    assert moved["a"].tolist() == [-1, -1] and moved["b"].tolist() == [-2, -2]


def test_an_update_in_place_of_tied_leaves_is_refused():
    params, tx = _tied(), sl.optim.sgd(0.5)
    with pytest.raises(TreeError, match=r"(?s)added twice.*emb and head"):
        tx.apply(params, copy_of(params), tx.init(params))


@pytest.mark.parametrize("name", MAKE)
def test_integers_have_no_state_and_no_update(name):
    params, tx = {"w": torch.ones(3), "i": torch.arange(3)}, MAKE[name]()
    state = tx.init(params)
    _, grads = sl.value_and_grad(lambda p, b: (p["w"] * p["i"] * b).sum())(params, torch.ones(3))
    updates, state = tx.update(grads, state, params)
    moved = sl.optim.apply_updates(params, updates)
    alone = {"w": params["w"]}
    wanted, _ = tx.update({"w": grads["w"]}, tx.init(alone), alone)
    assert torch.equal(moved["w"], params["w"] + wanted["w"]) and moved["i"] is params["i"]
    in_place = {"w": params["w"].clone(), "i": params["i"]}
    tx.apply(in_place, copy_of(grads), tx.init(in_place))
    assert torch.allclose(in_place["w"], moved["w"], rtol=1e-6, atol=0) and in_place["i"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_are_a_train_steps(dtype):
    def job(mesh, master):
        transform = sl.chain(sl.zero(2), sl.precision(dtype, master=master))
        params, tx = sl.shard({"w": torch.ones(64)}, mesh, transform), sl.optim.sgd(1e-3)
        _, grads = sl.value_and_grad(lambda p, b: (p["w"] * b).sum().float())(params, torch.ones(64))
        return sl.optim.apply_updates(params, tx.update(grads, tx.init(params), params)[0]).role

    with pytest.raises(IllegalComposition, match="round small updates of 1 16-bit parameters"):
        sl.simulate(job, True, mesh={"data": 2})
    assert sl.simulate(job, False, mesh={"data": 2}) == ["param", "param"]
    with pytest.raises(IllegalComposition, match=r"master=False\) with sl.optim.stochastic_rounding"):
        job(sl.make_mesh(), True)


def test_parameters_that_a_module_does_not_train():
    module = torch.nn.Linear(2, 3)
    module.bias.requires_grad_(False)
    params, mesh = dict(module.named_parameters()), sl.make_mesh()
    with pytest.raises(TreeError, match=r"(?s)requires_grad=False, and would be trained.*bias.*sl\.freeze"):
        sl.shard(params, mesh)
    with pytest.raises(TreeError, match="requires_grad=False"):
        sl.make_train_step(lambda p, b: F.linear(b, p["weight"], p["bias"]).sum(), params, sl.optim.sgd(0.1))
    assert sl.shard(params, mesh, sl.freeze("bias")).plan.trained[0].paths == ("weight",)


def test_a_complex_parameter_without_an_update_is_refused():
    with pytest.raises(TreeError, match="c: in the parameters alone"):
        sl.optim.apply_updates({"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex64)}, {"w": torch.ones(2)})
