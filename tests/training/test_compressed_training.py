"""Training with gradients and parameters in few bits: against plain simulations, in plans, in checkpoints."""

import math
import re

import optree
import pytest
import torch
from helpers.measure import count_payload
from helpers.models import tiny_gpt, token_batches
from oracle.few_bits import FewBits

import shardlib as sl
from shardlib import checkpoint
from shardlib.checkpoint.residuals import residual_fragments
from shardlib.errors import NonFiniteError
from shardlib.models import gpt

FORMS = {
    "leaf": (sl.onebit(), "leaf", torch.float64),
    "blocks": (sl.onebit(scales=16), 16, torch.float64),
    "int8": (sl.quantize(gradients="int8", block=16), (16, 127), torch.float32),
    "int4": (sl.quantize(gradients="int4", block=16), (16, 7), torch.float32),
    "fp8": (sl.quantize(gradients="fp8", block=16), (16, "fp8"), torch.float32),
}


def params(dtype):
    generator = torch.Generator().manual_seed(1)
    return {
        "net": {
            "a": torch.randn(13, 7, generator=generator, dtype=dtype) * 0.3,
            "b": torch.zeros(7, dtype=dtype),
            "c": torch.randn(7, 3, generator=generator, dtype=dtype) * 0.3,
        }
    }


def loss_fn(params, batch):
    x, y = batch
    p = params["net"]
    return (torch.tanh(x @ p["a"] + p["b"]) @ p["c"] - y).square().mean()


def batch_of(rank, step, dtype):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 13, generator=generator, dtype=dtype), torch.randn(4, 3, generator=generator, dtype=dtype)


