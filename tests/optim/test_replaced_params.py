"""Parameters replaced between steps: the next step continues from the new ones, with and without masters."""

from dataclasses import replace

import optree
import pytest
import torch
from helpers.models import TINY, mlp, regression_batch, share, tiny_gpt, token_batches
from helpers.trees import assert_same, copy_of

import shardlib as sl
from shardlib import checkpoint
from shardlib.errors import DonatedStateError, IllegalComposition, RankMismatch, TreeError
from shardlib.models import gpt

opt = sl.optim
FIT, PARAMS = mlp([6, 9, 4], torch.float32)
BATCH = regression_batch(8, 6, 4, torch.float32)


def other(leaf):
    return leaf * -0.5 + 0.25


def by_verb(state):
    return sl.replace_params(state, optree.tree_map(other, state.params))


def by_whole_tree(state):
    return sl.replace_params(state, optree.tree_map(other, sl.unshard(state.params)))


def by_assignment(state):
    state.params = optree.tree_map(other, state.params)
    return state


def in_place(state):
    with torch.no_grad():
        for leaf in optree.tree_leaves(state.params):
            leaf.copy_(other(leaf))
    return state


def by_mapping_the_state(state):
    params = iter(optree.tree_leaves(optree.tree_map(other, state.params)))
    count = len(optree.tree_leaves(state.params))
    leaves, treedef = optree.tree_flatten(state)
    return optree.tree_unflatten(treedef, [next(params) if n < count else leaf for n, leaf in enumerate(leaves)])


HOW = [by_verb, by_whole_tree, by_assignment, in_place, by_mapping_the_state]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("how", HOW)
def test_a_step_continues_from_replaced_parameters(how, stage, precision):
    """A step of size 0 leaves it; before, fp32 masters brought the old ones back."""

    def run(mesh):
        params = sl.shard(PARAMS, mesh, sl.chain(sl.zero(stage), sl.precision(precision, loss_scale=None)))
        state, step = sl.make_train_step(FIT, params, opt.sgd(lambda count: 0.1 * (count < 1), momentum=0.9))
        batch = share(BATCH, mesh.rank, 2)
        state, _ = step(state, batch)
        wanted = optree.tree_map(other, sl.unshard(state.params))
        state = how(state)
        assert_same(sl.unshard(state.params), wanted)
        state, _ = step(state, batch)
        assert_same(sl.unshard(state.params), wanted)

    sl.simulate(run, mesh={"data": 2})


@pytest.mark.parametrize("how", [by_verb, by_whole_tree, by_assignment, in_place])
def test_slices_and_stages(how):
    config = replace(TINY, vocab=32)
    _, params = tiny_gpt(vocab=32)
    parallel = sl.chain(
        sl.tensor_slicing(gpt.slicing_rules(config, blocks=True), axis="model"),
        sl.pipeline(schedule="1f1b", microbatches=2, axis="pipe"),
        sl.zero(1),
        sl.precision("bf16"),
    )

    def run(mesh):
        sharded = sl.shard(gpt.to_blocks(params), mesh, parallel)
        state, step = sl.make_train_step(gpt.make_sequential(config), sharded, opt.sgd(0.0))
        batch = share(token_batches(1, 8, config)[0], mesh.coords["data"], 2)
        state, _ = step(state, batch)
        wanted = optree.tree_map(other, sl.unshard(state.params))
        state, _ = step(how(state), batch)
        assert_same(sl.unshard(state.params), wanted)

    sl.simulate(run, mesh={"pipe": 2, "data": 2, "model": 2})


