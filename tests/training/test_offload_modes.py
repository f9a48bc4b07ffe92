"""Offload's modes: updates that are made ahead, and dropped where they do not hold; and gradients applied a step later."""

import contextlib
import gc
import math
import threading
import weakref

import pytest
import torch
from helpers.cuts import tiny_blocks
from helpers.models import Linear, mlp, regression_batch, share, token_batches
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import IllegalComposition, NonFiniteError, RankFailure, TreeError

MAX_NORM, LR = 1.03, 1e-2  # of the gradients' norms some are below it, and others above


def tx(**changes):
    return sl.optim.chain(sl.optim.clip_by_global_norm(MAX_NORM), sl.optim.adamw(LR, eps=1e-5, **changes))


def start(mesh, *transforms, model=None, **options):
    loss_fn, params = model or mlp([6, 9, 5, 4], torch.float64)
    return sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.chain(*transforms)), tx(), **options)


def batches(count):
    """Every third one has small gradients."""
    x, y = regression_batch(4, 6, 4, torch.float64)
    for number in range(count):
        factor = 1.0 if number % 3 else 0.05
        yield (x.roll(number, 0) * factor, y * factor)


@pytest.mark.parametrize("transforms", [[sl.zero(0)], [sl.zero(3), sl.accumulate(2)]], ids=["whole", "stage 3"])
def test_updates_are_undone_in_steps_that_clip_alone(transforms):
    def run(mesh, *more):
        state, step = start(mesh, *transforms, *more)
        seen = []
        for batch in batches(9):
            state, metrics = step(state, share(batch, mesh.rank, mesh.size))
            seen.append((metrics["grad_norm"].item() > MAX_NORM, metrics.get("undone")))
        return seen, sl.unshard(state.params), len(state.params.plan.trained)

    (exact, wanted, _), *_ = sl.simulate(run, mesh={"data": 2})
    (seen, found, buckets), *_ = sl.simulate(run, sl.offload(speculate=True), mesh={"data": 2})
    assert_same(found, wanted)
    assert {clipped for clipped, _ in exact} == {True, False} and {undone for _, undone in exact} == {None}
    assert [undone for _, undone in seen] == [buckets if clipped else 0 for clipped, _ in seen]


def test_losses_with_weights_are_expected_to_weigh_the_same_again():
    loss_fn, params = mlp([6, 9, 4], torch.float64)

    def weighted(params, batch):
        x, y, weight = batch
        return sl.Mean(loss_fn(params, (x, y)) * weight, weight)

    def run(*more):
        transform = sl.chain(sl.zero(0), *more)
        state, step = sl.make_train_step(weighted, sl.shard(params, sl.make_mesh(), transform), sl.optim.adamw(LR))
        undone = []
        for weight in (3.0, 3.0, 2.0, 2.0):
            batch = (*regression_batch(4, 6, 4, torch.float64), torch.tensor(weight))
            state, metrics = step(state, batch)
            undone.append(metrics.get("undone"))
        return sl.unshard(state.params), undone, len(state.params.plan.trained)

    found, undone, buckets = run(sl.offload(speculate=True))
    assert_same(found, run()[0])
    assert undone == [buckets, 0, buckets, 0]


@pytest.mark.parametrize("mode", ["speculate", "delay"])
def test_a_step_that_raises_or_is_repeated_finds_the_state_as_it_was(mode):
    """Also the state that a step with ``donate=False`` was given."""
    inputs = list(batches(5))
    broken = (inputs[0][0] * math.inf, inputs[0][1])

    def run(faults, donate):
        state, step = start(sl.make_mesh(), sl.zero(0), sl.offload(**{mode: True}), donate=donate)
        for number, batch in enumerate(inputs):
            if faults and number in (0, 1, 3):
                with pytest.raises(NonFiniteError, match="The state is unchanged"):
                    step(state, broken)
            if not donate:
                step(state, inputs[2])
            state, _ = step(state, batch)
        return sl.unshard(state.params), state.opt

    wanted = run(False, True)
    for found in (run(True, True), run(False, False), run(True, False)):
        assert_same(found, wanted)