def simulated(stage, form, dtype, ranks, steps, microbatches=1):
    """The same in a loop over ranks: torch's gradients and AdamW, sums by `FewBits`."""
    tree = params(dtype)
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves(tree)]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, eps=1e-8, weight_decay=1e-4, foreach=False, fused=False)
    sizes = [leaf.numel() for leaf in leaves]
    chunks = [-(-size // ranks) for size in sizes] if stage else sizes
    owners = ranks if stage else 1
    filled, position = [], 0
    for owner in range(owners):
        for size, chunk in zip(sizes, chunks, strict=True):
            filled.append((position, position + min(max(size - owner * chunk, 0), chunk)))
            position += chunk
    sums = FewBits(ranks, position, filled, form, scattered=stage > 0, mean=False, dtype=dtype)

    def pack(grads):
        rows = []
        for owner in range(owners):
            for grad, chunk in zip(grads, chunks, strict=True):
                part = grad.reshape(-1)[owner * chunk : (owner + 1) * chunk]
                rows.append(torch.cat([part, part.new_zeros(chunk - len(part))]))
        return torch.cat(rows)

    def unpack(whole):
        columns = whole.view(owners, -1).split(chunks, dim=1)
        return [c.reshape(-1)[:n].view_as(leaf) for c, n, leaf in zip(columns, sizes, leaves, strict=True)]

    def summed(packed):
        results = sums(packed)
        return unpack(torch.cat(results) if stage else results[0])

    for step in range(steps):
        parts = [[b.chunk(microbatches) for b in batch_of(rank, step, dtype)] for rank in range(ranks)]
        per_micro = [
            [pack(torch.autograd.grad(loss_fn(tree, (x[m], y[m])) / ranks / microbatches, leaves)) for x, y in parts]
            for m in range(microbatches)
        ]
        if stage >= 2:  # reduced after each micro-batch
            found = [sum(grads) for grads in zip(*(summed(packed) for packed in per_micro), strict=True)]
        else:
            found = summed([sum(mine) for mine in zip(*per_micro, strict=True)])
        for leaf, grad in zip(leaves, found, strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", FORMS)
def test_trains_like_the_simulation(name, stage, microbatches):
    transform, form, dtype = FORMS[name]
    ranks, steps = 3, 12

    def run(mesh):
        chained = sl.chain(sl.zero(stage), transform, sl.accumulate(microbatches))
        state, step = sl.make_train_step(loss_fn, sl.shard(params(dtype), mesh, chained), sl.optim.adamw(1e-2))
        for number in range(steps):
            state, _ = step(state, batch_of(mesh.rank, number, dtype))
        return optree.tree_leaves(sl.unshard(state.params))

    wanted = simulated(stage, form, dtype, ranks, steps, microbatches)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for got in sl.simulate(run, mesh={"data": ranks}):
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, **tolerance)


def trained(mesh, transform, steps=3, dtype=torch.float32, **kwargs):
    """A state after some steps, its step, and the sharded plan's text."""
    sharded = sl.shard(params(dtype), mesh, transform)
    state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(1e-2), **kwargs)
    for number in range(steps):
        state, _ = step(state, batch_of(mesh.rank, number, dtype))
    return state, step


FACTORS = sl.chain(sl.zero(0), sl.powersgd(2))


@pytest.mark.parametrize(
    "transform",
    [sl.chain(sl.zero(0), sl.onebit()), sl.chain(sl.zero(2), sl.onebit()), FACTORS],
    ids=["0", "2", "factors"],
)
def test_a_bad_gradient_is_refused_by_name_and_changes_nothing(transform):
    def run(mesh):
        state, step = trained(mesh, transform, donate=False)
        before = optree.tree_map(torch.clone, (state.params.buffers, state.comm))
        x, y = batch_of(mesh.rank, 3, torch.float32)
        if mesh.rank == 1:
            y = y.clone()
            y[0, 0] = math.nan
        with pytest.raises(NonFiniteError, match=re.escape("the gradient of net/a")):
            step(state, (x, y))
        after = (state.params.buffers, state.comm)
        return all(map(torch.equal, optree.tree_leaves(before), optree.tree_leaves(after)))

    assert all(sl.simulate(run, mesh={"data": 2}))


@pytest.mark.parametrize("transform", [sl.chain(sl.zero(0), sl.onebit()), FACTORS], ids=["1 bit", "factors"])
def test_old_states_keep_their_residuals_without_donation(transform):
    def run(mesh):
        state, step = trained(mesh, transform, donate=False)
        kept = {name: error.clone() for name, error in state.comm.items()}
        after, _ = step(state, batch_of(mesh.rank, 3, torch.float32))
        again, _ = step(state, batch_of(mesh.rank, 3, torch.float32))
        assert all(torch.equal(after.comm[name], again.comm[name]) for name in kept)
        assert not all(torch.equal(after.comm[name], kept[name]) for name in kept)
        return all(torch.equal(state.comm[name], kept[name]) for name in kept)

    assert all(sl.simulate(run, mesh={"data": 2}))


@pytest.mark.parametrize("transform", [sl.chain(sl.zero(2), sl.onebit()), FACTORS], ids=["1 bit", "factors"])
def test_residuals_follow_a_changed_loss_scale(transform):
    def run(mesh):
        state, step = trained(mesh, sl.chain(transform, sl.precision("fp16")))
        before = {name: error.clone() for name, error in state.comm.items()}
        scale = state.scale.value
        x, y = batch_of(mesh.rank, 3, torch.float32)
        for _ in range(2):  # skipped, and with the second one the scale halves
            state, metrics = step(state, (x, y * math.inf))
            assert not metrics["finite"]
        return all(
            torch.equal(state.comm[n], before[n] * (state.scale.value / scale)) for n in before
        ), state.scale.value

    assert sl.simulate(run, mesh={"data": 2}) == [(True, 2.0**15)] * 2


NODES = {"node": 2, "local": 2}
INNER_FIRST = {"local": 2, "node": 2}  # shards are gathered along the last axis first: between nodes, then inside
SPLIT = sl.chain(sl.zero(3, axis="node"), sl.zero(3, axis="local"))
PLUS_PLUS = sl.chain(
    SPLIT,
    sl.hierarchical("local"),
    *(sl.quantize(weights="int8", gradients="int4", axis=axis, feedback=False) for axis in NODES),
)


def gpt_run(mesh, transform, steps=2, rows=8):
    loss, tree = tiny_gpt()
    plan = sl.make_plan(tree, mesh, transform, loss_fn=loss, batch=share_of(mesh, token_batches(1, rows=rows)[0]))
    state, step = sl.make_train_step(loss, sl.shard(tree, mesh, transform), sl.optim.adamw(1e-3))
    sent = count_payload(mesh)
    result = []
    for batch in token_batches(steps, rows=rows):
        state, metrics = step(state, share_of(mesh, batch))
        result.append((metrics["loss"].item(), sent()))
    return result, plan.payload(), optree.tree_leaves(sl.unshard(state.params))


def share_of(mesh, batch):
    return optree.tree_map(lambda leaf: leaf.chunk(mesh.size)[mesh.rank], batch)


@pytest.mark.parametrize("frozen", [(), "blocks/*"])
def test_a_second_shard_changes_no_number_and_keeps_backward_inside_the_node(frozen):
    """Backward goes through frozen leaves too."""
    split = sl.chain(SPLIT, sl.freeze(frozen))
    plain = sl.simulate(gpt_run, split, mesh=INNER_FIRST)
    second = sl.simulate(gpt_run, sl.chain(split, sl.hierarchical("local")), mesh=INNER_FIRST)
    for (result, payload, leaves), (told_second, planned, leaves_second) in zip(plain, second, strict=True):
        torch.testing.assert_close([loss for loss, _ in result], [loss for loss, _ in told_second], rtol=1e-6, atol=0)
        for one, other in zip(
            leaves, leaves_second, strict=True
        ):  # gradients are summed over the axes in another order
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert told_second[1][1] == planned
        assert result[1][1]["node"] > planned["node"]
        assert payload["local"] + payload["node"] > sum(planned.values())


def test_zero_plus_plus_between_nodes():
    """3M -> 0.75M of 16-bit parameters, and an fp32 scale per 128: what crosses the nodes' link, counted at the group."""
    units, numel = 3, 64 * 64  # every rank's part of a matrix is a whole number of blocks
    tree = {"blocks": [{"w": torch.full((64, 64), 0.01)} for _ in range(units)]}
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    def loss(params, batch):
        for block in params["blocks"]:
            batch = torch.tanh(batch @ block["w"])
        return batch.square().mean()

    def run(mesh, transform):
        transform = sl.chain(transform, sl.precision("bf16", reduce_dtype="bf16"))
        state, step = sl.make_train_step(loss, sl.shard(tree, mesh, transform), sl.optim.sgd(1e-3))
        sent = count_payload(mesh)
        step(state, x)
        return sent()["node"]

    # Each of two nodes holds half of the unit; the other half is sent to the other node.
    half = numel // 4
    gathers = 2 * units - 1  # backward begins with the unit that forward ended with
    plain = (gathers + units) * 2 * half
    few = units * (half * (1 + 4 / 128) + half * (0.5 + 4 / 128))
    assert sl.simulate(run, SPLIT, mesh=INNER_FIRST) == [plain] * 4
    assert sl.simulate(run, PLUS_PLUS, mesh=NODES) == [few] * 4
    assert 3 * 2 * units * half / few == pytest.approx(3.84)


def test_quantised_weights_are_what_every_rank_computes_with():
    """Int8 gathers over one axis: the loss is that of the rounded parameters, and what is stored stays exact."""
    from shardlib.kernels.quantize import Blockwise, dequantize, quantize

    form = Blockwise(8, 128)

    def rounded(leaf):
        halves = leaf.reshape(-1)
        chunk = -(-len(halves) // 2)
        padded = torch.cat([halves, halves.new_zeros(2 * chunk - len(halves))]).view(2, chunk)
        return padded

    tree = {"net": {"a": params(torch.float32)["net"]["a"][:12].clone()}}

    def loss(params, batch):
        return (batch @ params["net"]["a"]).square().mean()

    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))

    def run(mesh):
        sharded = sl.shard(tree, mesh, sl.chain(sl.zero(3), sl.quantize(weights="int8")))
        value, _ = sl.value_and_grad(loss)(sharded, x)
        return value, sl.unshard(sharded)["net"]["a"]

    rows = [dequantize(*quantize(row, form), form, len(row)) for row in rounded(tree["net"]["a"])]
    wanted = loss({"net": {"a": torch.cat(rows)[: tree["net"]["a"].numel()].view(12, 7)}}, x)
    for value, stored in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(value.float(), wanted, rtol=1e-6, atol=0)
        assert torch.equal(stored, tree["net"]["a"])


