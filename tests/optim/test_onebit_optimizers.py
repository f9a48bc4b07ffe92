"""Optimizers that compress: on every mesh, in place and pure, in plans and checkpoints, and their payload."""

import math

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.cuts import CUTS, tiny_blocks
from helpers.measure import count_payload, stored_bytes
from helpers.models import mlp, regression_batch, token_batches
from helpers.trajectories import batch_of, loss_fn, model
from helpers.trees import assert_close, assert_same, copy_of
from oracle import onebit_optimizers as oracle

import shardlib as sl
from shardlib import checkpoint
from shardlib.common import thresholds
from shardlib.kernels.global_norm import sum_of_squares
from shardlib.optim import Sent, ZeroOneSteps
from shardlib.optim.shards import MeshShards
from shardlib.optim.storing import optimizer_shards

RATE = sl.optim.warmup_linear_decay_schedule(0.0, 0.02, 3, 40)
MAKE = {
    "lamb": lambda **how: sl.optim.lamb(RATE, weight_decay=0.1),
    "onebit_adam": lambda **how: sl.optim.onebit_adam(RATE, 4, b2=0.9, weight_decay=0.1, **how),
    "onebit_adam, auto": lambda **how: sl.optim.onebit_adam(RATE, "auto", b2=0.5, weight_decay=0.1, **how),
    "onebit_lamb": lambda **how: sl.optim.onebit_lamb(RATE, 4, b2=0.9, weight_decay=0.1, **how),
    "zero_one_adam": lambda **how: sl.optim.zero_one_adam(
        RATE, 4, b2=0.9, weight_decay=0.1, var_update_scaler=2, local_step_scaler=2, local_step_clipper=4, **how
    ),
}
BY_NAME = pytest.mark.parametrize("name", MAKE)
COMPRESSING = pytest.mark.parametrize("name", [name for name in MAKE if name != "lamb"])


# --- sums for each parameter ------------------------------------------------------------------------------------


def layers():
    """A multi-layer perceptron as a list of blocks."""

    def layer(p, carry, batch):
        return torch.tanh(F.linear(batch[0] if carry is None else carry, p["weight"], p["bias"]))

    def last(p, carry, batch):
        return (F.linear(carry, p["weight"], p["bias"]) - batch[1]).square().mean()

    return sl.sequential([layer, layer, layer, last]), mlp([6, 9, 7, 5, 4])[1]["layers"]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_sums_for_each_parameter_count_every_element_once(cut, tie):
    shape, transform = CUTS[cut]
    _, params = tiny_blocks(vocab=30, tie=tie)

    def run(mesh):
        sharded = sl.shard(params, mesh, transform)
        tree, shards = optimizer_shards(sharded), MeshShards(sharded.plan, mesh)
        twice = {name: 2 * flat for name, flat in tree.items()}
        numbers = [placement.path for placement in sharded.plan.placements]
        both = (lambda a, b: sum_of_squares(a), lambda a, b: (a * b).sum())
        sums = shards.leaf_sums(both, tree, twice)
        assert shards.leaf_count(tree) == len(numbers)
        # -2 < every element: padding, which is 0, must not be among the largest of what is negative
        largest = shards.leaf_max(lambda a: (a - 100).max(), tree)
        return dict(zip(numbers, zip(*sums.tolist(), largest.tolist())))

    paths, leaves, _ = optree.tree_flatten_with_path(params)
    wanted = {
        "/".join(map(str, path)): (leaf.square().sum().item(), 2 * leaf.square().sum().item(), leaf.max().item() - 100)
        for path, leaf in zip(paths, leaves)
    }
    for found in sl.simulate(run, mesh=shape):
        assert found.keys() <= wanted.keys() and len(found) == len({id(leaf) for leaf in leaves})
        for path, values in found.items():
            assert values == pytest.approx(wanted[path], rel=1e-12)