def delayed(loss_fn, params, inputs, skipped=()):
    """The parameters after each step of AdamW in a plain loop, where a step applies the gradients of the step before it."""
    leaves = torch.utils._pytree.tree_leaves(params)
    values = [leaf.clone().requires_grad_() for leaf in leaves]
    moments = [(torch.zeros_like(leaf), torch.zeros_like(leaf)) for leaf in leaves]
    tree = torch.utils._pytree.tree_structure(params)
    pending, count, after = None, 0, []
    for number, batch in enumerate(inputs):
        loss = loss_fn(torch.utils._pytree.tree_unflatten(values, tree), batch)
        grads = torch.autograd.grad(loss, values)
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        following = [grad * min(1.0, MAX_NORM / norm) for grad in grads]
        if pending is not None:
            count += 1
            with torch.no_grad():
                for value, grad, (m, v) in zip(values, pending, moments, strict=True):
                    m.mul_(0.9).add_(grad, alpha=0.1)
                    v.mul_(0.999).addcmul_(grad, grad, value=0.001)
                    value.mul_(1 - LR * 0.01)
                    root = (v / (1 - 0.999**count)).sqrt() + 1e-5
                    value.sub_(LR * (m / (1 - 0.9**count)) / root)
        pending = None if number in skipped else following
        after.append([value.detach().clone() for value in values])
    return after


DELAYED = {
    "whole": ([sl.zero(0)], {"data": 1}),
    "stage 1": ([sl.zero(1)], {"data": 2}),
    "stage 2, accumulated": ([sl.zero(2), sl.accumulate(2)], {"data": 2}),
    "stage 3": ([sl.zero(3)], {"data": 2}),
    "stage 3, accumulated on the host": ([sl.zero(3), sl.accumulate(2)], {"data": 2}),
    "pipeline": ([sl.pipeline("1f1b", microbatches=2), sl.zero(1)], {"pipe": 2, "data": 2}),
}


@pytest.mark.parametrize("plan", DELAYED)
def test_delayed_gradients_are_those_of_the_oracle(plan):
    transforms, mesh = DELAYED[plan]
    where = {"params": "host", "gradients": "host"} if "on the host" in plan else {}
    loss_fn, params = tiny_blocks() if "pipe" in mesh else mlp([6, 9, 5, 4], torch.float64)
    if "pipe" in mesh:
        params = torch.utils._pytree.tree_map(lambda leaf: leaf.double(), params)
    inputs = list(token_batches(6) if "pipe" in mesh else batches(6))
    skipped = () if "pipe" in mesh else (2, 3)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(*transforms, sl.offload(delay=True, **where)))
        state, step = sl.make_train_step(loss_fn, sharded, tx(weight_decay=0.01), nonfinite="skip")
        after, number = [], mesh.coords.get("data", 0)
        for index, batch in enumerate(inputs):
            batch = share(batch, number, mesh.shape["data"])
            if index in skipped:
                batch = (batch[0] * math.nan, batch[1])
            state, metrics = step(state, batch)
            assert metrics["finite"] == (index not in skipped)
            after.append(torch.utils._pytree.tree_leaves(sl.unshard(state.params)))
        return after

    found = sl.simulate(run, mesh=mesh)[0]
    wanted = delayed(loss_fn, params, inputs, skipped)
    assert_same(found[0], torch.utils._pytree.tree_leaves(params))  # the first step applies no gradient
    for step, oracle in zip(found, wanted, strict=True):
        for value, right in zip(step, oracle, strict=True):
            torch.testing.assert_close(value, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["checkpoint", "to_host"])
