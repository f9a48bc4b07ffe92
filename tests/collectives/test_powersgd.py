"""Sums as low-rank factors: every step equals a plain simulation, nothing is lost, payloads equal the formula."""

import math
from itertools import pairwise

import pytest
import torch
from helpers.measure import count_payload
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.power_sgd import PowerSGD

import shardlib as sl
from shardlib.collectives.codecs.base import Item, Residuals, Rows
from shardlib.collectives.codecs.low_rank import LowRank

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def rows_of(ranks, position, shapes, mean=False, dtype=torch.float64):
    edges = [0]
    for shape in shapes:
        edges.append(edges[-1] + math.prod(shape))
    return Rows(ranks, position, edges[-1], tuple(pairwise(edges)), False, mean, dtype, tuple(shapes))


def exchange(mesh, codec, buffers, steps, mean=False, dtype=torch.float64):
    """The results, residuals and factors of each step on one rank, buffer by buffer.

    Args:
        buffers: for each the shapes of its leaves.
        steps: for each step and buffer its leaves.
    """
    codecs = [codec.bind(rows_of(mesh.shape["data"], mesh.rank, shapes, mean, dtype)) for shapes in buffers]
    kept = {
        f"{number}/{what.name}": value
        for number, bound in enumerate(codecs)
        for what, value in zip(bound.keeps, bound.start(torch.device("cpu")), strict=True)
    }
    recorded = []
    for step in steps:
        before, residuals = {name: value.clone() for name, value in kept.items()}, Residuals(kept)
        items = [
            Item(bound, torch.cat([leaf.reshape(-1) for leaf in leaves]), (f"{number}/sent", f"{number}/factors"))
            for number, (bound, leaves) in enumerate(zip(codecs, step, strict=True))
        ]
        results = codec.exchange(mesh, "data", items, residuals).wait()
        assert all(torch.equal(kept[name], before[name]) for name in kept), "what was kept stays until the step counts"
        kept = residuals.after
        recorded.append((results, kept))
    return recorded


def normal(shape, *seed, dtype=torch.float64):
    number = 0
    for part in seed:
        number = 1000 * number + part
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=dtype)


SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4)


def flat(leaves):
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def squares(q):
    """A function of factors that does not depend on the signs of a basis' columns."""
    return q @ q.T


@settings(max_examples=60)
@given(
    ranks=st.integers(1, 4),
    rank=st.integers(1, 5),
    mean=st.booleans(),
    buffers=st.lists(SHAPES, min_size=1, max_size=2),
    seed=st.integers(0, 10**6),
)
def test_each_step_equals_the_simulation_and_nothing_is_lost(ranks, rank, mean, buffers, seed):
    def grads(step, position):
        return [[normal(shape, seed, step, position, i) for i, shape in enumerate(shapes)] for shapes in buffers]

    def run(mesh):
        return exchange(mesh, LowRank(rank), buffers, [grads(step, mesh.rank) for step in range(4)], mean)

    got = sl.simulate(run, mesh={"data": ranks})
    for b, shapes in enumerate(buffers):
        oracles = [PowerSGD(ranks, shape, rank, mean=mean) for shape in shapes]
        sent = true = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.float64)
        for step in range(4):
            each = [grads(step, position)[b] for position in range(ranks)]
            wanted = [oracle(list(leaves)) for oracle, leaves in zip(oracles, zip(*each, strict=True), strict=True)]
            qs = [oracle.q for oracle in oracles if oracle.q is not None]
            for position in range(ranks):
                results, kept = got[position][step]
                residuals = flat([oracle.residuals[position] for oracle in oracles])
                torch.testing.assert_close(results[b], flat(wanted), **EXACT)
                torch.testing.assert_close(kept[f"{b}/sent"], residuals, **EXACT)
                factors = kept[f"{b}/factors"].split([q.numel() for q in qs]) if qs else ()
                for factor, q in zip(factors, qs, strict=True):
                    torch.testing.assert_close(squares(factor.view(-1, rank)), squares(q), **EXACT)
            sent = sent + results[b] * (ranks if mean else 1)
            true = true + sum(map(flat, each))
            left = sum(got[position][step][1][f"{b}/sent"] for position in range(ranks))
            torch.testing.assert_close(sent + left, true, **EXACT)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gradient_of_low_rank_is_exact(ranks):
    """A gradient of rank 3 or less that all ranks share, also after a step of zeros."""
    shapes = [(12, 15), (10, 4, 5)]
    lower = [normal((12, 3), 1) @ normal((3, 15), 2), (normal((10, 2), 3) @ normal((2, 20), 4)).view(10, 4, 5)]
    steps = [[[torch.zeros(shape, dtype=torch.float64) for shape in shapes]], [lower]]

    def run(mesh):
        return exchange(mesh, LowRank(3), [shapes], steps)

    for (zeros, _), (results, kept) in sl.simulate(run, mesh={"data": ranks}):
        assert not zeros[0].any()
        torch.testing.assert_close(results[0], ranks * flat(lower), **EXACT)
        torch.testing.assert_close(kept["0/sent"], torch.zeros_like(kept["0/sent"]), **EXACT)