def test_sums_of_trees_that_differ_between_ranks_are_means():
    def run(mesh):
        sharded = sl.shard(model(), mesh, sl.zero(0))
        tree = {name: flat * (1 + mesh.rank) for name, flat in optimizer_shards(sharded).items()}
        return MeshShards(sharded.plan, mesh, ("data",)).leaf_sums((sum_of_squares,), tree)[0]

    wanted = [leaf.square().sum().item() * (1 + 4 + 9) / 3 for leaf in optree.tree_leaves(model())]
    for found in sl.simulate(run, mesh={"data": 3}):
        assert sorted(found.tolist()) == pytest.approx(sorted(wanted), rel=1e-12)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_lamb_on_every_mesh_is_one_device(cut, tie):
    shape, transform = CUTS[cut]
    fit, params = tiny_blocks(vocab=30, tie=tie)
    batches = token_batches(4, rows=12)
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(1e3), sl.optim.lamb(RATE, eps=1e-5, weight_decay=0.1))
    _, _, final = training.simulate(shape, fit, params, batches, transform, tx)

    leaves, structure = optree.tree_flatten(params)
    names = list(dict.fromkeys(map(id, leaves)))
    slots, distinct = [names.index(id(leaf)) for leaf in leaves], {id(leaf): leaf for leaf in leaves}

    def grads(rank, step, flat):
        inputs = [p.view_as(distinct[name]).clone().requires_grad_() for p, name in zip(flat, names)]
        loss = fit(optree.tree_unflatten(structure, [inputs[slot] for slot in slots]), batches[step])
        return [grad.reshape(-1) for grad in torch.autograd.grad(loss, inputs)]

    def lr(step):
        return RATE(torch.tensor(float(step))).item()

    start = [distinct[name].reshape(-1) for name in names]
    *_, last = oracle.lamb(start, grads, 1, lr, eps=1e-5, decay=0.1, steps=4)
    wanted = [last["params"][0][slot].view_as(leaf) for slot, leaf in zip(slots, leaves)]
    assert_close(final, optree.tree_unflatten(structure, wanted), 1e-10)


@COMPRESSING
def test_stages_change_nothing(name):
    """A pipeline shares out the parameters; sums and exchanges are of the same.

    Not the GPT: the gradient of a key's bias is rounding alone, and would be sent with the sign of that.
    """
    fit, params = layers()
    batches, make = [regression_batch(8, 6, 4, seed=seed) for seed in range(12)], MAKE[name]
    plain = training.simulate({"data": 2}, fit, params, batches, sl.zero(0), make())
    cut = sl.chain(sl.zero(0), sl.pipeline("1f1b", 2))
    staged = sl.simulate(
        lambda mesh: training.train(mesh, fit, params, batches, cut, make()), mesh={"data": 2, "pipe": 2}
    )
    for losses, _, final in staged:
        assert losses == pytest.approx(plain[0], rel=1e-10)
        assert_close(final, plain[2], 1e-10)  # of 0/1 Adam too: the last step is one at which ranks meet


# --- pure and in place ------------------------------------------------------------------------------------------


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_apply_is_update_and_add_to_the_last_bit(name, dtype, scale):
    generator = torch.Generator().manual_seed(3)

    def tree():
        """One leaf is taken in several chunks, one is not contiguous."""
        big = torch.randn(70_000, generator=generator).to(dtype)
        return {"a": big, "b": torch.randn(4, 3, generator=generator).to(dtype).t()}

    tx = MAKE[name]()
    params = tree()
    state, in_place = tx.init(params), copy_of(params)
    its_state = tx.init(in_place)
    factor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    for _ in range(12):
        grads = tree()
        scaled = grads if scale is None else optree.tree_map(lambda g: g * scale, grads)
        given = copy_of((scaled, state, params))
        updates, after = tx.update(scaled, state, params)
        assert_same((scaled, state, params), given)  # pure
        params, state = sl.optim.apply_updates(params, updates), after
        its_state = tx.apply(in_place, copy_of(grads), its_state, scale=factor)
        if name == "zero_one_adam":  # written where they go, not moved: update's difference is rounded once more
            assert_close(in_place, params, torch.finfo(dtype).eps)
            params = copy_of(in_place)
        assert_same((in_place, its_state), (params, state))


@COMPRESSING
def test_update_on_shards_needs_a_state_for_residuals(name):
    def run(mesh):
        tx = MAKE[name]()
        sharded = sl.shard(model(), mesh, sl.zero(0))
        state, (_, grads) = tx.init(sharded), sl.value_and_grad(loss_fn)(sharded, batch_of(mesh.rank, 0))
        with pytest.raises(sl.errors.IllegalComposition, match=r"use sl\.make_train_step"):
            for _ in range(12):
                _, state = tx.update(grads, state, sharded)
        return True

    assert all(sl.simulate(run, mesh={"data": 2}))


@COMPRESSING
def test_in_a_chain_it_still_owns_its_axis(name):
    def run(mesh, clip):
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(1e6), MAKE[name]()) if clip else MAKE[name]()
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, sl.zero(0)), tx)
        for number in range(12):
            state, _ = step(state, batch_of(mesh.rank, number))
        return sl.unshard(state.params)

    for clipped, plain in zip(*(sl.simulate(run, clip, mesh={"data": 2}) for clip in (True, False))):
        assert_same(clipped, plain)