def test_pending_gradients_go_where_the_state_goes(way, tmp_path):
    inputs = list(batches(5))

    def begin():
        return start(sl.make_mesh(), sl.zero(0), sl.offload(delay=True))

    state, step = begin()
    assert not state.opt.pending.due
    for batch in inputs[:3]:
        state, _ = step(state, batch)
    assert state.opt.pending.due and any(grad.any() for grad in state.opt.pending.grads.values())
    if way == "checkpoint":
        sl.checkpoint.save(tmp_path, state)
        fresh, again = begin()
        other = sl.checkpoint.restore(tmp_path, fresh)
    else:
        kept, again = begin()
        for batch in inputs[:3]:
            kept, _ = again(kept, batch)
        other = sl.to_device(sl.to_host(kept))
    for batch in inputs[3:]:
        state, _ = step(state, batch)
        other, _ = again(other, batch)
    assert_same(sl.unshard(other.params), sl.unshard(state.params))


def test_a_checkpoint_without_pending_gradients_begins_delayed_updates(tmp_path):
    """What another run left pending in the state is not applied. The state fits no run that cannot apply it."""
    inputs = list(batches(4))
    state, step = start(sl.make_mesh(), sl.zero(0), sl.offload())
    for batch in inputs[:2]:
        state, _ = step(state, batch)
    sl.checkpoint.save(tmp_path / "exact", state)
    late, again = start(sl.make_mesh(), sl.zero(0), sl.offload(delay=True))
    late, _ = again(late, inputs[3])
    late = sl.checkpoint.restore(tmp_path / "exact", late)
    late, _ = again(late, inputs[2])
    assert_same(sl.unshard(late.params), sl.unshard(state.params))
    late, _ = again(late, inputs[3])
    state, _ = step(state, inputs[2])
    assert_same(sl.unshard(late.params), sl.unshard(state.params))
    sl.checkpoint.save(tmp_path / "late", late)
    fresh, _ = start(sl.make_mesh(), sl.zero(0), sl.offload())
    with pytest.raises(
        TreeError, match=r"Make that step under offload\(delay=True\) and save; partial=\['opt/pending/\*'\]"
    ):
        sl.checkpoint.restore(tmp_path / "late", fresh)
    fresh = sl.checkpoint.restore(tmp_path / "late", fresh, partial=["opt/pending/*"])
    assert_same(sl.unshard(fresh.params), sl.unshard(state.params))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speculate": True, "delay": True}, "keep one"),
        ({"delay": True, "fraction": 0.5}, "use fraction=1.0"),
        ({"optimizer": "disk", "folder": "x", "speculate": True}, r"use offload\('host', speculate=True\)"),
        ({"optimizer": "device", "delay": True}, r"use offload\('host', delay=True\)"),
    ],
)
def test_modes_that_do_not_go_together_are_refused(options, match):
    with pytest.raises(IllegalComposition, match=match):
        sl.offload(**options)


def test_modes_are_refused_where_they_cannot_run():
    params, mesh = {"w": torch.ones(4, 4)}, sl.make_mesh()
    with pytest.raises(IllegalComposition, match=r"3 micro-batches in host memory.* leave out gradients='host'"):
        sl.shard(params, mesh, sl.chain(sl.accumulate(3), sl.offload(gradients="host", speculate=True)))
    for mode in ("speculate", "delay"):
        sharded = sl.shard(params, mesh, sl.offload(**{mode: True}))
        with pytest.raises(
            IllegalComposition, match=rf"reads across parameters; leave out {mode}, or use an elementwise"
        ):
            sl.make_train_step(lambda p, x: (p["w"] * x).sum(), sharded, sl.optim.lamb(1e-3))


@pytest.mark.parametrize("mode", ["speculate", "delay"])
def test_the_plan_counts_old_states_beside_new_ones(mode):
    _, params = mlp([8, 16, 4], torch.float32)
    count = sum(leaf.numel() for layer in params["layers"] for leaf in layer.values())

    def held(**options):
        transform = sl.chain(sl.zero(0), sl.precision("bf16"), sl.offload(**options))
        return sl.make_plan(params, sl.abstract_mesh(data=1), transform, optimizer=tx()).bytes("optimizer", "host")

    assert held() == 12 * count
    assert held(**{mode: True}) == (24 + 2 + (4 if mode == "delay" else 0)) * count


