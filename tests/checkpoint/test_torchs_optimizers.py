"""States of torch's own optimizers go on as torch's: each class that `from_torch` takes, from each kind of file."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import deepspeed_checkpoints
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardlib as sl
from shardlib.errors import CheckpointError, IllegalComposition

CASES = [
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (optim.SGD, {}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adadelta, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.ASGD, {"t0": 2, "lambd": 0.1}),
]
OURS = {
    0: lambda lr: sl.optim.sgd(lr, momentum=0.9, nesterov=True),
    2: sl.optim.sgd,
    4: lambda lr: sl.optim.adamw(lr, weight_decay=0.01),
}
X = torch.randn(5, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DONE = 2  # steps of torch's before the files are written


def made():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def train(module, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def continued(module, mesh, stage, tx, read):
    """The step and the values after the remaining batches, from a state that ``read`` has filled."""

    def run(mesh):
        apply, params = sl.from_module(module)
        state, step = sl.make_train_step(
            lambda p, x: apply(p, x).square().mean(), sl.shard(params, mesh, stage=stage), tx
        )
        state = read(state)
        for x in X[DONE:]:
            state, _ = step(state, x.chunk(mesh.size)[mesh.rank])
        return state.step, sl.models.state_dict(module, state.params)

    return sl.simulate(run, mesh=mesh)[0]


def test_every_class_that_from_torch_takes_is_here():
    taken = set()
    for name in optim.__all__:
        kind = getattr(optim, name)
        if isinstance(kind, type) and kind is not optim.Optimizer:
            try:
                sl.optim.from_torch(kind, lr=0.1)
            except IllegalComposition:
                continue
            taken.add(kind)
    assert taken == {kind for kind, _ in CASES}


@pytest.mark.parametrize("case", range(len(CASES)), ids=[kind.__name__ for kind, _ in CASES])
def test_from_distributed_checkpoints(case, tmp_path):
    kind, options = CASES[case]
    module = made()
    optimizer = kind(module.parameters(), lr=0.01, **options)
    train(module, optimizer, X[:DONE])
    held = {"model": module.state_dict(), "optim": get_optimizer_state_dict(module, optimizer)}
    dcp.save(held, checkpoint_id=tmp_path, no_dist=True)
    told = {"step": DONE} if kind is optim.SGD else {}
    train(module, optimizer, X[DONE:])
    ours = OURS.get(case)
    for tx in (sl.optim.from_torch(kind, lr=0.01, **options), *([ours(0.01)] if ours else [])):
        for mesh, stage in (({"data": 1}, 0), ({"data": 3}, 3)):
            step, found = continued(
                made(), mesh, stage, tx, lambda s: sl.checkpoint.import_dcp(tmp_path, s, prefix="model.", **told)
            )
            assert step == len(X)
            for name, wanted in module.state_dict().items():
                torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-10)


class Flat(nn.Module):
    """A model of one parameter, of which DeepSpeed's flat group is a view."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4))

    def forward(self, x):
        return x @ self.weight.mT


@pytest.mark.parametrize("case", range(len(CASES)), ids=[kind.__name__ for kind, _ in CASES])
def test_from_deepspeed(case, tmp_path):
    kind, options = CASES[case]
    module = Flat()
    optimizer = kind(module.parameters(), lr=0.01, **options)
    train(module, optimizer, X[:DONE])
    state = optimizer.state_dict()
    held = state["state"].get(0, {})
    state["state"] = {
        0: {name: value.flatten() if getattr(value, "ndim", 0) else value for name, value in held.items()}
    }
    flat = module.weight.detach().flatten().clone()
    facts = {"partition_count": 1, "single_partition_of_fp32_groups": [flat], "base_optimizer_state": state}
    (tmp_path / "it").mkdir()
    torch.save({"optimizer_state_dict": facts}, tmp_path / "it" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model = {"module": {"seen": torch.ones(2)}, "buffer_names": ["seen"], "shared_params": {}, "global_steps": DONE}
    model["param_shapes"] = [{"weight": module.weight.shape}]
    torch.save(model, tmp_path / "it" / deepspeed_checkpoints.MODEL)
    train(module, optimizer, X[DONE:])
    step, found = continued(
        Flat(), {"data": 3}, 3, sl.optim.from_torch(kind, lr=0.01, **options),
        lambda s: sl.checkpoint.import_deepspeed(tmp_path, s, tag="it", partial=["seen"]),
    )  # fmt: skip
    assert step == len(X)
    torch.testing.assert_close(found["weight"], module.weight.detach(), rtol=1e-10, atol=1e-10)


def test_steps_that_no_file_tells_are_asked_for(tmp_path):
    module = made()
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    train(module, optimizer, X[:DONE])
    held = {"model": module.state_dict(), "optim": get_optimizer_state_dict(module, optimizer)}
    dcp.save(held, checkpoint_id=tmp_path, no_dist=True)
    apply, params = sl.from_module(made())
    state, _ = sl.make_train_step(lambda p, x: apply(p, x).sum(), params, sl.optim.sgd(0.1, momentum=0.9))
    with pytest.raises(
        CheckpointError, match=r"does not tell how many steps it has taken .*\. Give their number: step="
    ):
        sl.checkpoint.import_dcp(tmp_path, state, prefix="model.")
    assert sl.checkpoint.import_dcp(tmp_path, state, prefix="model.", step=7).opt.inner.count == 7


def test_numbers_that_differ_between_parameters_are_refused(tmp_path):
    module = made()
    optimizer = optim.NAdam(module.parameters(), lr=0.1)
    train(module, optimizer, X[:DONE])
    optimizer.state[module[0].weight]["mu_product"] += 1
    held = {"model": module.state_dict(), "optim": get_optimizer_state_dict(module, optimizer)}
    dcp.save(held, checkpoint_id=tmp_path, no_dist=True)
    apply, params = sl.from_module(made())
    state, _ = sl.make_train_step(lambda p, x: apply(p, x).sum(), params, sl.optim.from_torch(optim.NAdam, lr=0.1))
    with pytest.raises(CheckpointError, match=r"parameters differ in mu_product(?s:.*)0\.weight: 1\.\d+\n"):
        sl.checkpoint.import_dcp(tmp_path, state, prefix="model.")
