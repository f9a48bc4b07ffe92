"""`reproducible` on drawn trees and meshes: the bits of one device."""

import torch
from helpers import training
from helpers.bits import digest, whole
from helpers.merging import merging
from helpers.models import share
from helpers.profile import NIGHTLY
from helpers.strategies import models
from hypothesis import given, note, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.execute.batches import batch_index


@st.composite
def cases(draw):
    """A model, a mesh whose ranks suit a drawn number of micro-batches, and transforms."""
    node, data = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 4))
    total = node * data * draw(st.integers(1, 5))
    rows = total * draw(st.sampled_from([1, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    batches = [torch.randn(rows, 2, generator=generator, dtype=torch.float64) for _ in range(2)]
    stage, prefetch = draw(st.integers(0, 3)), draw(st.booleans())
    transforms = [sl.zero(stage, replicate="node", prefetch=prefetch), sl.reproducible(total)]
    if draw(st.booleans()):
        transforms.append(sl.remat("full"))
    return draw(models()), {"node": node, "data": data}, draw(st.permutations(transforms)), batches


def run(mesh, model, transforms, batches):
    params = sl.shard(model.params, mesh, sl.chain(*transforms))
    state, step = sl.make_train_step(model.loss_fn, params, training.optimizer(0.05))
    plan, found = params.plan, []
    for batch in batches:
        mine = share(batch, batch_index(plan, params.mesh), plan.batch_ranks)
        state, metrics = step(state, mine)
        found.append((metrics["loss"], metrics["grad_norm"]))
    return digest((found, whole(state)))


def on_one_device(case):
    model, mesh, transforms, batches = case
    one = dict.fromkeys(mesh, 1)
    return sl.simulate(run, model, transforms, batches, mesh=one)[0]


@settings(max_examples=settings().max_examples // (1 if NIGHTLY else 3))
@given(cases())
def test_drawn_meshes_give_the_bits_of_one_device(case):
    model, mesh, transforms, batches = case
    note(f"{mesh} {transforms}")
    with merging(model.merged):  # and on one device nothing
        found = sl.simulate(run, model, transforms, batches, mesh=mesh)
    assert set(found) == {on_one_device(case)}


@settings(max_examples=max(8, settings().max_examples // 10))
@given(case=cases().filter(lambda case: 1 < torch.Size(case[1].values()).numel() <= 4))
def test_real_processes_give_the_bits_of_one_device(pool, case):
    model, mesh, transforms, batches = case
    assert set(pool.run(run, model, transforms, batches, mesh=mesh)) == {on_one_device(case)}