@COMPRESSING
def test_it_evaluates_with_what_it_trains(name):
    """An eval step of the parameters as they were sharded, before an optimizer was known."""

    def run(mesh):
        sharded = sl.shard(model(), mesh, sl.zero(0))
        evaluate = sl.make_eval_step(lambda params, batch: sl.Mean(loss_fn(params, batch), 1.0), sharded)
        state, step = sl.make_train_step(loss_fn, sharded, MAKE[name]())
        for number in range(3):
            result = evaluate(state, batch_of(mesh.rank, number)).item()
            state, metrics = step(state, batch_of(mesh.rank, number))
            assert result == pytest.approx(metrics["loss"].item(), rel=1e-12)
        return True

    assert all(sl.simulate(run, mesh={"data": 2}))


# --- what is sent, held and kept --------------------------------------------------------------------------------


def sent_by_step(mesh, tx, transform, steps):
    """Payload bytes of each step over each axis, and whether the ranks' parameters are the same after it."""
    sharded = sl.shard(model(), mesh, transform)
    state, step = sl.make_train_step(loss_fn, sharded, tx)
    sent = count_payload(mesh)
    result = []
    for number in range(steps):
        state, _ = step(state, batch_of(mesh.rank, number))
        result.append((sent()["data"], [leaf.clone() for leaf in optree.tree_leaves(state.params)]))
    return result


SIZES = [45, 55, 11, 33]  # of the leaves; three are one buffer
FULL = 2 * 8 * sum(SIZES) // 2  # float64, two ranks
ONE_BIT = sum(2 * math.ceil(sum(group) / 16) * 16 // 2 // 8 + 2 * 8 * len(group) for group in (SIZES[:1], SIZES[1:]))


def test_onebit_adam_sends_the_formulas_bytes():
    """2(n−1)/n·d/8 and two scales of each parameter, here of 8 bytes; before, 2(n−1)/n·8d."""
    for result in sl.simulate(lambda mesh: sent_by_step(mesh, MAKE["onebit_adam"](), sl.zero(0), 9), mesh={"data": 2}):
        assert [sent for sent, _ in result] == [FULL] * 4 + [ONE_BIT] * 5


def test_zero_one_adam_sends_what_its_schedule_says_and_ranks_differ_between():
    rule = ZeroOneSteps(4, 2, 2, 4)
    kinds = [rule.sent(step) for step in range(1, 14)]
    first, second = sl.simulate(
        lambda mesh: sent_by_step(mesh, MAKE["zero_one_adam"](), sl.zero(0), 13), mesh={"data": 2}
    )
    payload = {Sent.FULL: FULL, Sent.ONE_BIT: ONE_BIT, Sent.NOTHING: 0}
    assert set(kinds) == set(Sent)
    assert [sent for sent, _ in first] == [payload[kind] for kind in kinds]
    for kind, (_, one), (_, other) in zip(kinds, first, second):
        assert all(map(torch.equal, one, other)) == (kind is not Sent.NOTHING)


def test_zero_one_adams_steps_are_the_papers():
    """BERT: 118,000 steps, frozen at 12,500: 25.9 times fewer bits than 16 at every step."""
    counts = ZeroOneSteps(12500).count(118000)
    assert counts == {Sent.FULL: 153, Sent.ONE_BIT: 70468, Sent.NOTHING: 47379}
    bits = 16 * counts[Sent.FULL] + counts[Sent.ONE_BIT]
    assert round(16 * 118000 / bits, 1) == 25.9


def test_where_the_learning_rate_is_zero_ranks_stay_together():
    """Momentum is what ranks moved over the sum of learning rates: not where that is 0."""
    tx = sl.optim.zero_one_adam(sl.optim.linear_schedule(0.1, 0.0, 4), 2, local_step_scaler=1, local_step_clipper=2)

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, sl.zero(0)), tx)
        result = []
        for number in range(9):
            state, _ = step(state, batch_of(mesh.rank, number))
            result.append(copy_of(sl.unshard(state.params)))
        return result

    first, second = sl.simulate(run, mesh={"data": 2})
    assert_close(first[3], first[8], 1e-12)
    assert_same(first[4:], second[4:])


@COMPRESSING
def test_a_plan_that_knows_the_optimizer_is_traced_all_the_same(name):
    transform, mesh = sl.zero(3, axis="local", replicate="data"), sl.abstract_mesh(data=2, local=2)

    def planned(tx):
        return sl.make_plan(model(), mesh, transform, optimizer=tx, loss_fn=loss_fn, batch=batch_of(0, 0))

    plain, plan = planned(sl.optim.adam(0.1)), planned(MAKE[name]())
    assert plain.traces is not None and plan.gathers == plain.gathers
    assert plan.payload() == plain.payload()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
