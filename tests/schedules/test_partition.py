"""Cuts into stages, against trying every cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.errors import ScheduleError
from shardlib.schedules import by_cost, by_count, by_regex


def every_cut(n: int, k: int):
    for inner in combinations(range(1, n), k - 1):
        yield tuple(pairwise((0, *inner, n)))


def loads(costs, spans):
    return [sum(costs[start:stop]) for start, stop in spans]


@st.composite
def blocks_and_stages(draw, costs):
    weights = draw(st.lists(costs, min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


@given(blocks_and_stages(st.integers(0, 9)))
def test_the_costliest_stage_is_as_cheap_as_any_cut_can_make_it(drawn):
    costs, k = drawn

    def merit(spans):
        found = loads(costs, spans)
        return max(found), sum(load * load for load in found)

    spans = by_cost(costs, k)
    assert spans in set(every_cut(len(costs), k))
    best = min(map(merit, every_cut(len(costs), k)))
    assert merit(spans) == best
    # Of the equally good ones, that whose later stages are larger: its cuts, from the last, come earliest.
    equals = [cut for cut in every_cut(len(costs), k) if merit(cut) == best]
    assert spans == min(equals, key=lambda cut: [start for start, _ in reversed(cut)])


@given(blocks_and_stages(st.floats(0, 1e6, allow_subnormal=False)))
def test_fractions_are_cut_exactly(drawn):
    costs, k = drawn
    parts = [cost.as_integer_ratio() for cost in costs]
    unit = max(denominator for _, denominator in parts)  # powers of two: the largest is a common one
    whole = [numerator * (unit // denominator) for numerator, denominator in parts]
    assert max(loads(whole, by_cost(costs, k))) == min(max(loads(whole, cut)) for cut in every_cut(len(costs), k))


def test_ties_go_to_balance():
    # The block of 9 is a stage in any good cut; the rest need not be cut well for the largest, but is.
    assert by_cost([9, 1, 1, 1, 1], 3) == ((0, 1), (1, 3), (3, 5))
    # 6, 2 and 3 are more alike than 1, 5 and 5, but the costliest stage goes first.
    assert by_cost([1, 5, 2, 3], 3) == ((0, 1), (1, 2), (2, 4))
    # As floats 0.1 + 0.2 > 0.3: no tie.
    assert by_cost([0.1, 0.2, 0.3], 2) == ((0, 2), (2, 3))
    assert by_cost([0, 0, 5], 3) == ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in range(1, 13) for k in range(1, n + 1)])
def test_by_count(n, k):
    sizes = [stop - start for start, stop in by_count(n, k)]
    assert sum(sizes) == n and len(sizes) == k
    assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1
    assert by_count(n, k) == by_cost([1] * n, k)


NAMES = ["embed", "drop", "attn.0", "mlp.0", "attn.1", "mlp.1", "attn.2", "mlp.2", "norm", "head"]


def test_by_regex():
    assert by_regex(NAMES, "attn", 3) == ((0, 4), (4, 6), (6, 10))
    assert by_regex(NAMES, r"^attn\.", 2) == ((0, 4), (4, 10))
    assert by_regex(NAMES, r"\d$", 3) == ((0, 4), (4, 6), (6, 10))
    assert by_regex(NAMES, "head", 1) == ((0, 10),)
    assert by_regex(NAMES, ".", 3) == by_count(10, 3)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda: by_count(3, 4), "3 blocks cannot make 4 stages, as no stage may be empty; ask for 3 or fewer"),
        (lambda: by_cost([1, 2], 3), "2 blocks cannot make 3 stages"),
        (lambda: by_count(3, 0), "3 blocks cannot be cut into 0 stages; ask for at least one"),
        (
            lambda: by_cost([1, -2, float("nan"), float("inf")], 2),
            "block 1 costs -2\n  - block 2 costs nan\n  - block 3 costs inf\nGive costs",
        ),
        (
            lambda: by_regex(NAMES, "conv", 2),
            "'conv' matches 0 blocks, so 2 of the 2 stages would be empty; .*\n  - embed\n  - drop\n",
        ),
        (lambda: by_regex(NAMES, "attn", 4), "'attn' matches 3 blocks, so 1 of the 4 stages would be empty"),
        (lambda: by_regex(NAMES, "(", 2), r"'\(' is not a regular expression: .*; mend it, or cut by count"),
        (lambda: by_regex(["a"], "a", 2), "1 blocks cannot make 2 stages"),
    ],
)
def test_what_cannot_be_cut_is_refused(cut, message):
    with pytest.raises(ScheduleError, match=message):
        cut()


def test_a_large_model_is_cut_in_no_time():
    costs = [1 + (i * 7919 % 101) / 7 for i in range(400)]
    assert len(by_cost(costs, 32)) == 32