def test_a_buffer_is_cut_as_the_formula_says():
    """2(n−1)/n of (Σ(n + m)r + the rest); two messages for all buffers of a dtype, one where nothing is a matrix."""

    def run(mesh, buffers, dtypes):
        sent = count_payload(mesh, scalars=0)
        items, kept, payload = [], {}, 0
        for number, (shapes, dtype) in enumerate(zip(buffers, dtypes, strict=True)):
            bound = LowRank(2).bind(rows_of(4, mesh.rank, shapes, dtype=dtype))
            names = (f"{number}/sent", f"{number}/factors")
            kept |= dict(zip(names, bound.start(torch.device("cpu")), strict=True))
            items.append(Item(bound, flat([normal(shape, 1, dtype=dtype) for shape in shapes]), names))
            payload += bound.payload
        LowRank(2).exchange(mesh, "data", items, Residuals(kept)).wait()
        return sent()["data"], payload, mesh.traffic.calls["data"]

    def recorded(buffers, dtypes):
        (found,) = set(sl.simulate(run, buffers, dtypes, mesh={"data": 4}))
        return found

    wide, narrow = torch.float64, torch.float32
    one = 2 * 3 * 8 * (2 * (8 + 12) + 2 * (9 + 20) + 7 + 15 + 2) // 4  # 34 + 2 of padding, 64 + 22 + 2
    assert recorded([[(8, 12), (7,), (9, 4, 5), (3, 5)]], [wide]) == (
        one + 2 * 3 * 8 * 2 // 4,
        one + 2 * 3 * 8 * 2 // 4,
        2,
    )
    matrix = 2 * 3 * (16 + 24) // 4  # elements
    assert recorded([[(8, 12)], [(8, 12)]], [wide, wide]) == (2 * 8 * matrix, 2 * 8 * matrix, 2)
    assert recorded([[(8, 12)], [(8, 12)]], [wide, narrow]) == (12 * matrix, 12 * matrix, 4)
    assert recorded([[(8,), (4, 4)]], [wide]) == (2 * 3 * 8 * 24 // 4, 2 * 3 * 8 * 24 // 4, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_values_reach_every_rank(bad):
    shapes = [(8, 12), (7,), (9, 10)]

    def run(mesh):
        leaves = [normal(shape, i) for i, shape in enumerate(shapes)]
        if mesh.rank:
            leaves[0][3, 4] = bad
        ((results, _),) = exchange(mesh, LowRank(2), [shapes], [[leaves]])
        return results[0].split([96, 7, 90])

    for matrix, vector, other in sl.simulate(run, mesh={"data": 2}):
        assert not matrix.isfinite().all()
        assert vector.isfinite().all() and other.isfinite().all()
