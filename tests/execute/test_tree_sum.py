"""Tree sums over micro-batches: one tree for any division among ranks and any order of arrival."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.collectives.codecs.in_order import tree_sum
from shardlib.execute.tree_sum import TreeSum


def numbers(count, seed=0):
    return list(torch.randn(count, 7, generator=torch.Generator().manual_seed(seed)).unbind())


def in_tree(leaves, order=None):
    tree = TreeSum(len(leaves))
    for index in order or range(len(leaves)):
        total = tree.add(index, leaves[index].clone())
    assert not tree.nodes
    return total


@given(st.integers(1, 40), st.data())
def test_any_order_gives_the_same_bits(count, data):
    leaves = numbers(count)
    assert torch.equal(in_tree(leaves), in_tree(leaves, data.draw(st.permutations(range(count)))))


@pytest.mark.parametrize(("ranks", "each"), [(1, 5), (2, 4), (3, 4), (5, 8), (6, 2), (8, 1), (2, 1)])
def test_ranks_hold_nodes_of_the_tree(ranks, each):
    leaves = numbers(ranks * each)
    parts = [in_tree(leaves[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    assert torch.equal(tree_sum(parts) if ranks > 1 else parts[0], in_tree(leaves))


@pytest.mark.parametrize("count", [1, 2, 8, 12, 16])
def test_few_sums_are_held(count):
    tree = TreeSum(count)
    held = []
    for index in range(count):
        tree.add(index, torch.ones(1))
        held.append(len(tree.nodes))
    assert max(held[:-1], default=1) == max(1, count.bit_length() - 1) and held[-1] == 0
