"""The second reading of specs, by which shards are compared with whole values; and what counts as a difference."""

import math

import pytest
import torch
from helpers.merging import merging
from helpers.strategies import MESHES, chains, models
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.debug.finding import difference, tolerance
from shardlib.debug.layout import segments, shards
from shardlib.mesh.mesh import coordinates
from shardlib.tree import flatten

from .cases import matrices


@given(st.data())
def test_it_is_that_of_the_library(data):
    mesh, model = data.draw(MESHES), data.draw(models())
    transforms, _, _ = data.draw(chains(mesh))
    with merging(model.merged):
        check(model.params, mesh, sl.chain(*transforms))


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_it_is_that_of_the_library_over_two_axes(axes):
    _, params, _ = matrices()
    check(params, {"a": 2, "b": 3}, sl.zero(3, axis=axes))
    rules = sl.tensor_slicing({"layers/0": "column", "layers/1": "row"}, axis="model")
    check(params, {"a": 2, "model": 3}, sl.chain(rules, sl.zero(3, axis="a")))


def check(params, mesh, chain):
    """`sl.shard` gives every rank what the second reading says."""
    plan = sl.make_plan(params, sl.abstract_mesh(**mesh), chain)
    wholes = dict(zip(*flatten(params)[:2]))
    placed = sl.simulate(lambda mesh: sl.shard(params, mesh, chain).buffers, mesh=mesh)
    for rank, buffers in enumerate(placed):
        for bucket in plan.buckets:
            due = list(shards(plan, bucket, wholes, coordinates(mesh, rank), bucket.param_level))
            assert [path for path, _ in due] == list(bucket.paths)
            for (_, shard), mine in zip(due, segments(bucket, buffers[bucket.name], bucket.param_level), strict=True):
                assert torch.equal(shard.to(mine.dtype), mine)


def test_differences():
    a = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for sign in (1, -1):
        apart = difference(a + sign * torch.tensor([0.0, 0.0, 1e-3]), a)
        assert apart.matters and apart.error == pytest.approx(1e-3) and apart.largest == 3
    assert not difference(a + 1e-13, a).matters and difference(a + 1e-9, a).matters
    assert not difference(a.float() + 1e-6, a.float()).matters and not difference(a.float(), a.double()).matters
    assert difference(a[:2], a).error == math.inf
    hollow = torch.tensor([math.nan, math.inf, 0.0])
    assert not difference(hollow, hollow.clone()).matters and difference(hollow, torch.zeros(3)).error == math.inf
    assert not difference(torch.empty(0), torch.empty(0)).matters
    numbers = torch.tensor([1, 2])
    assert difference(numbers + 1, numbers).matters and tolerance(numbers.dtype) == 0