def test_an_update_is_undone_if_a_gradient_comes_late():
    """What reaches the parameter by a user's function is known after backward alone, and is summed on its own."""
    whole = {"layers": [{"w": torch.randn(6, 6, generator=torch.Generator().manual_seed(i))} for i in range(2)]}

    def loss_fn(params, x):
        first, last = (layer["w"] for layer in params["layers"])
        return (torch.tanh(Linear.apply(x, first) + x @ first.T) @ last.T).square().mean()

    def run(mesh, *more):
        sharded = sl.shard(whole, mesh, sl.chain(sl.zero(3), *more))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(LR))
        undone = []
        for number in range(3):
            draw = torch.Generator().manual_seed(10 * mesh.rank + number)
            state, metrics = step(state, torch.randn(4, 6, generator=draw))
            undone.append(metrics.get("undone"))
        return sl.unshard(state.params), undone

    wanted, _ = sl.simulate(run, mesh={"data": 2})[0]
    found, undone = sl.simulate(run, sl.offload(speculate=True), mesh={"data": 2})[0]
    assert_same(found, wanted)
    assert undone == [1, 1, 1]


class Meets(torch.autograd.Function):
    """Waits for an event in forward or in backward, and notes whether it came."""

    @staticmethod
    def forward(ctx, x, event, where, seen):
        ctx.waits = lambda: seen.append(event.wait(60))
        if where == "forward":
            ctx.waits()
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            ctx.waits()
        return grad, None, None, None


@pytest.mark.parametrize(("mode", "where"), [("speculate", "backward"), ("delay", "forward")])
def test_an_update_runs_while_the_step_computes(mode, where):
    """The first layer's computation does not end before an update has begun."""
    updated, waits, seen = threading.Event(), [False], []

    def update(updates, state, params, *, shards):
        updated.set()
        return torch.utils._pytree.tree_map(lambda grad: -0.1 * grad, updates), state

    def loss_fn(params, x):
        for layer in params["layers"]:
            x = torch.tanh(x @ layer["w"])
            if waits[0] and layer is params["layers"][0]:
                x = Meets.apply(x, updated, where, seen)
        return x.square().mean()

    optimizer = sl.optim.GradientTransformation(lambda params, shards: (), update, sl.optim.Locality.ELEMENTWISE)
    params = {"layers": [{"w": torch.eye(4)} for _ in range(3)]}
    sharded = sl.shard(params, sl.make_mesh(), sl.chain(sl.zero(0), sl.offload(**{mode: True})))
    state, step = sl.make_train_step(loss_fn, sharded, optimizer)
    state, _ = step(state, torch.ones(2, 4))
    updated.clear()
    waits[0] = True
    step(state, torch.ones(2, 4))
    assert seen == [True]


def plain(update):
    """A transformation without a state, elementwise."""
    return sl.optim.GradientTransformation(lambda params, shards: (), update, sl.optim.Locality.ELEMENTWISE)


@pytest.mark.parametrize("mode", ["speculate", "delay"])
def test_an_update_that_fails_on_one_rank_is_made_on_none(mode):
    """The last of three buckets fails, on rank 1."""

    def run(mesh, fails):
        calls = []

        def update(updates, state, params, *, shards):
            calls.append(len(calls))
            if fails and mesh.rank == 1 and len(calls) == 6:
                raise MemoryError("no more")
            return torch.utils._pytree.tree_map(lambda grad: -0.1 * grad, updates), state

        loss_fn, params = mlp([6, 9, 5, 4], torch.float64)
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(1), sl.offload(**{mode: True})))
        state, step = sl.make_train_step(loss_fn, sharded, plain(update))
        assert len(state.params.plan.trained) == 3
        inputs, errors = [share(batch, mesh.rank, mesh.size) for batch in batches(4)], []
        while state.step < 4:
            try:
                state, _ = step(state, inputs[state.step])
            except (MemoryError, RankFailure) as error:
                errors.append((type(error), state.step, *error.__notes__))
        return sl.unshard(state.params), state.opt.pending, errors

    wanted = sl.simulate(run, False, mesh={"data": 2})
    found = sl.simulate(run, True, mesh={"data": 2})
    note = "The state that the step was given is as it was: it can be saved, and used again"
    at = 1 if mode == "speculate" else 2
    assert [errors for *_, errors in found] == [[(RankFailure, at, note)], [(MemoryError, at, note)]]
    for (params, pending, _), (right, due, _) in zip(found, wanted, strict=True):
        assert_same((params, pending), (right, due))


