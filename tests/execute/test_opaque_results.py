"""Results in objects: what torch's pytrees know is detached, copied, averaged and sent; what hides tensors is refused."""

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_same

import shardlib as sl
from shardlib.common.hidden import hides
from shardlib.errors import LossError

STAGES = pytest.mark.parametrize("stage", [0, 3])
FIT, PARAMS = mlp([6, 9, 4])
BLOCKS = PARAMS["layers"]
BATCH = regression_batch(8, 6, 4)


class Output:
    """Not a pytree of optree's, nor a mapping: one of torch's alone, as transformers' outputs are."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Scores(Output):
    """Another class of this kind."""


for cls in (Output, Scores):
    torch.utils._pytree.register_pytree_node(
        cls,
        lambda output: (list(vars(output).values()), list(vars(output))),
        lambda values, names, cls=cls: cls(**dict(zip(names, values))),
    )


@dataclasses.dataclass
class Hidden:
    values: list


def first(p, x, batch):
    return torch.tanh(F.linear(batch[0], p["weight"], p["bias"]))


def last(p, x, batch):
    return (F.linear(x, p["weight"], p["bias"]) - batch[1]).square().mean()


def stepped(loss_fn, params, transform):
    """A train step's state after, and its metrics, on this rank's share of the batch."""

    def run(mesh):
        sharded = sl.shard(params, mesh, transform)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.5))
        state, metrics = step(state, share(BATCH, mesh.coords["data"], mesh.shape["data"]))
        return sl.unshard(state.params), metrics

    return run


@STAGES
def test_outputs_of_torchs_pytrees_are_results(stage):
    def loss_fn(params, batch):
        weight = params["layers"][0]["weight"]
        error = sl.Mean(batch[1].sum(), len(batch[1]))
        return FIT(params, batch), Output(weight=weight, hidden=weight.sum(), error=error, rest=[Output(row=weight[1])])

    run = stepped(loss_fn, PARAMS, sl.chain(sl.zero(stage), sl.accumulate(2)))
    for _, metrics in sl.simulate(run, mesh={"data": 2}):
        aux = metrics["aux"]
        assert type(aux) is Output and not aux.hidden.requires_grad
        assert_same(aux.weight, BLOCKS[0]["weight"])  # of the loss, which an update has followed
        assert_same(aux.rest[0].row, BLOCKS[0]["weight"][1])
        assert aux.error.item() == pytest.approx(BATCH[1].sum().item() / 8)


def through_stages(mesh):
    """One output is a carry, the other aux."""

    def head(p, x, batch):
        return Output(hidden=first(p, x, batch))

    def tail(p, x, batch):
        return last(p, x.hidden, batch), Scores(row=p["weight"][1], mean=sl.Mean(batch[1].sum(), len(batch[1])))

    transform = sl.chain(sl.zero(1), sl.pipeline("1f1b", 2))
    return stepped(sl.sequential([head, tail]), BLOCKS, transform)(mesh)


def assert_pipelined(results):
    whole = stepped(FIT, PARAMS, sl.zero(1))
    ((wanted, _),) = sl.simulate(whole, mesh={"data": 1})
    for params, metrics in results:
        for layer, like in zip(params, wanted["layers"]):
            torch.testing.assert_close(layer["weight"], like["weight"], rtol=1e-12, atol=1e-14)
        assert_same(metrics["aux"].row, BLOCKS[1]["weight"][1])
        assert metrics["aux"].mean.item() == pytest.approx(BATCH[1].sum().item() / 8)


def test_outputs_pass_between_stages():
    assert_pipelined(sl.simulate(through_stages, mesh={"data": 1, "pipe": 2}))


def test_outputs_pass_between_processes(pool):
    """A stage that has made none of a class can read it."""
    assert_pipelined(pool.run(through_stages, mesh={"data": 1, "pipe": 2}))


HIDDEN = {
    "a dataclass": (lambda x: Hidden([x]), "out: Hidden"),
    "a mapping": (lambda x: collections.UserDict(x=x), r"out: UserDict; dict\(...\) of it is one"),
    "objects in objects": (lambda x: Hidden([Hidden([{"x": x}])]), "out: Hidden"),
    "a mean": (lambda x: Hidden([sl.Mean(3.0, 4)]), "out: Hidden"),
}


@STAGES
@pytest.mark.parametrize("kind", HIDDEN)
def test_objects_that_hide_tensors_are_refused_wherever_results_are(stage, kind):
    make, named = HIDDEN[kind]

    def with_aux(params, batch):
        return FIT(params, batch), {"out": make(params["layers"][0]["weight"]), "fine": object()}

    def with_buffers(params, buffers, batch):
        return with_aux(params, batch)

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        state, step = sl.make_train_step(with_aux, sharded, sl.optim.sgd(0.1))
        evaluate = sl.make_eval_step(lambda p, b: with_aux(p, b)[1], sharded)
        for what, act in {
            "aux": lambda: step(state, BATCH),
            "aux:": lambda: sl.value_and_grad(with_aux)(sharded, BATCH),
            "buffers": lambda: sl.value_and_grad(with_buffers)(sharded, BATCH, buffers={}),
            "the result": lambda: evaluate(sharded, BATCH),
            "the result:": lambda: evaluate.over(sharded, [BATCH]),
        }.items():
            with pytest.raises(LossError, match=rf"(?s){what}.*these hold tensors.* {named}\nReturn a dict or"):
                act()

    sl.simulate(run, mesh={"data": 2})


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_carries_that_hide_tensors_are_refused(schedule):
    """Pickled with its tensors, a carry would have lost their gradients."""
    count = 4 if schedule == "zb-v" else 2
    blocks = [lambda p, x, batch: Hidden([first(p, x, batch)])] + [lambda p, x, batch: x] * (count - 2)
    loss_fn = sl.sequential([*blocks, lambda p, x, batch: last(p, x.values[0], batch)])
    params = [BLOCKS[0], *({"w": torch.ones(1)} for _ in blocks[1:]), BLOCKS[1]]
    transform = sl.chain(sl.zero(1), sl.pipeline(schedule, 2))
    with pytest.raises(LossError, match="what passes between pipeline stages: these hold"):
        sl.simulate(stepped(loss_fn, params, transform), mesh={"data": 1, "pipe": 2})
    mesh = sl.abstract_mesh(data=1, pipe=2)
    with pytest.raises(LossError, match="what passes between pipeline stages: these hold"):
        sl.make_plan(params, mesh, transform, loss_fn=loss_fn, batch=BATCH)


def test_what_hides_tensors():
    slim = dataclasses.make_dataclass("Slim", ["x"], slots=True)
    endless = Hidden([])
    endless.values.append(endless)
    for value in (slim(torch.ones(2)), Hidden([slim({"a": (torch.ones(2),)})]), {"set": {torch.ones(1)}}):
        assert hides(value)
    holds_none = (torch.ones(2), "text", 3, None, torch.nn.Linear(2, 2), Hidden, lambda: slim, endless, slim("x"))
    assert not any(hides(value) for value in holds_none)
    assert hides(Hidden([sl.Mean(1, 2)]), (sl.Mean,)) and not hides(Hidden([sl.Mean(1, 2)]))
