"""Tests that every gradient transformation must pass: on every mesh, in place and pure, in plans and checkpoints."""

import functools

import optree
import pytest
import torch
from helpers import training
from helpers.measure import stored_bytes
from helpers.optimizer_cases import CASES, VECTORS, batches, model
from helpers.trees import assert_close, assert_same, copy_of

import shardlib as sl
from shardlib import checkpoint
from shardlib.execute.batches import batch_index
from shardlib.optim import GradientTransformation, Locality
from shardlib.optim.storing import optimizer_shards

BY_NAME = pytest.mark.parametrize("name", CASES)
STEPS = 6
SPLIT = [({"data": 2}, 0), ({"data": 2}, 1), ({"data": 3}, 2), ({"data": 4}, 3)]
ALL = [({"data": ranks}, stage) for ranks in (1, 2, 3, 4) for stage in range(4)]


def transform_of(name, stage, replicate=None):
    """Vectors are frozen where an optimizer is for matrices alone."""
    zero = sl.zero(stage, replicate=replicate)
    return sl.chain(zero, sl.freeze(VECTORS)) if CASES[name].matrices else zero


@functools.cache
def on_one_device(name):
    """Parameters after `STEPS`, by autograd and ``tx.update`` on a plain pytree of the distinct trained leaves."""
    fit, params = model()
    tx = CASES[name].make()
    paths, leaves, treedef = optree.tree_flatten_with_path(params)
    names = ["/".join(path) for path in paths]
    tied = {"second/also": "first/wide"}
    trained = {
        path: leaf
        for path, leaf in zip(names, leaves)
        if path not in tied and not (CASES[name].matrices and path.endswith(("bias", "gain", "zero")))
    }
    rest = {path: leaf for path, leaf in zip(names, leaves) if path not in trained}
    state = tx.init(trained)
    for batch in batches(STEPS):
        inputs = {path: leaf.clone().requires_grad_() for path, leaf in trained.items()}
        whole = rest | inputs
        loss = fit(optree.tree_unflatten(treedef, [whole[tied.get(path, path)] for path in names]), batch)
        grads = dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values()))))
        updates, state = tx.update(grads, state, trained)
        trained = sl.optim.apply_updates(trained, updates)
    whole = rest | trained
    return optree.tree_unflatten(treedef, [whole[tied.get(path, path)] for path in names])


def check_trains(name, mesh, stage):
    _, _, got = training.simulate(mesh, *model(), batches(STEPS), transform_of(name, stage), CASES[name].make())
    assert_close(got, on_one_device(name), 1e-10)


@BY_NAME
@pytest.mark.parametrize(("mesh", "stage"), SPLIT)
def test_trains_as_on_one_device(name, mesh, stage):
    check_trains(name, mesh, stage)


@pytest.mark.nightly
@BY_NAME
@pytest.mark.parametrize(("mesh", "stage"), ALL)
def test_trains_as_on_one_device_everywhere(name, mesh, stage):
    check_trains(name, mesh, stage)


@BY_NAME
def test_update_is_pure_and_apply_does_the_same_in_place(name):
    _, params = model()
    whole = {"/".join(p): leaf for p, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params))}
    kept = {path: leaf for path, leaf in whole.items() if not CASES[name].matrices or leaf.dim() > 1}
    tx, factor = CASES[name].make(), torch.tensor(0.5, dtype=torch.float64)
    current, state = kept, tx.init(kept)
    in_place, its_state = copy_of(kept), tx.init(kept)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        grads = {p: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for p, leaf in kept.items()}
        given = copy_of((grads, state, current))
        updates, after = tx.update(optree.tree_map(lambda g: g * 0.5, grads), state, current)
        assert_same((grads, state, current), given)
        assert optree.tree_structure(after) == optree.tree_structure(state)
        current, state = sl.optim.apply_updates(current, updates), after
        its_state = tx.apply(in_place, copy_of(grads), its_state, scale=factor)
        assert_close(in_place, current, 1e-12)
        assert_close(_wide(its_state), _wide(state), 1e-12)