@pytest.mark.parametrize("donate", [True, False])
def test_masters_that_round_to_the_parameters_keep_their_digits(donate):
    params = sl.shard(PARAMS, sl.make_mesh(), sl.precision("bf16"))
    state, step = sl.make_train_step(FIT, params, opt.sgd(1e-3), donate=donate)
    state, _ = step(state, BATCH)
    before = copy_of(state.opt.masters)
    first = state.params["layers"][0]["bias"]
    with torch.no_grad():
        first[0] = 7.0
    settled = state.settled()
    changed = {name: (settled.opt.masters[name] != master).nonzero() for name, master in before.items()}
    assert sum(map(len, changed.values())) == 1
    assert sum(float(master.sum()) for master in settled.opt.masters.values()) != 0
    assert any((master == 7.0).any() for master in settled.opt.masters.values())
    assert_same(state.opt.masters, before)  # nothing is written to before the step


def test_nothing_is_done_where_nothing_was_replaced():
    params = sl.shard(PARAMS, sl.make_mesh(), sl.precision("bf16"))
    state, step = sl.make_train_step(FIT, params, opt.lookahead(opt.adam(1e-3), 5, 0.5))
    for _ in range(2):
        assert state.settled() is state
        assert sl.make_eval_step(FIT, state.params)(state, BATCH) > 0
        state, _ = step(state, BATCH)


def test_a_clone_of_a_state_trains_on_like_it():
    def steps(clone):
        params = sl.shard(PARAMS, sl.make_mesh(), sl.precision("bf16"))
        state, step = sl.make_train_step(FIT, params, opt.lookahead(opt.adam(1e-2), 3, 0.5))
        for _ in range(4):
            state, _ = step(state, BATCH)
            state = optree.tree_map(torch.clone, state) if clone else state
        return state.opt.masters

    assert_same(steps(True), steps(False))


@pytest.mark.parametrize("how", [by_verb, by_assignment, in_place])
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: opt.chain(opt.clip_by_global_norm(1.0), tx)])
@pytest.mark.parametrize("stage", [0, 3])
def test_lookahead_continues_from_replaced_parameters(how, wrap, stage):
    inner = opt.masked(opt.lookahead(opt.sgd(0.0), 2, 0.5), "*weight")

    def run(mesh):
        params = sl.shard(PARAMS, mesh, sl.zero(stage))
        state, step = sl.make_train_step(FIT, params, wrap(opt.chain(opt.masked(opt.clip_by_value(1e-9), "*"), inner)))
        batch = share(BATCH, mesh.rank, 2)
        state, _ = step(state, batch)
        wanted = optree.tree_map(other, sl.unshard(state.params))
        state = how(state)
        for _ in range(3):
            state, _ = step(state, batch)
        for found, leaf in zip(optree.tree_leaves(sl.unshard(state.params)), optree.tree_leaves(wanted), strict=True):
            torch.testing.assert_close(found, leaf, rtol=0, atol=1e-7)

    sl.simulate(run, mesh={"data": 2})


def test_zero_one_adam_refuses_replaced_parameters_while_ranks_have_diverged():
    tx = opt.zero_one_adam(1e-30, 2, local_step_scaler=2, local_step_clipper=2)
    steps = opt.ZeroOneSteps(2, local_step_scaler=2, local_step_clipper=2)

    def run(mesh):
        state, step = sl.make_train_step(FIT, sl.shard(PARAMS, mesh), tx)
        batch, seen = share(BATCH, mesh.rank, 2), set()
        for _ in range(12):
            state, _ = step(state, batch)
            sent = steps.sent(state.step)
            seen.add(sent)
            if sent is opt.Sent.NOTHING:
                with pytest.raises(IllegalComposition, match="while they are rank-local"):
                    sl.replace_params(state, optree.tree_map(other, state.params))
                continue
            wanted = optree.tree_map(other, sl.unshard(state.params))
            state = by_verb(state)
            state, _ = step(state, batch)
            assert_same(sl.unshard(state.params), wanted)
        assert seen >= {opt.Sent.NOTHING, opt.Sent.ONE_BIT}

    sl.simulate(run, mesh={"data": 2})