@BY_NAME
def test_state_bytes_are_the_plans(name, stage, ranks):
    """State bytes equal the plan's at first and after every step."""
    transform, how = sl.zero(stage, axis="local", replicate="data"), {} if name == "lamb" else {"scales": 64}

    def run(mesh):
        tx = MAKE[name](**how)
        plan = sl.make_plan(model(), mesh, transform, optimizer=tx)
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, transform), tx)
        held = set()
        for number in range(12):
            held.add((stored_bytes(state.opt, counters=True), stored_bytes(state.comm)))
            state, _ = step(state, batch_of(mesh.rank, number))
        return held, (plan.bytes("optimizer"), plan.bytes("comm"))

    for held, planned in sl.simulate(run, mesh={"data": ranks, "local": 2}):
        assert held == {planned}


@BY_NAME
@pytest.mark.parametrize("steps", [3, 8])
def test_a_checkpoint_keeps_everything(tmp_path, name, steps):
    """Saved before and after the freeze; for 0/1 Adam after a step that sends."""
    inside = sl.zero(1, axis="local", replicate="data")

    def go_on(mesh, state, step, first, last):
        for number in range(first, last):
            state, _ = step(state, batch_of(mesh.rank, number))
        return state

    def straight(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, inside), MAKE[name]())
        state = go_on(mesh, state, step, 0, steps)
        checkpoint.save(tmp_path, state)
        return optree.tree_leaves(go_on(mesh, state, step, steps, 14))

    def resumed(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, inside), MAKE[name]())
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        return optree.tree_leaves(go_on(mesh, state, step, steps, 14))

    assert ZeroOneSteps(4, 2, 2, 4).sent(steps) is not Sent.NOTHING
    mesh = {"data": 2, "local": 2}
    for wanted, got in zip(sl.simulate(straight, mesh=mesh), sl.simulate(resumed, mesh=mesh), strict=True):
        assert all(map(torch.equal, wanted, got))


FREEZE = {  # by the last step whose gradients the variance takes up
    "onebit_adam": lambda last: sl.optim.onebit_adam(RATE, last, b2=0.9, eps=1e-4),
    "onebit_lamb": lambda last: sl.optim.onebit_lamb(RATE, last, b2=0.9, eps=1e-4),
    "zero_one_adam": lambda last: sl.optim.zero_one_adam(RATE, last - 1, b2=0.9, eps=1e-4),
}


def stepped(mesh, tx, first, last, restored=None, saved=None):
    state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, sl.zero(0)), tx)
    if restored:
        state = checkpoint.restore(checkpoint.latest(restored), state)
    for number in range(first, last):
        state, _ = step(state, batch_of(mesh.rank, number))
    if saved:
        checkpoint.save(saved, state)
    return optree.tree_leaves((state.params, state.opt.inner))


@pytest.mark.parametrize("name", FREEZE)
def test_a_freeze_step_that_was_lowered_below_a_restored_states_freezes_the_next_step(tmp_path, name):
    def resumed(mesh):
        stepped(mesh, FREEZE[name](20), 0, 6, saved=tmp_path)
        last = 7 if name != "zero_one_adam" else 6  # its steps say beforehand which they are, the others' afterwards
        wanted = stepped(mesh, FREEZE[name](last), 0, 12)
        return wanted, stepped(mesh, FREEZE[name](3), 6, 12, restored=tmp_path)

    for wanted, got in sl.simulate(resumed, mesh={"data": 2}):
        assert all(map(torch.equal, wanted, got))


@pytest.mark.parametrize("name", ["lamb", "onebit_lamb"])
def test_states_of_parameters_move_with_them_to_another_mesh(tmp_path, name):
    """Buckets are others there: leaves that are split may be large enough for one of their own."""

    def train(mesh, stage, first, last):
        transform = sl.zero(stage, axis="local", replicate="data")  # one rank has nobody to send bits to
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, transform), MAKE[name]())
        if first:
            state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        for number in range(first, last):
            state, _ = step(state, batch_of(0, number))
        return state

    def straight(mesh):
        state = train(mesh, 0, 0, 8)
        checkpoint.save(tmp_path, state)
        return copy_of(sl.unshard(train(mesh, 0, 8, 14).params))

    def resumed(mesh):
        return copy_of(sl.unshard(train(mesh, 1, 8, 14).params))

    with thresholds.small(12):
        finals = [sl.simulate(run, mesh={"data": 1, "local": 2}) for run in (straight, resumed)]
    for wanted, got in zip(*finals):
        assert_close(got, wanted, 1e-10)


