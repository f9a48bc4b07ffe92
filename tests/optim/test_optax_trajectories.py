"""Gradient transformations that optax or torch also have follow the same trajectories."""

import numpy as np
import optree
import pytest
import torch
from helpers.optimizer_cases import RECORDED
from helpers.trees import assert_close
from oracle import optax_trajectories as oracle

import shardlib as sl

TOLERANCE = 5e-6


def trajectory(name, paths, moved):
    """Parameters after the steps that are recorded, by ``moved(params, grads, state) -> (params, state)``."""
    params = {path: torch.from_numpy(np.array(value)) for path, value in oracle.start(paths).items()}
    state, kept = None, {}
    for step in range(oracle.STEPS):
        with torch.no_grad():
            grads = oracle.gradients(name, step, params, lift=_lift)
        params, state = moved(params, grads, state)
        if step + 1 in oracle.KEPT:
            kept[step + 1] = optree.tree_map(torch.clone, params)
    return kept


def _lift(array):
    return torch.from_numpy(np.array(array))


@pytest.mark.parametrize("form", ["update", "apply"])
@pytest.mark.parametrize("name", RECORDED)
def test_as_optax(name, form):
    tx = RECORDED[name].make()

    def updated(params, grads, state):
        state = tx.init(params) if state is None else state
        updates, state = tx.update(grads, state, params)
        return sl.optim.apply_updates(params, updates), state

    def applied(params, grads, state):
        state = tx.init(params) if state is None else state
        return params, tx.apply(params, grads, state)

    moved = {"update": updated, "apply": applied}[form]
    wanted = oracle.recorded(name)
    paths = oracle.MATRICES if RECORDED[name].matrices else tuple(oracle.SHAPES)
    for position, params in enumerate(trajectory(name, paths, moved).values()):
        assert_close(params, {path: _lift(values[position]) for path, values in wanted.items()}, TOLERANCE)


def by_torch(make):
    """``moved`` for `trajectory`, of a torch optimizer."""
    made = []

    def moved(params, grads, _):
        if not made:
            made.append(make([leaf.requires_grad_() for leaf in optree.tree_leaves(params)]))
        for leaf, grad in zip(optree.tree_leaves(params), optree.tree_leaves(grads)):
            leaf.grad = grad.detach()
        made[0].step()
        return params, None

    return moved


def slower(lr):
    """torch's Adafactor: 1/√t where that is less."""
    return lambda step: torch.minimum(torch.full_like(step, lr, dtype=torch.float64), (step + 1).double().rsqrt())