@BY_NAME
def test_copies_are_the_parameters_rounded(name):
    """Some leaves have copies, others are the parameters themselves; also with a skipped update."""
    _, params = model()
    whole = {"/".join(p): leaf.float() for p, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params))}
    kept = {path: leaf for path, leaf in whole.items() if not CASES[name].matrices or leaf.dim() > 1}
    wide = [path for path in kept if "wide" in path]
    tx, found = CASES[name].make(), []
    for with_copies in (False, True):
        moved, state = copy_of(kept), tx.init(kept)
        for step in range(STEPS):
            grads = {path: torch.sin(leaf + step) for path, leaf in kept.items()}
            if step == 2 and name == "skip_nonfinite":
                next(iter(grads.values())).fill_(torch.inf)
            narrow = {p: torch.zeros_like(moved[p], dtype=torch.bfloat16) for p in moved if p not in wide}
            state = tx.apply(moved, grads, state, copies=moved | narrow if with_copies else None)
            if with_copies:
                assert all(torch.equal(copy, moved[path].bfloat16()) for path, copy in narrow.items())
        found.append((moved, state))
    assert_same(*found)


IN_PARTS = ["adamw", "lion", "masked clip", "masked last", "partition", "inject_hyperparams", "lookahead"]


@pytest.mark.parametrize("name", IN_PARTS)
def test_parameters_that_keep_their_dtype_have_no_copy(name):
    """Leaves with and without copies are in one tree, of which a transformation may see a subset."""
    fit, params = model()
    params = optree.tree_map(torch.Tensor.float, params)
    transform = sl.chain(transform_of(name, 1), sl.precision("bf16", keep=("*bias", "*tall")))

    def loss_fn(params, batch):
        return fit(*optree.tree_map(torch.Tensor.float, (params, batch)))

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), CASES[name].make())
        before = copy_of(optimizer_shards(state.params))
        for batch in batches(3):
            state, _ = step(state, training.share(batch, batch_index(state.params.plan, mesh), mesh.size))
        stored = optimizer_shards(state.params)
        assert 0 < len(state.opt.masters) < len(stored)
        assert not any(torch.equal(before[bucket], stored[bucket]) for bucket in stored)
        assert all(torch.equal(stored[bucket], wide.bfloat16()) for bucket, wide in state.opt.masters.items())

    sl.simulate(run, mesh={"data": 2})


@BY_NAME
def test_strides_do_not_matter(name):
    """Leaves and gradients that are transposed in memory."""
    _, params = model()
    tx = CASES[name].make()
    kept = {
        "first/" + path: leaf for path, leaf in params["first"].items() if leaf.dim() > 1 or not CASES[name].matrices
    }
    kept |= {} if CASES[name].matrices else {"second/zero": params["second"]["zero"]}
    turned = {path: leaf.mT.contiguous().mT if leaf.dim() > 1 else leaf.clone() for path, leaf in kept.items()}
    found = []
    for given in (kept, turned):
        updates, state = tx.update(optree.tree_map(torch.sin, given), tx.init(given), given)
        state = tx.apply(given, optree.tree_map(torch.sin, given), state)
        found.append((updates, given, state))
    assert any(not leaf.is_contiguous() for leaf in turned.values())
    assert_close(_wide(found[1]), _wide(found[0]), 1e-12)


def _wide(tree):
    return optree.tree_map(lambda leaf: leaf.double(), tree)


@pytest.mark.pairwise
@BY_NAME
@pytest.mark.parametrize("narrow", [False, True], ids=["", "bf16"])
@pytest.mark.parametrize(("mesh", "stage"), [({"data": 3}, 0), ({"data": 3}, 1), ({"data": 2, "other": 2}, 3)])
def test_plans_count_what_it_holds_and_sends(name, mesh, stage, narrow):
    """Plans need no ranks, only shapes, and the state's structure does not change. In 16 bits the state is that of masters.

    Then parameters are the masters rounded, whoever writes them.
    """
    fit, params = model()
    transform = transform_of(name, stage, "other" if "other" in mesh else None)
    transform = sl.chain(transform, sl.precision("bf16")) if narrow else transform
    shapes = optree.tree_map(lambda leaf: leaf.to("meta"), params)
    shapes["second"]["also"] = shapes["first"]["wide"]  # tied
    planned = sl.make_plan(shapes, sl.abstract_mesh(**mesh), transform, optimizer=CASES[name].make())

    def run(mesh):
        state, step = sl.make_train_step(fit, sl.shard(params, mesh, transform), CASES[name].make())
        held, structure = stored_bytes(state.opt, counters=True), optree.tree_structure(state.opt)
        for batch in batches(2):
            mesh.traffic.reset()
            state, _ = step(state, training.share(batch, batch_index(state.params.plan, mesh), mesh.size))
            assert optree.tree_structure(state.opt) == structure
            stored = optimizer_shards(state.params)
            assert all(torch.equal(stored[bucket], wide.bfloat16()) for bucket, wide in state.opt.masters.items())
        return held, stored_bytes(state.opt, counters=True), mesh.traffic.payload

    traced = sl.make_plan(
        params, sl.abstract_mesh(**mesh), transform, loss_fn=fit, batch=batches(1)[0], optimizer=CASES[name].make()
    )
    for before, after, sent in sl.simulate(run, mesh=mesh):
        assert before == after == planned.bytes("optimizer")
        assert sent == traced.payload()
    sends = any(planned.needs[0].payload.values())
    assert ("\noptimizer  " in str(planned)) == sends