@pytest.mark.parametrize("transform", [sl.onebit(), sl.onebit(scales=16), sl.quantize(gradients="int4", block=16)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_keeps_residuals(tmp_path, stage, transform):
    chained = sl.chain(sl.zero(stage), transform)

    def straight(mesh):
        state, step = trained(mesh, chained)
        checkpoint.save(tmp_path, state)
        for number in range(3, 6):
            state, _ = step(state, batch_of(mesh.rank, number, torch.float32))
        return optree.tree_leaves((sl.unshard(state.params), state.comm))

    def resumed(mesh):
        state, step = trained(mesh, chained, steps=0)
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        for number in range(3, 6):
            state, _ = step(state, batch_of(mesh.rank, number, torch.float32))
        return optree.tree_leaves((sl.unshard(state.params), state.comm))

    for wanted, got in zip(
        sl.simulate(straight, mesh={"data": 3}), sl.simulate(resumed, mesh={"data": 3}), strict=True
    ):
        assert all(map(torch.equal, wanted, got))


@pytest.mark.parametrize("stages", [(0, 0), (0, 3), (3, 0), (2, 3)])
@pytest.mark.parametrize("ranks", [(3, 2), (2, 4), (4, 1)])
def test_the_total_residual_is_kept_on_another_number_of_ranks(tmp_path, stages, ranks):
    """With gradients of zero, 1-bit compression sends residuals: over ranks they add up to the same total."""

    def total(mesh, state):
        """Σ over ranks, leaf by leaf, through the plain gradient path: a step whose own gradients are zero."""
        found = {}
        for fragment in residual_fragments(state):
            key = fragment.name.split("/", 4)[-1]
            whole = found.setdefault(key, torch.zeros(100, dtype=torch.float64))
            whole[fragment.start : fragment.stop] += fragment.data
        return found

    def save(mesh):
        state, _ = trained(mesh, sl.chain(sl.zero(stages[0]), sl.onebit()))
        checkpoint.save(tmp_path, state)
        return total(mesh, state)

    def load(mesh):
        state, _ = trained(mesh, sl.chain(sl.zero(stages[1]), sl.onebit()), steps=0)
        return total(mesh, checkpoint.restore(checkpoint.latest(tmp_path), state))

    before = sl.simulate(save, mesh={"data": ranks[0]})
    after = sl.simulate(load, mesh={"data": ranks[1]})
    if ranks[1] == 1:
        assert not any(after)  # nothing is sent, and nothing is left out
        return
    for path in ("net/a", "net/b", "net/c"):
        wanted = sum(found[path] for found in before if path in found)
        got = sum(found[path] for found in after if path in found)
        assert wanted.abs().sum() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


REFUSED = [
    (sl.chain(sl.zero(0), sl.onebit(axis="model")), "travel over axis 'model'.*nothing sums them there: add zero"),
    (sl.chain(sl.zero(2), sl.quantize(weights="int8")), "none are split over it: add zero\\(stage=3, axis='data'\\)"),
    (
        sl.chain(sl.zero(2), sl.hierarchical("data")),
        "no parameters are split over it: add zero\\(stage=3, axis='data'\\)",
    ),
    (sl.chain(sl.zero(3), sl.hierarchical("data")), "axis 'data' would equal the stored one.*or drop"),
    (sl.chain(sl.zero(2), sl.onebit(), sl.quantize(gradients="int8")), "onebit.* and quantize.* both claim"),
]


@pytest.mark.parametrize(("transform", "message"), REFUSED)
def test_what_makes_no_sense_is_refused_while_planning(transform, message):
    model = 2 if "model" in message else 1
    with pytest.raises(sl.errors.IllegalComposition, match=message):
        sl.make_plan(params(torch.float32), sl.abstract_mesh(data=2, model=model), transform)


def test_values_out_of_range_are_refused():
    for make in (
        lambda: sl.onebit(scales=12),
        lambda: sl.onebit(scales="row"),
        lambda: sl.quantize(),
        lambda: sl.quantize(weights="int2"),
        lambda: sl.quantize(gradients="int8", block=100),
    ):
        with pytest.raises(sl.errors.IllegalComposition):
            make()
    with pytest.raises(sl.errors.IllegalComposition, match="holds no float64"):
        sl.make_plan(
            params(torch.float64), sl.abstract_mesh(data=2), sl.chain(sl.zero(1), sl.quantize(gradients="int8"))
        )


def test_without_a_state_residuals_are_refused():
    def run(mesh):
        batch = batch_of(mesh.rank, 0, torch.float32)
        with pytest.raises(sl.errors.IllegalComposition, match=r"use sl\.make_train_step, or feedback=False"):
            sl.value_and_grad(loss_fn)(sl.shard(params(torch.float32), mesh, sl.chain(sl.zero(0), sl.onebit())), batch)
        forgetful = sl.shard(params(torch.float32), mesh, sl.chain(sl.zero(1), sl.onebit(feedback=False)))
        return sl.value_and_grad(loss_fn)(forgetful, batch)[0].item()

    assert len(set(sl.simulate(run, mesh={"data": 2}))) == 1


def test_the_plan_prints_what_is_compressed():
    plan = sl.make_plan(params(torch.float32), sl.abstract_mesh(data=2), sl.chain(sl.zero(1), sl.onebit()))
    assert "gradients travel over axis 'data' in 1 bit, a scale per leaf" in str(plan)
    assert "residuals 512 B" in str(plan)
    assert plan.bytes("comm") == sum(leaf.local_bytes(plan.sizes) for leaf in plan.residuals) == 512
    nodes = sl.make_plan(params(torch.float32), sl.abstract_mesh(**NODES), PLUS_PLUS)
    assert "hierarchical(): keeps a second shard of parameters over axis 'local'" in str(nodes)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_an_owned_axis_under_a_pipeline_sends_what_the_plan_says(schedule):
    """A tied leaf once, also where its two stages are on one rank (zb-v)."""
    config = gpt.GPTConfig(vocab=32, layers=2, width=16, heads=2, sequence=8, tie=True)
    batch = {"tokens": torch.ones(4, 8, dtype=torch.long), "targets": torch.ones(4, 8, dtype=torch.long)}

    def run(mesh):
        transform = sl.chain(sl.zero(1, axis="local", replicate="node"), sl.pipeline(schedule, 2))
        sharded = sl.shard(gpt.to_blocks(gpt.init(config)), mesh, transform)
        optimizer = sl.optim.onebit_adam(1e-3, freeze_step=1, eps=1e-5, axis="node")
        state, step = sl.make_train_step(gpt.make_sequential(config), sharded, optimizer)
        state, _ = step(state, batch)
        sent = count_payload(mesh)
        state, _ = step(state, batch)
        return sent()["node"], state.params.plan.payload(owned=True)["node"]

    for counted, planned in sl.simulate(run, mesh={"node": 2, "local": 2, "pipe": 2}):
        assert counted == planned


def zero_one(mesh, steps, axis="data"):
    """0/1 Adam whose ranks go on their own from step 5 on, and meet at every fourth."""
    optimizer = sl.optim.zero_one_adam(1e-2, 3, local_step_scaler=1, local_step_clipper=4, eps=1e-3, axis=axis)
    transform = sl.zero(0) if axis == "data" else sl.zero(2, axis="local", replicate=axis)
    sharded = sl.shard(params(torch.float64), mesh, transform)
    state, step = sl.make_train_step(loss_fn, sharded, optimizer)
    for number in range(steps):
        state, _ = step(state, batch_of(mesh.rank, number, torch.float64))
    return state, step


@pytest.mark.parametrize(("shape", "axis"), [({"data": 3}, "data"), ({"node": 2, "local": 2}, "node")])
def test_a_checkpoint_keeps_rank_local_state(tmp_path, shape, axis):
    def straight(mesh):
        state, step = zero_one(mesh, 10, axis)
        checkpoint.save(tmp_path, state)
        own = optree.tree_leaves((state.params, state.opt.inner.mu, state.opt.inner.moved))
        own = [leaf.clone() for leaf in own]
        for number in range(10, 15):
            state, _ = step(state, batch_of(mesh.rank, number, torch.float64))
        return own, optree.tree_leaves((state.params, state.opt, state.comm))

    def resumed(mesh):
        state, step = zero_one(mesh, 0, axis)
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        for number in range(10, 15):
            state, _ = step(state, batch_of(mesh.rank, number, torch.float64))
        return optree.tree_leaves((state.params, state.opt, state.comm))

    wanted = sl.simulate(straight, mesh=shape)
    assert not torch.equal(wanted[0][0][0], wanted[-1][0][0]), "ranks have diverged"
    for (_, one), other in zip(wanted, sl.simulate(resumed, mesh=shape), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_another_number_of_ranks_all_resume_from_the_mean(tmp_path, ranks):
    def save(mesh):
        state, _ = zero_one(mesh, 10)
        checkpoint.save(tmp_path, state)
        return optree.tree_leaves((state.params, state.opt.inner.mu, state.opt.inner.moved))

    def load(mesh):
        state = checkpoint.restore(checkpoint.latest(tmp_path), zero_one(mesh, 0)[0])
        return optree.tree_leaves((state.params, state.opt.inner.mu, state.opt.inner.moved))

    saved = sl.simulate(save, mesh={"data": 3})
    for found in sl.simulate(load, mesh={"data": ranks}):
        for got, *theirs in zip(found, *saved, strict=True):
            torch.testing.assert_close(got, sum(theirs) / 3, rtol=1e-12, atol=1e-15)


COPIES = sl.chain(sl.zero(0, axis="node"), sl.zero(0, axis="local"))
ON_BOTH = sl.chain(sl.onebit(axis="node"), sl.onebit(axis="local"))
SPECS = {
    "copies": (sl.chain(COPIES, ON_BOTH), None),
    "the first of copies": (sl.chain(COPIES, sl.onebit(axis="node")), None),
    "split": (sl.chain(sl.zero(1, axis="node"), sl.zero(2, axis="local"), ON_BOTH), None),
    "hybrid": (sl.chain(sl.zero(3, axis="local", replicate="node"), ON_BOTH), None),
    "an optimizer's, of copies": (COPIES, "node"),
    "an optimizer's, of copies, the last": (COPIES, "local"),
    "an optimizer's, inside": (sl.zero(1, axis="local", replicate="node"), "node"),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs_say_over_which_axes_residuals_differ(name):
    transform, own = SPECS[name]

    def run(mesh):
        tx = sl.optim.onebit_adam(1e-2, 1, axis=own) if own else sl.optim.adamw(1e-2)
        state, step = sl.make_train_step(loss_fn, sl.shard(params(torch.float64), mesh, transform), tx)
        for number in range(3):
            state, _ = step(state, batch_of(mesh.rank, number, torch.float64))
        return mesh.coords, state.comm, state.params.plan

    result = sl.simulate(run, mesh=NODES)
    leaves = result[0][2].residuals
    assert leaves
    for leaf in leaves:
        axes = leaf.spec.axes
        found = {}
        for coords, comm, _ in result:
            found.setdefault(tuple(coords[axis] for axis in axes), []).append(comm[leaf.path])
        assert len(found) == leaf.shape[0]
        assert all(torch.equal(error, same[0]) for same in found.values() for error in same)
        assert len({error[0].numpy().tobytes() for error in found.values()}) == len(found)


def test_an_eval_step_takes_the_states_of_an_optimizer_that_owns_an_axis():
    """Made, as its docstring has it, of the parameters that the train step is made of."""

    def run(mesh):
        sharded = sl.shard(params(torch.float32), mesh, stage=0)
        evaluate = sl.make_eval_step(loss_fn, sharded)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.onebit_adam(1e-3, freeze_step=1, eps=1e-3))
        state, _ = step(state, batch_of(mesh.rank, 0, torch.float32))
        return float(evaluate(state, batch_of(mesh.rank, 0, torch.float32))) > 0

    assert all(sl.simulate(run, mesh={"data": 2}))
