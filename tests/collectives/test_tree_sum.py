"""Tree sums over micro-batches: one tree for any division among ranks and any order of arrival."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.collectives.tree_sum import Node, TreeSum, joined, most_held, most_nodes, nodes_of


def numbers(count, seed=0):
    return list(torch.randn(count, 7, generator=torch.Generator().manual_seed(seed)).unbind())


def by_levels(values):
    """The sum of a whole tree, level by level: neighbours are added, and the odd one goes up."""
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [*(a + b for a, b in zip(values[::2], values[1::2])), *odd]
    return values[0]


def share_of(leaves, first, count):
    tree = TreeSum(len(leaves))
    for index in range(first, first + count):
        tree.add(Node(0, index), leaves[index].clone())
    return tree


@given(st.integers(1, 40), st.data())
def test_any_order_gives_the_same_bits(count, data):
    leaves, tree = numbers(count), TreeSum(count)
    for index in data.draw(st.permutations(range(count))):
        tree.add(Node(0, index), leaves[index].clone())
    (total,) = tree.sums
    assert torch.equal(total, by_levels(leaves))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 6), st.data())
def test_ranks_along_several_axes_finish_one_tree(axes, share, data):
    """Shares of neighbouring ranks are joined axis by axis, from minor to major, in any order of the ranks."""
    leaves = numbers(torch.Size(axes).numel() * share)
    count = len(leaves)
    held = [share_of(leaves, first, share) for first in range(0, count, share)]
    for ways in axes:
        share *= ways
        groups = [held[start : start + ways] for start in range(0, len(held), ways)]
        held = []
        for group in groups:
            joined_tree = TreeSum(count)
            for tree in data.draw(st.permutations(group)):
                assert len(tree.sums) <= most_nodes(count, share // ways)
                for node, value in zip(tree.nodes, tree.sums, strict=True):
                    joined_tree.add(node, value)
            held.append(joined_tree)
    (total,) = held
    assert torch.equal(*total.sums, by_levels(leaves))


@pytest.mark.parametrize(
    ("leaves", "first", "count", "nodes"),
    [
        (6, 0, 6, [(3, 0)]),
        (6, 1, 3, [(0, 1), (1, 1)]),
        (6, 3, 3, [(0, 3), (2, 1)]),  # 4 + 5 has no neighbour
        (12, 3, 3, [(0, 3), (1, 2)]),
        (12, 8, 4, [(3, 1)]),
        (15, 5, 5, [(0, 5), (1, 3), (1, 4)]),
        (5, 4, 1, [(2, 1)]),
    ],
)
def test_neighbours_make_up_nodes(leaves, first, count, nodes):
    assert nodes_of(leaves, first, count) == tuple(nodes)
    tree = share_of(numbers(leaves), first, count)
    assert tree.nodes == tuple(nodes) and len(tree.sums) == len(nodes)


@pytest.mark.parametrize(
    ("leaves", "each", "most"), [(8, 2, 1), (12, 4, 1), (12, 3, 2), (12, 6, 2), (15, 5, 3), (9, 9, 1)]
)
def test_the_number_of_nodes_of_a_rank(leaves, each, most):
    assert most_nodes(leaves, each) == most


@pytest.mark.parametrize(("leaves", "each"), [(1, 1), (2, 2), (8, 8), (12, 12), (32, 16), (12, 3), (15, 5), (21, 7)])
def test_few_sums_are_held(leaves, each):
    held = []
    for first in range(0, leaves, each):
        tree = TreeSum(leaves)
        for index in range(first, first + each):
            tree.add(Node(0, index), torch.ones(1))
            held.append(len(tree.sums))
    assert max(held) == most_held(leaves, each)
    if each & (each - 1) == 0:
        assert max(held) == max(1, each.bit_length() - 1)


def test_joined_sums_are_new_memory_with_zeros_at_the_end():
    a, b = torch.ones(2), torch.full((2,), 2.0)
    assert joined([a, b], 3).tolist() == [1, 1, 2, 2, 0, 0]
    assert joined([a], 1).tolist() == [1, 1] and joined([a], 1).data_ptr() != a.data_ptr()
