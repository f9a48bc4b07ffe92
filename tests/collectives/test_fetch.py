"""Rows that ranks fetch from one another: each slot gets its owner's row, and the owner the slot's gradient."""

import math

import torch
from helpers.measure import count_payload
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.collectives.tokens.fetch import TokenFetch

WIDTH = 6


@st.composite
def fetches(draw):
    mesh = draw(st.sampled_from([{"expert": 2}, {"expert": 3}, {"node": 2, "local": 2}, {"node": 3, "local": 2}]))
    ranks = math.prod(mesh.values())
    slots = ranks * draw(st.integers(1, 3))
    return mesh, tuple(draw(st.lists(st.integers(0, ranks - 1), min_size=slots, max_size=slots)))


@given(fetches())
def test_a_slot_gets_its_row_and_sends_its_gradient(case):
    sizes, owners = case
    each = len(owners) // math.prod(sizes.values())

    def run(mesh):
        fetch = TokenFetch(tuple(sizes), owners)
        mine = [slot for slot, owner in enumerate(owners) if owner == mesh.rank]
        rows = (torch.tensor(mine, dtype=torch.float64)[:, None] * torch.ones(WIDTH)).requires_grad_()
        sent = count_payload(mesh, scalars=0)
        found = fetch.start(mesh, rows).wait()
        there = sent()
        weights = 10.0 + torch.arange(mesh.rank * each, (mesh.rank + 1) * each, dtype=torch.float64)[:, None]
        (found * weights).sum().backward()
        assert (there, sent()) == fetch.payload(mesh.shape, mesh.coords, WIDTH * 8)
        assert found.tolist() == [[slot] * WIDTH for slot in range(mesh.rank * each, (mesh.rank + 1) * each)]
        assert rows.grad.tolist() == [[10.0 + slot] * WIDTH for slot in mine]

    sl.simulate(run, mesh=sizes)
