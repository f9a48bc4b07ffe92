"""What planning, printing and a step cost in Python grows as the model does, and not with the number of ranks.

Calls are counted, those that the package makes: unlike seconds they are the same on every machine.
"""

import functools
import gc
import sys
from pathlib import Path

import pytest
import torch

import shardlib as sl

PACKAGE = str(Path(sl.__file__).parent)
ADAMW = sl.optim.adamw(1e-3)
CHAINS = {
    "stage 1": sl.zero(1),
    "stage 3": sl.zero(3),
    "stage 3, int8": sl.chain(sl.zero(3), sl.quantize(weights="int8", gradients="int8")),
    "stage 2, micro-batches": sl.chain(sl.zero(2), sl.accumulate(2)),
}
UNITS = (6, 12, 18)
EVERY_CHAIN = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)


def model(units, device="cpu"):
    return [{"w": torch.eye(4, device=device), "b": torch.zeros(4, device=device)} for _ in range(units)]


def loss_fn(params, x):
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x.square().mean()


def calls(run):
    """How many functions the package enters and calls in ``run()``, C's functions too.

    No garbage is collected meanwhile: finalizers of what earlier tests left are functions of the package too.
    """
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE)

    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def assert_linear(cost):
    """The last six units cost no more than the six before."""
    few, more, most = (cost(units) for units in UNITS)
    assert most - more <= 1.005 * (more - few), (few, more, most)


@functools.cache
def planned(units, chain, ranks=8):
    """Calls that making a plan takes, and calls that printing it takes."""
    if units > 2:
        planned(2, chain)  # what is looked up once
    made, mesh, shapes, x = [], sl.abstract_mesh(data=ranks), model(units, "meta"), torch.zeros(4, 4)
    making = calls(lambda: made.append(sl.make_plan(shapes, mesh, chain, loss_fn=loss_fn, batch=x, optimizer=ADAMW)))
    return making, calls(lambda: str(made[0]))


@EVERY_CHAIN
def test_planning(chain):
    assert_linear(lambda units: planned(units, chain)[0])


@EVERY_CHAIN
def test_printing(chain):
    assert_linear(lambda units: planned(units, chain)[1])


@EVERY_CHAIN
def test_more_ranks_cost_nothing(chain):
    assert sum(planned(6, chain, 4096)) == pytest.approx(sum(planned(6, chain)), rel=0.1)


@pytest.mark.parametrize("ranks", [1, 2])
@EVERY_CHAIN
def test_a_step(chain, ranks):
    def cost(mesh, units):
        state, step = sl.make_train_step(loss_fn, sl.shard(model(units), mesh, chain), ADAMW)
        x = torch.ones(2, 4)

        def run():
            nonlocal state
            state, _ = step(state, x)

        return [calls(run) for _ in range(3)][-1]  # the first traces

    assert_linear(lambda units: sl.simulate(cost, units, mesh={"data": ranks})[0])
