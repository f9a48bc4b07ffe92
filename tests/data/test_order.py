"""The order of samples: a permutation for every size, seed and epoch, which never changes."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.data.order import Shuffled, Unshuffled, permuted

# (size, seed, epoch) -> the first indices. Runs that were begun with an older version resume by them: never change one.
KNOWN = {
    (1, 0, 0): [0],
    (2, 0, 0): [1, 0],
    (7, 0, 0): [2, 1, 6, 3, 0, 4, 5],
    (7, 0, 1): [2, 1, 6, 3, 5, 0, 4],
    (7, 1, 0): [4, 1, 0, 3, 6, 5, 2],
    (10, 18446744073709551615, 3): [2, 7, 8, 5, 4, 9, 3, 0],
    (1000, 0, 0): [449, 598, 468, 729, 334, 381, 502, 323],
    (65536, 42, 7): [22999, 39442, 61672, 60897, 63411, 18448, 21680, 36495],
    (1000003, 0, 0): [310291, 383998, 553127, 315993, 363176, 112933, 230574, 780759],
    (1000000000, 0, 0): [782422673, 367250040, 125781559, 122946352, 72936507, 94239991, 770978302, 390729378],
    (1000000000, 0, 1): [201744684, 214537055, 798612222, 805369767, 346175165, 755764538, 228545385, 506349887],
    (1099511627776, 123, 456): [
        820154628799,
        878267494532,
        228556342197,
        953628453705,
        945809522456,
        1022608186294,
        673803509485,
        656325599160,
    ],
    (4611686018427387904, 0, 0): [
        3487364905736228848,
        853152986008014730,
        3089896182959706743,
        1646235576662227956,
        2129504462979421333,
        3587586724610022456,
        3832578824977639714,
        2332471686666460553,
    ],
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_values(case):
    size, *rest = case
    assert permuted(np.arange(min(size, 8)), size, *rest).tolist() == KNOWN[case]


def test_epochs_follow_each_other_each_in_its_own_order():
    assert Shuffled(7, 0).indices(np.arange(14)).tolist() == KNOWN[7, 0, 0] + KNOWN[7, 0, 1]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_every_epoch_has_every_sample_once(size, seed, epoch):
    assert sorted(permuted(np.arange(size), size, seed, epoch)) == list(range(size))


@given(st.integers(1, 2**62), st.integers(0, 99), st.data())
def test_large_sizes_are_permuted_too(size, seed, data):
    """Two different places have two different indices, below the size."""
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    found = permuted(np.array(places), size, seed, 0).tolist()
    assert len(set(found)) == len(places) and min(found) >= 0 and max(found) < size


@given(st.integers(1, 50), st.integers(0, 9), st.lists(st.integers(0, 2**40), min_size=1, max_size=30))
def test_a_sample_does_not_depend_on_what_is_asked_beside_it(size, seed, numbers):
    order = Shuffled(size, seed)
    together = order.indices(np.array(numbers))
    assert together.tolist() == [int(order.indices(np.array([number]))[0]) for number in numbers]
    assert Unshuffled(size).indices(np.array(numbers)).tolist() == [number % size for number in numbers]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_are_equally_likely(size):
    """By chi-square over at least 600 seeds: within 5 standard deviations."""
    orders = math.factorial(size)
    seeds = max(600, 5 * orders)
    seen = Counter(tuple(permuted(np.arange(size), size, seed, 0).tolist()) for seed in range(seeds))
    expected = seeds / orders
    statistic = sum((seen[order] - expected) ** 2 / expected for order in itertools.permutations(range(size)))
    assert abs(statistic - (orders - 1)) < 5 * math.sqrt(2 * (orders - 1))


def test_odd_orders_are_as_likely_as_even_ones():
    """9 samples lie on a 4 × 3 grid; on one of 3 × 3 all shifts would be even."""
    places = np.arange(9)
    odd = sum(
        sum(a > b for a, b in itertools.combinations(permuted(places, 9, seed, 0).tolist(), 2)) % 2
        for seed in range(2000)
    )
    assert 900 < odd < 1100


def test_neighbours_are_scattered():
    """Places and indices are not correlated, nor are two epochs, nor are the indices of neighbours."""
    size = 100_003
    first, second = (permuted(np.arange(size), size, 5, epoch) for epoch in (0, 1))
    for one, other in ((np.arange(size), first), (first, second), (first[:-1], first[1:])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size)


def test_too_many_samples_are_refused():
    with pytest.raises(ValueError, match=r"2\^62 are the most"):
        permuted(np.arange(3), 2**62 + 1, 0, 0)