@pytest.mark.parametrize("mode", ["speculate", "delay"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_step_keeps_no_parameters(mode, raises, tmp_path):
    """A state that is moved to disk leaves no parameters in memory, also after a step that raised."""
    state, step = start(sl.make_mesh(), sl.zero(0), sl.offload(**{mode: True}))
    (x, y), again = batches(2)
    state, _ = step(state, again)
    if raises:
        with contextlib.suppress(NonFiniteError):
            step(state, (x * math.inf, y))
    held = [weakref.ref(buffer) for buffer in state.params.buffers.values()]
    moved = sl.to_disk(state, tmp_path)
    del state
    gc.collect()
    assert held and not any(buffer() is not None for buffer in held)
    assert sl.to_device(moved).step == 1


@pytest.mark.parametrize("stage", [1, 2])
def test_delayed_gradients_keep_no_other_memory(stage, tmp_path):
    """Below stage 2 a rank's gradient is a part of a whole one. A process that starts again takes up what was moved."""

    def run(mesh):
        inputs = [share(batch, mesh.rank, mesh.size) for batch in batches(4)]
        state, step = start(mesh, sl.zero(stage), sl.offload(delay=True))
        sl.to_device(sl.to_disk(state, tmp_path))
        kept, on = start(mesh, sl.zero(stage), sl.offload(delay=True))
        for batch in inputs[:2]:
            kept, _ = on(kept, batch)
        sizes = [grad.untyped_storage().nbytes() - grad.nbytes for grad in kept.opt.pending.grads.values()]
        sl.to_disk(kept, tmp_path)
        fresh, again = start(mesh, sl.zero(stage), sl.offload(delay=True))
        other = sl.to_device(tmp_path, like=fresh)
        for batch in inputs[2:]:
            other, _ = again(other, batch)
        right, step = start(mesh, sl.zero(stage), sl.offload(delay=True))
        for batch in inputs:
            right, _ = step(right, batch)
        return sizes, sl.unshard(other.params), sl.unshard(right.params)

    for sizes, found, wanted in sl.simulate(run, mesh={"data": 2}):
        assert set(sizes) == {0}
        assert_same(found, wanted)


def test_a_factor_of_zero_is_a_factor():
    """An update by gradients times 0 is made all the same, when it is delayed."""

    def run(*more):
        tx = sl.optim.GradientTransformation(
            lambda params, shards: (),
            lambda grads, state, params, *, shards: (torch.utils._pytree.tree_map(lambda grad: grad - 1, grads), state),
            sl.optim.Locality.ELEMENTWISE,
            lead=lambda grads, scale, shards: torch.zeros((), dtype=torch.float64),
        )
        params = {"w": torch.ones(3)}
        sharded = sl.shard(params, sl.make_mesh(), sl.chain(sl.zero(0), *more))
        state, step = sl.make_train_step(lambda params, x: (params["w"] * x).sum(), sharded, tx)
        for _ in range(3):
            state, _ = step(state, torch.ones(3))
        return sl.unshard(state.params)["w"].tolist()

    assert (run(sl.offload()), run(sl.offload(delay=True))) == ([-2.0] * 3, [-1.0] * 3)
