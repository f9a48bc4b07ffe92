"""Sums in few bits: every step equals a plain simulation, nothing is lost, and payloads equal the formulas."""

import math
from itertools import pairwise

import pytest
import torch
from helpers.measure import count_payload
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.few_bits import FewBits

import shardlib as sl
from shardlib.collectives.codecs.base import Item, Residuals, Rows
from shardlib.collectives.codecs.float8 import Float8
from shardlib.collectives.codecs.integers import Integers, OneBit
from shardlib.collectives.codecs.two_phase import CompressedSum
from shardlib.kernels.quantize import Blockwise

CODECS = {
    "leaf": (OneBit("leaf"), "leaf"),
    "blocks of 8": (OneBit(8), 8),
    "blocks of 24": (OneBit(24), 24),
    "int8": (Integers(Blockwise(8, 16)), (16, 127)),
    "int4": (Integers(Blockwise(4, 16)), (16, 7)),
    "fp8": (Float8(16), (16, "fp8")),
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3.0, 1e-20, -2.5]


@st.composite
def layouts(draw, scattered):
    """Ranks, elements and leaves of a buffer: some leaves empty, some padded, of odd sizes; at times no elements."""
    ranks = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.tuples(st.integers(0, 21), st.integers(0, 3)), min_size=1, max_size=4))
    filled, position = [], 0
    for _ in range(ranks if scattered else 1):
        for size, padding in sizes:
            filled.append((position, position + size))
            position += size + padding
    return ranks, position, tuple(filled)


def buffers(ranks, elements, filled, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(elements, dtype=torch.bool)
    for start, stop in filled:
        mask[start:stop] = True
    found = []
    for _ in range(ranks):
        x = torch.randn(elements, generator=generator, dtype=dtype)
        special = torch.randint(0, 2 * len(SPECIAL), (elements,), generator=generator)
        table = torch.tensor(SPECIAL * 2, dtype=dtype)
        x = torch.where(special < len(SPECIAL), table[special], x)
        found.append(torch.where(mask, x, 0))
    return found


def exchange(mesh, axis, codec, rows, steps, scatter):
    """Results and residuals of each step on one rank."""
    bound = codec.bind(rows)
    residuals = {
        "sent": torch.zeros(rows.ways * bound.row, dtype=rows.dtype),
        "row": torch.zeros(bound.row, dtype=rows.dtype),
    }
    recorded = []
    for x in steps:
        before, after = {name: error.clone() for name, error in residuals.items()}, Residuals(residuals)
        item = Item(bound, bound.pad(x.clone()).clone(), ("sent",) if scatter else ("sent", "row"))
        (result,) = CompressedSum(mesh, axis, [item], after).wait()
        assert all(torch.equal(residuals[name], before[name]) for name in residuals), (
            "an exchange changes no old residual"
        )
        residuals = after.after
        recorded.append((result, residuals["sent"], residuals["row"]))
    return recorded


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=15)
@given(data=st.data())
def test_each_step_equals_the_simulation(name, scattered, mean, data):
    codec, form = CODECS[name]
    ranks, elements, filled = data.draw(layouts(scattered))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64])) if isinstance(codec, OneBit) else torch.float32
    seed = data.draw(st.integers(0, 10**6))
    steps = [buffers(ranks, elements, filled, seed + 100 * step, dtype) for step in range(3)]
    oracle = FewBits(ranks, elements, filled, form, scattered=scattered, mean=mean, dtype=dtype)

    def run(mesh):
        rows = Rows(ranks, mesh.rank, elements, filled, scattered, mean, dtype)
        return exchange(mesh, "data", codec, rows, [step[mesh.rank] for step in steps], scattered)

    got = sl.simulate(run, mesh={"data": ranks})
    for step, xs in enumerate(steps):
        wanted = oracle(xs)
        for rank in range(ranks):
            result, sent, row = got[rank][step]
            assert torch.equal(result, wanted[rank])
            assert torch.equal(sent, oracle.sent[rank])
            assert scattered or torch.equal(row, oracle.rows[rank])


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=10)
@given(layout=layouts(False), steps=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_nothing_is_lost(name, layout, steps, seed):
    """Σ sent + residuals = Σ true."""
    codec, _ = CODECS[name]
    ranks, elements, filled = layout
    xs = [buffers(ranks, elements, filled, seed + 100 * step, torch.float32) for step in range(steps)]

    def run(mesh):
        rows = Rows(ranks, mesh.rank, elements, filled, False, False, torch.float32)
        return exchange(mesh, "data", codec, rows, [step[mesh.rank] for step in xs], False)

    got = sl.simulate(run, mesh={"data": ranks})
    results = sum(result.double() for result, _, _ in got[0])
    left = sum(recorded[-1][1][:elements].double() for recorded in got)
    left += torch.cat([recorded[-1][2] for recorded in got])[:elements]
    true = sum(x.double() for step in xs for x in step)
    torch.testing.assert_close(results + left, true, rtol=0, atol=1e-5 * ranks * steps)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize(("elements", "leaves"), [(960, 1), (960, 7), (1024, 3)])
def test_payload_equals_the_formula(ranks, elements, leaves):
    """2(n−1)/n·d/8 + 8(n−1)k bytes a rank, d padded to a multiple of 8n."""
    edges = [elements * position // leaves for position in range(leaves + 1)]
    filled = tuple(pairwise(edges))
    padded = math.ceil(elements / (8 * ranks)) * 8 * ranks

    def run(mesh):
        sent = count_payload(mesh)
        rows = Rows(ranks, mesh.rank, elements, filled, False, True, torch.float32)
        x = torch.randn(elements, generator=torch.Generator().manual_seed(mesh.rank))
        exchange(mesh, "data", OneBit(), rows, [x], False)
        return sent()["data"], mesh.traffic.payload["data"]

    formula = 2 * (ranks - 1) * padded // ranks // 8 + 8 * (ranks - 1) * leaves
    assert sl.simulate(run, mesh={"data": ranks}) == [(formula, formula)] * ranks


def test_several_buffers_are_one_message():
    def run(mesh):
        rows = [Rows(2, mesh.rank, size, ((0, size),), False, True, torch.float32) for size in (5, 64, 17)]
        codecs = [OneBit().bind(row) for row in rows]
        residuals = Residuals(
            {f"{i}{k}": torch.zeros(n) for i, w in enumerate(codecs) for k, n in ((0, 2 * w.row), (1, w.row))}
        )
        items = [
            Item(bound, bound.pad(torch.arange(1.0, row.elements + 1)).clone(), (f"{i}0", f"{i}1"))
            for i, (bound, row) in enumerate(zip(codecs, rows, strict=True))
        ]
        results = CompressedSum(mesh, "data", items, residuals).wait()
        return mesh.traffic.calls["data"], [len(result) for result in results]

    assert sl.simulate(run, mesh={"data": 2}) == [(2, [5, 64, 17])] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", CODECS)
def test_nonfinite_values_reach_every_rank(name, bad):
    codec, _ = CODECS[name]

    def run(mesh):
        rows = Rows(2, mesh.rank, 40, ((0, 20), (20, 40)), False, False, torch.float32)
        x = torch.ones(40)
        x[25] = bad if mesh.rank else 1.0
        ((result, _, _),) = exchange(mesh, "data", codec, rows, [x], False)
        return result

    for result in sl.simulate(run, mesh={"data": 2}):
        assert not result[20:40].isfinite().all()
        if name == "leaf":
            assert result[:20].isfinite().all()
            assert not result[20:].isfinite().any()