# Without those that also depend on an element's path or position.
ANYWHERE = [
    name
    for name, case in CASES.items()
    if case.locality is Locality.ELEMENTWISE
    and name not in ("masked", "masked last", "partition", "add_noise", "stochastic_rounding")
]


@pytest.mark.parametrize("name", ANYWHERE)
def test_elementwise_ones_commute_with_cutting(name):
    """The update of a slice is a slice of the update."""
    tx = CASES[name].make()
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(23, generator=generator, dtype=torch.float64)
    cut = list(whole.split([1, 9, 13]))
    states = tx.init([whole]), tx.init(cut)
    for _ in range(STEPS):
        grad = torch.randn(23, generator=generator, dtype=torch.float64)
        (moved,), first = tx.update([grad], states[0], [whole])
        parts, second = tx.update(list(grad.split([1, 9, 13])), states[1], cut)
        assert_close(torch.cat(parts), moved, 1e-12)
        states = first, second
        whole = whole + moved
        cut = list(whole.split([1, 9, 13]))


NEEDS = [(name, case) for name, case in CASES.items() if case.locality is not Locality.ELEMENTWISE]


@pytest.mark.parametrize(("name", "case"), NEEDS, ids=[name for name, _ in NEEDS])
def test_undeclared_reads_are_refused(name, case):
    """The same functions under the next narrower locality, and under none."""
    fit, params = model()
    tx = case.make()
    assert tx.locality is case.locality
    narrower = list(Locality)[list(Locality).index(case.locality) - 1]

    def run(mesh):
        sharded = sl.shard(params, mesh, transform_of(name, 1))
        undeclared = GradientTransformation(tx._init, tx._update)
        with pytest.raises(sl.errors.IllegalComposition, match="declares no locality"):
            sl.make_train_step(fit, sharded, undeclared)
        state, step = sl.make_train_step(fit, sharded, GradientTransformation(tx._init, tx._update, narrower))
        message = rf"declares Locality\.{narrower.name} asks for .*; declare Locality\.{case.locality.name}"
        with pytest.raises(sl.errors.IllegalComposition, match=message):
            step(state, batches(1)[0])

    sl.simulate(run, mesh={"data": 2})


@BY_NAME
def test_checkpoints_resume_on_other_meshes(name, tmp_path):
    """Saved on two ranks at stage 1, restored on three at stage 3: the same trajectory."""
    fit, params = model()

    def start(mesh, stage):
        return sl.make_train_step(fit, sl.shard(params, mesh, transform_of(name, stage)), CASES[name].make())

    def first(mesh):
        state, step = start(mesh, 1)
        for batch in batches(STEPS)[:3]:
            state, _ = step(state, training.share(batch, mesh.rank, mesh.size))
        checkpoint.save(tmp_path, state)

    def second(mesh):
        state, step = start(mesh, 3)
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        for batch in batches(STEPS)[3:]:
            state, _ = step(state, training.share(batch, mesh.rank, mesh.size))
        return sl.unshard(state.params)

    sl.simulate(first, mesh={"data": 2})
    for got in sl.simulate(second, mesh={"data": 3}):
        assert_close(got, on_one_device(name), 1e-10)


def test_every_public_transformation_is_in_the_table():
    """Under its name or in the case listed here; those that a step alone can call are tested elsewhere."""
    inside = {"clip_by_global_norm": "named_chain", "chain": "ema", "add_decayed_weights": "masked"}
    others = {"onebit_adam", "onebit_lamb", "zero_one_adam", "skip_unused"}
    others |= {"apply_updates", "global_norm", "leaf_norms", "vdot"}
    names = {name for name in sl.optim.__all__ if name.islower()} - others
    rates = "shardlib.optim.schedules."
    names = {name for name in names if not getattr(sl.optim, name).__module__.startswith(rates)}
    missing = sorted(name for name in names if inside.get(name, name) not in CASES)
    assert not missing, f"{missing} are not in tests/helpers/optimizer_cases.py"
