"""The selection of a product's cases that every commit runs."""

from itertools import combinations, product

from helpers.pairwise import covering
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def product_of(sizes):
    return [dict(zip("abcd", values)) for values in product(*map(range, sizes))]


def pairs_in(cases):
    return {pair for case in cases for pair in combinations(case.items(), min(2, len(case)))}


@given(SIZES)
def test_every_pair_of_values_is_kept(sizes):
    cases = product_of(sizes)
    kept = covering(cases)
    assert pairs_in(cases[number] for number in kept) == pairs_in(cases)
    if len(sizes) < 3:
        assert len(kept) == len(cases)


def test_few_cases_are_kept_and_always_the_same():
    cases = product_of([4, 2, 2])
    assert len(covering(cases)) == 8
    assert covering(cases) == covering(product_of([4, 2, 2]))
    assert covering([]) == set()
