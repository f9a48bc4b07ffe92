"""Drawn trees, meshes and chains: legal chains train like one device, others are refused."""

import optree
import pytest
import torch
from helpers import training
from helpers.measure import SCALARS, count_payload, stored_bytes
from helpers.merging import merging
from helpers.models import share
from helpers.profile import NIGHTLY
from helpers.strategies import MESHES, STAGE, chains, models
from helpers.trees import assert_close, assert_same
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from oracle import one_device, plain

import shardlib as sl
from shardlib.execute.batches import batch_index

TOLERANCE = 1e-10
MAX_NORM = 0.05


@st.composite
def cases(draw):
    mesh = draw(MESHES)
    transforms, microbatches, plain_form = draw(chains(mesh))
    rows = torch.Size(mesh.values()).numel() * microbatches * draw(st.sampled_from([1, 2]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    batches = [torch.randn(rows, 2, generator=generator, dtype=torch.float64) for _ in range(3)]
    return mesh, draw(models()), transforms, microbatches, plain_form, batches


@st.composite
def frozen_of(draw, params):
    """Paths of some leaves, never of "base"; a tied leaf goes by the first of its paths."""
    first = {}
    for path, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params)):
        first.setdefault(id(leaf), "/".join(map(str, path)))
    paths = list(first.values())
    return draw(
        st.lists(st.sampled_from(paths), unique=True, max_size=3).map(lambda some: [p for p in some if p != "base"])
    )