opt = sl.optim
TORCH = {
    "adagrad": (lambda: opt.adagrad(0.2, 0.0, 0.0), lambda p: torch.optim.Adagrad(p, 0.2, eps=0.0)),
    "rmsprop": (
        lambda: opt.rmsprop(0.02, 0.99, eps_in_sqrt=False, centered=True, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, 0.02, 0.99, centered=True, momentum=0.5),
    ),
    "adafactor": (
        lambda: opt.adafactor(slower(0.3), 1, weight_decay_rate=None),
        lambda p: torch.optim.Adafactor(p, 0.3),
    ),
    "muon": (
        lambda: opt.muon(0.02, nesterov=False, weight_decay=0.1, eps=1e-12),
        lambda p: torch.optim.Muon(p, 0.02, nesterov=False, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_as_torch(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch orthogonalises in it
    make, theirs = TORCH[name]
    paths = ("tall", "wide") if name in ("muon", "adafactor") else tuple(oracle.SHAPES)
    tx = make()

    def moved(params, grads, state):
        state = tx.init(params) if state is None else state
        return params, tx.apply(params, grads, state)

    wanted = trajectory(name, paths, by_torch(theirs))
    for step, params in trajectory(name, paths, moved).items():
        assert_close(params, optree.tree_map(torch.Tensor.detach, wanted[step]), TOLERANCE)


def test_swa_is_torchs_average():
    module = torch.nn.Linear(4, 3)
    theirs = torch.optim.swa_utils.AveragedModel(module)
    tx = opt.swa()
    state = tx.init(dict(module.named_parameters()))
    for _ in range(50):
        with torch.no_grad():
            for leaf in module.parameters():
                leaf.add_(torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1)))
        theirs.update_parameters(module)
        averaged, state = tx.update({name: leaf.detach() for name, leaf in module.named_parameters()}, state)
    assert_close(averaged, {name: leaf.detach() for name, leaf in theirs.module.named_parameters()}, TOLERANCE)


@pytest.mark.parametrize(("ours", "theirs"), [
    (opt.clip_by_value(0.3), lambda leaf: torch.nn.utils.clip_grad_value_([leaf], 0.3)),
    (opt.clip_by_block_norm(0.7), lambda leaf: torch.nn.utils.clip_grad_norm_([leaf], 0.7)),
])  # fmt: skip
def test_clipping_is_torchs(ours, theirs):
    grads = {path: _lift(value) for path, value in oracle.noise(4).items()}
    clipped, _ = ours.update(grads, ours.init(grads))
    for path, grad in grads.items():
        leaf = torch.zeros_like(grad).requires_grad_()
        leaf.grad = grad.clone()
        theirs(leaf)
        assert_close(clipped[path], leaf.grad, TOLERANCE)
    assert any((clipped[path] != grad).any() for path, grad in grads.items())


FROM_TORCH = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.05, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"lr": 0.05}),
    (torch.optim.RAdam, {"lr": 0.05}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
    (torch.optim.ASGD, {"lr": 0.05}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("cls", "options"), FROM_TORCH, ids=lambda value: getattr(value, "__name__", ""))
def test_from_torch_is_torchs(cls, options):
    tx = opt.from_torch(cls, **options)
    paths = tuple(oracle.SHAPES)

    def moved(params, grads, state):
        state = tx.init(params) if state is None else state
        updates, state = tx.update(grads, state, params)
        return sl.optim.apply_updates(params, updates), state

    wanted = trajectory("from_torch", paths, by_torch(lambda leaves: cls(leaves, **options)))
    for step, params in trajectory("from_torch", paths, moved).items():
        assert_close(params, optree.tree_map(torch.Tensor.detach, wanted[step]), TOLERANCE)


@pytest.mark.parametrize(("cls", "options", "why"), [
    (torch.optim.LBFGS, {}, "closure"),
    (torch.optim.SparseAdam, {}, "sparse|dense"),
    (torch.optim.Muon, {}, "2D parameters"),
    (torch.optim.Adafactor, {}, r"does not update each element alone: row_var, col_var, the parameters"),
])  # fmt: skip
def test_optimizers_of_torch_that_are_not_elementwise_are_refused(cls, options, why):
    with pytest.raises(sl.errors.IllegalComposition, match=why) as refused:
        opt.from_torch(cls, **options)
    assert cls.__name__ in str(refused.value)


class Written(torch.optim.Optimizer):
    """An optimizer as others write them: with the number of steps in the group, a norm of all gradients, or of each one."""

    def __init__(self, params, kind, lr=0.1):
        super().__init__(params, {"lr": lr, "kind": kind, "step": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            every = sum(leaf.grad.square().sum() for leaf in group["params"]).sqrt()
            for leaf in group["params"]:
                angle = torch.cosine_similarity(leaf.flatten(), leaf.grad.flatten(), dim=0).abs()
                by = {
                    "counts in the group": 1 / (1 - 0.9 ** group["step"]),
                    "clips by the norm of all": min(1.0, 20 / every),
                    "divides by the norm of each": 1 / leaf.grad.norm(),
                    "projects matrices": 0.5 if leaf.dim() > 1 and angle < 0.01 else 1.0,
                    "adds": 1.0,
                }[group["kind"]]
                leaf.sub_(leaf.grad * by, alpha=group["lr"])


@pytest.mark.parametrize("lr", [0.1, opt.linear_schedule(0.0, 0.1, 5)], ids=["number", "schedule"])
@pytest.mark.parametrize(
    "kind", ["counts in the group", "clips by the norm of all", "divides by the norm of each", "projects matrices"]
)
def test_optimizers_that_know_more_than_their_state_are_refused(kind, lr):
    """They would not train on shards, by an optimizer that each step makes, as they do by themselves."""
    with pytest.raises(sl.errors.IllegalComposition, match="does not update each element alone: the parameters differ"):
        opt.from_torch(Written, kind=kind, lr=lr)
    opt.from_torch(Written, kind="adds", lr=lr)
