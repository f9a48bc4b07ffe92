"""Every exchange of a step says what it is for, and so do the buffers of messages."""

import pytest
import torch

import shardlib as sl
from shardlib.models import gpt

BATCH = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
LOSS = {"the loss and the gradients' norm"}
WITHIN = {"activations and their gradients"}
STAGES = {"activations from stage 0 to 1", "gradients from stage 1 to 0"}
AUX = {"what the last stage returns", "means beside the loss"}
TOKENS = {"tokens to experts", "tokens back from experts"}


def config(**more):
    return gpt.GPTConfig(vocab=64, layers=2, width=32, heads=4, sequence=16, **more)


SLICED = gpt.slicing_rules(config())
MOE = gpt.Experts((2,), sl.nn.MoEConfig(sl.nn.routers.top_k(2)))
CASES = {
    "slices": ({"data": 2, "model": 2}, lambda: [sl.zero(0), sl.tensor_slicing(SLICED)], WITHIN, {}),
    "a sequence": ({"seq": 2}, lambda: [sl.sequence("seq")], WITHIN, {}),
    "a ring": ({"seq": 2}, lambda: [sl.sequence("seq", kind="ring")], WITHIN, {}),
    "stages": ({"pipe": 2}, lambda: [sl.pipeline("1f1b", microbatches=2)], STAGES, {}),
    "experts in stages": (
        {"pipe": 2, "expert": 2},
        lambda: [sl.pipeline("1f1b", microbatches=2), sl.experts("expert"), sl.zero(0, axis="expert")],
        STAGES | AUX | TOKENS | {f"gradients of {name}" for name in TOKENS},
        {"moe": MOE},
    ),
}


def a_step(mesh, transforms, more):
    loss_fn, params = gpt.make_loss(config(**more)), gpt.init(config(**more))
    if "pipe" in mesh.shape:
        loss_fn, params = gpt.make_sequential(config(**more)), gpt.to_blocks(params)
    return sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.chain(*transforms)), sl.optim.sgd(0.1))


def its_rows():
    return {"tokens": BATCH[:, :-1].contiguous(), "targets": BATCH[:, 1:].contiguous()}


@pytest.mark.parametrize("case", CASES)
def test_every_exchange_has_a_name(case):
    mesh, transforms, names, more = CASES[case]

    def run(mesh):
        state, step = a_step(mesh, transforms(), more)
        first = sl.report.comm(step, state, its_rows(), warm=0)
        return [first, sl.report.comm(step, first.state, its_rows())]

    first, later = sl.simulate(run, mesh=mesh)[0]
    assert all(line.name for found in (first, later) for line in found.lines if line.op != "all_gather_object")
    found = {line.name for line in later.lines}
    assert LOSS | names <= found
    units = found - LOSS - names
    assert all(name.startswith(("the gradient of ", "the counts of rows")) for name in units), units


def test_what_is_received_is_no_other_memory():
    def run(mesh):
        state, step = a_step(mesh, CASES["experts in stages"][1](), {"moe": MOE})
        found = sl.report.memory(step, state, its_rows())
        came = {change.name.of for change in found.changes if change.name.kind == "messages"}
        others = max(change.bytes for change in found.changes if change.name.kind == "other")
        return came, others

    ranks = sl.simulate(run, mesh={"pipe": 2, "expert": 2})
    assert all(came >= STAGES for came, _ in ranks)
    assert max(others for _, others in ranks) < 256  # numbers of the step; a message is of kilobytes
