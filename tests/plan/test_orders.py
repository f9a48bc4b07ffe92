"""The two orders of a bucket's elements, for leaves that repeat as those of equal blocks do, and for others."""

import pytest
import torch
from helpers.merging import merging

import shardlib as sl

SHAPES = {
    "repeated": [(4, 3), (6,), (4, 3), (6,), (4, 3), (6,)],
    "repeated and padded": [(5, 1), (), (5, 1), ()],
    "all alike": [(4,)] * 5,
    "alike at first": [(4,), (4,), (4,), (6, 2)],
    "with an empty one": [(4,), (0, 3), (4,), (0, 3)],
    "all empty": [(0,), (0, 3), (0,), (0, 3)],
}


@pytest.mark.parametrize("mesh", [{"a": 2}, {"a": 3}, {"a": 2, "b": 3}])
@pytest.mark.parametrize("name", SHAPES)
def test_orders(name, mesh):
    numbers = iter(range(1, 1000))
    leaves = [torch.tensor([float(next(numbers)) for _ in range(max(0, n))]) for n in map(count, SHAPES[name])]
    leaves = [leaf.view(shape) for leaf, shape in zip(leaves, SHAPES[name], strict=True)]
    with merging(1 << 20):
        plan = sl.make_plan([{"w": leaf} for leaf in leaves], sl.abstract_mesh(**mesh), sl.zero(3, *mesh))
    (bucket,) = plan.buckets
    ways = bucket.ways
    chunks = [torch.zeros(ways, -(-leaf.numel() // ways)) for leaf in leaves]
    for chunk, leaf in zip(chunks, leaves, strict=True):
        chunk.view(-1)[: leaf.numel()] = leaf.reshape(-1)
    wanted = torch.cat(chunks, dim=1)
    packed = bucket.pack(leaves, torch.float32).view(ways, -1)
    assert torch.equal(packed, wanted)
    whole = torch.full((bucket.size(0),), -1.0)
    bucket.in_leaves(packed, whole)
    for found, leaf in zip(bucket.leaves(whole), leaves, strict=True):
        assert torch.equal(found, leaf)
    for owner in range(ways):
        assert torch.equal(bucket.owner_segment(whole, 0, owner), wanted[owner])
    assert [bucket.path_at(n) for n, one in enumerate(whole.tolist()) if one > 0] == [
        path for path, leaf in zip(bucket.paths, leaves, strict=True) for _ in range(leaf.numel())
    ]


def count(shape):
    return torch.Size(shape).numel()