def test_a_freeze_step_of_numpy_is_a_number():
    def run(mesh, step):
        params = sl.shard({"w": torch.ones(8)}, mesh, sl.zero(0))
        loss_fn = lambda params, batch: (params["w"] * batch).sum()  # noqa: E731
        state, train_step = sl.make_train_step(loss_fn, params, sl.optim.onebit_adam(0.1, step))
        for _ in range(2):
            state, _ = train_step(state, torch.ones(8))
        return state.opt.inner.frozen.item()

    assert sl.simulate(run, np.int64(2), mesh={"data": 2}) == [1.0, 1.0]


def test_diverged_ranks_are_not_restored_before_the_freeze(tmp_path):
    def run(mesh):
        stepped(mesh, FREEZE["zero_one_adam"](3), 0, 6, saved=tmp_path)
        with pytest.raises(ValueError, match=r"zero_one_adam\(var_freeze_step=19\): .* frozen, after 6 steps"):
            stepped(mesh, FREEZE["zero_one_adam"](20), 6, 7, restored=tmp_path)

    sl.simulate(run, mesh={"data": 2})


@COMPRESSING
def test_elements_without_gradients_stay(name):
    """Rows that are never looked up, whatever signs are sent of them."""
    tx = MAKE[name]()

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, sl.zero(0)), tx)
        for number in range(12):
            state, _ = step(state, batch_of(mesh.rank, number))
        return sl.unshard(state.params)["table"][7:], {
            name: flat.view(9, 5)[7:] for name, flat in state.opt.inner.mu.items() if flat.numel() == 45
        }

    for rows, momentum in sl.simulate(run, mesh={"data": 2}):
        # weight decay alone moves them: along themselves
        directions = torch.nn.functional.cosine_similarity(rows, model()["table"][7:])
        torch.testing.assert_close(directions, torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=0)
        assert len(momentum) == 1 and not any(flat.any() for flat in momentum.values())


# --- refused ----------------------------------------------------------------------------------------------------

REFUSED = [
    (lambda: sl.optim.lamb(0.1, min_coeff=2, max_coeff=1), r"lamb\(min_coeff=2, max_coeff=1\): .*not above max_coeff"),
    (lambda: sl.optim.onebit_adam(0.1, "soon"), r"onebit_adam\(freeze_step='soon'\): .*at least 1 .* or 'auto'"),
    (lambda: sl.optim.onebit_adam(0.1, 5, scales=12), r"onebit_adam\(scales=12\): .*multiple of 8"),
    (lambda: sl.optim.onebit_lamb(0.1, "auto"), r"onebit_lamb\(freeze_step='auto'\): freeze_step is the number"),
    (lambda: sl.optim.onebit_lamb(0.1, 5, factor_threshold=1), r"onebit_lamb\(factor_threshold=1\)"),
    (lambda: sl.optim.onebit_lamb(0.1, 5, min_factor=5), r"onebit_lamb\(min_factor=5, max_factor=4.0\)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_hyper_parameters_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("transform", "axis", "message"),
    [
        (sl.zero(1), "data", r"zero splits the state over it.*zero\(stage, axis='local', replicate='data'\)"),
        (sl.zero(0), "rack", r"onebit_adam sums gradients over axis 'rack', which the mesh \(data\) does not have"),
        (sl.chain(sl.zero(0), sl.onebit()), "data", r"already sends them over it in 1 bit, a scale per leaf; drop one"),
    ],
)
def test_what_does_not_compose(transform, axis, message):
    with pytest.raises(sl.errors.IllegalComposition, match=message):
        sl.make_plan(model(), sl.abstract_mesh(data=2), transform, optimizer=sl.optim.onebit_adam(0.1, 5, axis=axis))


def test_two_in_one_chain():
    with pytest.raises(ValueError, match="onebit_adam and onebit_lamb in one chain: each reduces gradients itself"):
        sl.optim.chain(sl.optim.onebit_adam(0.1, 5), sl.optim.onebit_lamb(0.1, 5))


def test_the_axis_owner_is_last_in_a_chain():
    clip, own = sl.optim.clip_by_global_norm(1.0), MAKE["zero_one_adam"]()
    sl.optim.chain(clip, sl.optim.chain(clip, own))
    for wrong in ((own, clip), (sl.optim.chain(clip, own), clip)):
        with pytest.raises(ValueError, match=r"zero_one_adam makes parameters equal again .*: put it last"):
            sl.optim.chain(*wrong)