@given(st.data())
def test_every_legal_chain_trains_like_one_device(data):
    mesh, model, transforms, _, _, batches = data.draw(cases())
    frozen = data.draw(frozen_of(model.params))
    if frozen:
        transforms = [*transforms, sl.freeze(frozen)]
    note(f"{mesh} {transforms}")
    transform = sl.chain(*transforms)
    with merging(model.merged):
        got = training.simulate(mesh, model.loss_fn, model.params, batches, transform, training.optimizer(MAX_NORM))
    leaves = dict(zip(optree.tree_paths(model.params), optree.tree_leaves(model.params)))
    frozen_ids = {id(leaf) for path, leaf in leaves.items() if "/".join(map(str, path)) in frozen}
    wanted = one_device.train(
        model.loss_fn, model.params, batches, max_norm=MAX_NORM,
        frozen={path for path, leaf in leaves.items() if id(leaf) in frozen_ids},
    )  # fmt: skip
    assert got[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    assert got[1] == pytest.approx(wanted[1], rel=10 * TOLERANCE)
    assert_close(got[2], wanted[2], TOLERANCE)


def merged_train(mesh, most, *arguments):
    with merging(most):
        return training.train(mesh, *arguments)


@settings(max_examples=max(10, settings().max_examples // 10))
@given(case=cases())
def test_drawn_cases_on_real_processes(pool, case):
    """A simulation hides real hangs and real buffers."""
    mesh, model, transforms, _, _, batches = case
    transform, tx = sl.chain(*transforms), training.optimizer(MAX_NORM)
    wanted = one_device.train(model.loss_fn, model.params, batches, max_norm=MAX_NORM)
    arguments = model.loss_fn, model.params, batches, transform, tx
    for losses, norms, final in pool.run(merged_train, model.merged, *arguments, mesh=mesh):
        assert losses == pytest.approx(wanted[0], rel=TOLERANCE)
        assert norms == pytest.approx(wanted[1], rel=10 * TOLERANCE)
        assert_close(final, wanted[2], TOLERANCE)


@given(cases())
def test_every_zero_trains_and_sends_like_the_plain_implementation(case):
    mesh, model, transforms, microbatches, form, batches = case
    assume(form is not None and all(leaf.is_floating_point() for leaf in optree.tree_leaves(model.params)))
    ways, copies, stage = form
    with merging(model.merged):
        got = training.simulate(
            mesh, model.loss_fn, model.params, batches, sl.chain(*transforms), training.optimizer(MAX_NORM)
        )
    losses, ranks, _ = plain.train(
        model.loss_fn, model.params, batches, stage=stage, ways=ways, copies=copies,
        microbatches=microbatches, max_norm=MAX_NORM,
    )  # fmt: skip
    assert got[0] == pytest.approx(losses, rel=TOLERANCE)
    for final in ranks:
        assert_close(got[2], final, TOLERANCE)


@settings(max_examples=settings().max_examples // (1 if NIGHTLY else 4))
@given(cases())
def test_bytes_held_and_sent_are_what_the_plan_says(case):
    with merging(case[1].merged):
        check_bytes(*case)


def check_bytes(mesh, model, transforms, _microbatches, _plain, batches):
    transform, tx = sl.chain(*transforms), training.optimizer(MAX_NORM)
    abstract = sl.abstract_mesh(**mesh)
    part = share(batches[0], 0, sl.make_plan(model.params, abstract, transform).batch_ranks)
    plan = sl.make_plan(model.params, abstract, transform, loss_fn=model.loss_fn, batch=part, optimizer=tx)

    def run(mesh):
        sharded = sl.shard(model.params, mesh, transform)
        mine = share(batches[0], batch_index(sharded.plan, mesh), sharded.plan.batch_ranks)
        state, step = sl.make_train_step(model.loss_fn, sharded, tx)
        sent = count_payload(mesh, scalars=0)
        recorded = []
        for _ in range(2):
            state, _ = step(state, mine)
            recorded.append(sent())
        return recorded, (stored_bytes(state.params), stored_bytes(state.opt, counters=True))

    planned = plan.payload()
    for sent, held in sl.simulate(run, mesh=mesh):
        # Beside the payload every step sums some numbers of 8 bytes.
        scalars = {axis: 2 * 8 * SCALARS * (mesh[axis] - 1) // mesh[axis] for axis in planned}
        assert sent == [{axis: planned[axis] + scalars[axis] for axis in planned}] * 2
        assert held == (plan.bytes("param"), plan.bytes("optimizer"))


@given(cases(), st.randoms(use_true_random=False))
def test_a_chain_has_no_order(case, random):
    mesh, model, transforms, _, _, _ = case
    plan = sl.make_plan(model.params, sl.abstract_mesh(**mesh), sl.chain(*transforms))
    shuffled = list(transforms)
    random.shuffle(shuffled)
    first, rest = shuffled[0], shuffled[1:]
    for chain in (sl.chain(*shuffled), sl.chain(sl.chain(first), sl.chain(*rest)) if rest else first):
        other = sl.make_plan(model.params, sl.abstract_mesh(**mesh), chain)
        assert other == plan and str(other) == str(plan)


@given(MESHES, models(), STAGE, STAGE)
def test_shard_and_unshard_are_inverse(mesh, model, stage, other):
    def run(mesh):
        transform = sl.chain(sl.zero(stage, axis="a"), *([sl.zero(other, axis="b")] if "b" in mesh.shape else []))
        sharded = sl.shard(model.params, mesh, transform)
        again = optree.tree_map(lambda leaf: leaf.clone(), sharded)  # packed anew from its leaves
        return sl.unshard(sharded), sl.unshard(again)

    for back, again in sl.simulate(run, mesh=mesh):
        assert_same(back, model.params)
        assert_same(again, model.params)


ANY_TRANSFORM = st.one_of(
    st.builds(sl.zero, STAGE, axis=st.sampled_from("abc")),
    st.builds(lambda stage, axes: sl.zero(stage, *axes), STAGE, st.sampled_from([("a", "b"), ("b", "a"), ("a", "c")])),
    st.builds(sl.accumulate, st.integers(1, 3), sync=st.sampled_from([None, "each", "last"])),
    st.builds(sl.remat, st.sampled_from(["full", "dots"])),
    st.builds(sl.freeze, st.sampled_from(["w", "*", "nowhere"])),
    st.builds(sl.precision, st.sampled_from(["bf16", "fp16"])),
)


def is_legal(mesh, transforms):
    """The rules, said a second time."""
    zeros = [t for t in transforms if type(t).__name__ == "Zero"]
    axes = [axis for zero in zeros for axis in (*zero.axes, zero.replicate) if axis]
    others = [type(t).__name__ for t in transforms if t not in zeros]
    syncs = [t.sync for t in transforms if type(t).__name__ == "Accumulate"]
    return (
        len(set(axes)) == len(axes)  # each axis has one owner
        and set(axes) <= set(mesh)
        and {axis for axis, size in mesh.items() if size > 1} <= set(axes)
        and len(set(others)) == len(others)  # nothing said twice ("w" and "*" overlap)
        and all(t.globs != ("nowhere",) for t in transforms if type(t).__name__ == "Freeze")
        and ("each" not in syncs or any(zero.stage >= 2 for zero in zeros))
    )


@given(MESHES, st.lists(ANY_TRANSFORM, max_size=4))
def test_exactly_the_illegal_chains_are_refused(mesh, transforms):
    params = {"w": torch.zeros(3, 2), "b": torch.zeros(3)}

    def plan():
        return sl.make_plan(params, sl.abstract_mesh(**mesh), sl.chain(*transforms))

    if is_legal(mesh, transforms):
        assert plan().sizes == mesh
    else:
        with pytest.raises(sl.errors.IllegalComposition):
            plan()
