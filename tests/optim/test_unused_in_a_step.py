"""`skip_unused`: parameters that a step does not use are left alone, as torch's optimizers leave those without a gradient."""

import pytest
import torch
import torch.nn.functional as F
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.tree import leaves_of, tree_map

G = torch.Generator().manual_seed(0)
PARAMS = {
    "body": {"w": torch.randn(6, 5, dtype=torch.float64, generator=G)},
    "heads": [
        {"w": torch.randn(3, 6, dtype=torch.float64, generator=G), "b": torch.zeros(3, dtype=torch.float64)}
        for _ in "abc"
    ],
}
X = torch.randn(4, 8, 5, dtype=torch.float64, generator=G)
# By step: the head of each of the four rows of two micro-batches of two ranks. The last one is never used.
HEADS = [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0]]


def loss_fn(params, batch):
    hidden = torch.tanh(F.linear(batch["x"], params["body"]["w"]))
    used = sorted(set(batch["head"].tolist()))
    outs = [F.linear(hidden[batch["head"] == head], **named(params["heads"][head])) for head in used]
    return sum(out.square().sum() for out in outs) / len(hidden)


def named(head):
    return {"weight": head["w"], "bias": head["b"]}


def batch_of(step, rows):
    return {"x": X[step % 4, rows], "head": torch.tensor(HEADS[step])[rows]}


def by_torch(make, clip):
    params = tree_map(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
    leaves = leaves_of(params)
    optimizer = make(leaves)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(len(HEADS)):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(params, batch_of(step, slice(0, 4))).backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        for grad in grads if clip and norm > clip else ():
            grad *= clip / norm
        optimizer.step()
        schedule.step()
    return tree_map(torch.Tensor.detach, params)


def rate(start):
    return lambda step: start / (1 + step)


CASES = {
    "adamw": (
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
        lambda: sl.optim.adamw(rate(0.05), weight_decay=0.1),
    ),
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda: sl.optim.sgd(rate(0.1), momentum=0.9)),
    "from_torch": (
        lambda p: torch.optim.NAdam(p, 0.05),
        lambda: sl.optim.from_torch(torch.optim.NAdam, lr=rate(0.05)),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", range(4))
def test_trains_as_torch_does(name, stage):
    theirs, ours = CASES[name]
    clip = 0.5 if name == "adamw" else None

    def run(mesh):
        tx = sl.optim.skip_unused(ours())
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(clip), tx) if clip else tx
        params = sl.shard(PARAMS, mesh, sl.chain(sl.zero(stage), sl.accumulate(2)))
        state, step = sl.make_train_step(loss_fn, params, tx)
        for number in range(len(HEADS)):
            state, _ = step(state, batch_of(number, slice(2 * mesh.rank, 2 * mesh.rank + 2)))
        return sl.unshard(state.params)

    wanted = by_torch(theirs, clip)
    for found in sl.simulate(run, mesh={"data": 2}):
        assert_close(found, wanted, 1e-10)
        assert torch.equal(found["heads"][2]["w"], PARAMS["heads"][2]["w"])


def test_masters_and_their_copies(tmp_path):
    """16-bit parameters keep the value of a master that is not moved, and the counts come back from a checkpoint."""

    def run(mesh):
        def fresh():
            params = sl.shard(PARAMS, mesh, sl.chain(sl.zero(2), sl.precision("bf16"), sl.offload("host")))
            return sl.make_train_step(loss_fn, params, sl.optim.skip_unused(sl.optim.adamw(0.1)))

        state, step = fresh()
        before = sl.unshard(state.params)["heads"][1]
        state, _ = step(state, batch_of(0, slice(2 * mesh.rank, 2 * mesh.rank + 2)))
        assert_close(sl.unshard(state.params)["heads"][1], before, 0)
        sl.checkpoint.save(tmp_path, state)
        missed = sl.checkpoint.restore(tmp_path, fresh()[0]).opt.inner.missed
        assert missed["heads/1/w"] == 1 and missed["heads/0/w"] == 0

    sl.simulate(run, mesh={"data": 2})


def test_what_nobody_can_know_is_refused():
    tx = sl.optim.skip_unused(sl.optim.adamw(0.1))
    with pytest.raises(IllegalComposition, match="only make_train_step knows"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="put clips before"):
        sl.optim.skip_unused(sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.1)))


def loss_of_head(params, batch):
    head = params["heads"][batch["head"]]
    out = F.linear(torch.tanh(F.linear(batch["x"], params["body"]["w"])), **named(head))
    terms = sl.Mean(out.square().sum(), len(out)), sl.Mean(out.abs().sum(), 2 * len(out))
    return sum(terms) if batch["several"] else terms[0]


STAGED = sl.sequential(
    [
        lambda params, carry, batch: torch.tanh(F.linear(batch["x"], params["body"]["w"])),
        lambda params, carry, batch: F.linear(carry, **named(params["heads"][batch["head"]])).square().mean(),
    ]
)
GRAPHS = {
    "1": sl.zero(1),
    "3, in 2 micro-batches, recomputed": sl.chain(sl.zero(3), sl.accumulate(2), sl.remat()),
    "3, in slices": sl.chain(sl.zero(3), sl.tensor_slicing({"body/w": "colwise_gather_output"}, axis="model")),
    "2, in bf16": sl.chain(sl.zero(2), sl.precision("bf16")),
    "3, several means": sl.zero(3),
    "pipeline": sl.chain(sl.zero(1), sl.pipeline("1f1b", microbatches=2, axis="model")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_know_what_a_step_uses(name):
    """Ranks use other heads, which are one unit, and in step 3 one of them, and no rank the last head."""
    heads = [(0, 1), (0, 0), (1, 0), (1, 1), (0, 0)]

    def run(mesh, compile):
        params, loss = tree_map(torch.Tensor.float, PARAMS), loss_of_head
        params["heads"] = {str(number): head for number, head in enumerate(params["heads"])}
        if "pipeline" in name:
            params, loss = [{"body": params["body"]}, {"heads": params["heads"]}], STAGED
        params = sl.shard(params, mesh, GRAPHS[name])
        tx = sl.optim.skip_unused(sl.optim.adamw(0.1, weight_decay=0.1))
        state, step = sl.make_train_step(loss, params, tx, compile=compile)
        rank = mesh.coords["data"]
        for number, ranks in enumerate(heads):
            rows = X[number % 4, 4 * rank : 4 * rank + 4].float()
            state, _ = step(state, {"x": rows, "head": str(ranks[rank]), "several": "several" in name})
        if compile:
            assert step.graph.graphs
        return sl.unshard(state.params), state.opt.inner.missed

    mesh = {"data": 2, "model": 2} if name in ("3, in slices", "pipeline") else {"data": 2}
    assert_close(sl.simulate(run, True, mesh=mesh), sl.simulate(run, False, mesh=mesh), 0)