def test_an_average_is_written_back_and_its_memory_goes_with_it():
    params = sl.shard(PARAMS, sl.make_mesh(), sl.precision("bf16"))
    state, step = sl.make_train_step(FIT, params, opt.sgd(0.1))
    average = opt.ema(0.5)
    kept = average.init(state.params)
    for _ in range(3):
        state, _ = step(state, BATCH)
        averaged, kept = average.update(state.params, kept)
    wanted = copy_of(sl.unshard(averaged))
    old, state = state, sl.replace_params(state, averaged)
    with pytest.raises(DonatedStateError, match="replace_params has taken over"):
        old.params  # noqa: B018
    assert_same(sl.unshard(averaged), wanted)
    for name, master in state.opt.masters.items():
        assert torch.equal(master.bfloat16(), state.params.buffers[name])
    step(state, BATCH)
    with pytest.raises(DonatedStateError):
        averaged.tree  # noqa: B018


def test_without_donation_both_states_stay_usable():
    params = sl.shard(PARAMS, sl.make_mesh(), sl.precision("bf16"))
    state, step = sl.make_train_step(FIT, params, opt.adam(0.1))
    before = copy_of(optree.tree_leaves(state))
    replaced = sl.replace_params(state, optree.tree_map(other, state.params), donate=False)
    step(replaced, BATCH)
    assert_same(optree.tree_leaves(state), before)


def test_a_checkpoint_holds_replaced_parameters(tmp_path):
    def make():
        return sl.make_train_step(FIT, sl.shard(PARAMS, sl.make_mesh(), sl.precision("bf16")), opt.sgd(0.0))

    state, step = make()
    state = by_assignment(step(state, BATCH)[0])
    wanted = sl.unshard(state.params)
    path = checkpoint.save(tmp_path, state)
    assert_same(sl.unshard(state.params), wanted)
    restored = checkpoint.restore(path, make()[0])
    assert_same(sl.unshard(restored.params), wanted)
    assert restored.settled() is restored
    assert_same(sl.unshard(step(restored, BATCH)[0].params), wanted)


def test_other_parameters_than_the_states_are_refused():
    def run(mesh):
        state, step = sl.make_train_step(FIT, sl.shard(PARAMS, mesh, sl.zero(1)), opt.sgd(0.1))
        with pytest.raises(TreeError, match=r"sl\.unshard"):
            sl.replace_params(state, sl.shard(PARAMS, mesh, sl.zero(3)))
        with pytest.raises(TreeError, match=r"layers/1/weight: missing"):
            sl.replace_params(state, {"layers": PARAMS["layers"][:1]})
        with pytest.raises(TreeError, match=r"layers/0/bias: shape \(3,\), planned \(9,\)"):
            wrong = optree.tree_map(torch.clone, PARAMS)
            wrong["layers"][0]["bias"] = torch.zeros(3)
            sl.replace_params(state, wrong)
        with pytest.raises(RankMismatch, match=r"rank 0: .*; rank 1: "):
            sl.replace_params(state, optree.tree_map(lambda p: p + mesh.rank, state.params))
        state.params = sl.unshard(state.params)
        with pytest.raises(TreeError, match=r"sl\.replace_params\(state, params\)"):
            step(state, share(BATCH, mesh.rank, 2))

    sl.simulate(run, mesh={"data": 2})


def test_a_tied_leaf_that_was_changed_under_one_name_alone_is_refused():
    weight = torch.randn(3, 3)
    state, step = sl.make_train_step(
        lambda p, x: (x @ p["a"] @ p["b"]).square().mean(), {"a": weight, "b": weight}, opt.sgd(0.1)
    )
    whole = sl.unshard(state.params)
    with pytest.raises(TreeError, match="a and b"):
        sl.replace_params(state, {"a": whole["a"], "b": whole["b"] + 1})
    state = sl.replace_params(state, {"a": whole["a"] + 1, "b": whole["a"] + 1})
    step(state, torch.ones(2, 3))
