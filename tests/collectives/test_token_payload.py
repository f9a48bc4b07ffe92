"""What exchanges of tokens send: counted outside the library, and as pure functions say; and what encoded rows lose."""

import dataclasses

import pytest
import torch
from helpers.measure import count_payload
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.collectives.codecs.float8 import Float8
from shardlib.collectives.codecs.integers import Integers
from shardlib.collectives.tokens import Direct, TwoHops
from shardlib.common.environment import environment
from shardlib.errors import SpecError
from shardlib.kernels.quantize import Blockwise

PACKINGS = {
    "int8": Integers(Blockwise(8), feedback=False),
    "fp8": Float8(feedback=False),
    "int4": Integers(Blockwise(4, 16), feedback=False),
}
MESHES = [(Direct("e"), {"e": 3}), (TwoHops("n", "l"), {"n": 2, "l": 2}), (TwoHops("n", "l"), {"n": 3, "l": 2})]
WIDTH = 20


def rows_of(rank, counts, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(sum(counts), WIDTH, generator=generator) * 10 ** torch.randn(1, generator=generator)).to(dtype)


@st.composite
def cases(draw):
    exchange, mesh = draw(st.sampled_from([*MESHES[:2], (TwoHops("n", "l"), {"l": 1, "n": 3})]))
    codecs = st.sampled_from([None, "int8", "fp8", PACKINGS["int4"]])
    exchange = dataclasses.replace(exchange, codec=draw(codecs), back_codec=draw(codecs))
    ranks = torch.Size(mesh.values()).numel()
    experts = ranks * draw(st.integers(1, 2))
    some = st.lists(st.integers(0, 3), min_size=experts, max_size=experts)
    lopsided = st.just([7] + [0] * (experts - 1))
    counts = draw(st.lists(st.one_of(some, lopsided), min_size=ranks, max_size=ranks))
    return (
        exchange,
        mesh,
        counts,
        draw(st.sampled_from([None, 7])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


def sent_by(mesh, exchange, counts, slots, dtype):
    """Bytes of a forward and of a backward on each axis, as counted before the groups and by the library."""
    sent = count_payload(mesh)
    x = rows_of(mesh.rank, counts[mesh.rank], dtype).requires_grad_()
    coming, way = exchange.send(mesh, x, torch.tensor(counts[mesh.rank]), slots=slots)
    y = exchange.back(mesh, coming.wait(), way).wait()
    forward, traffic = sent(), dict(mesh.traffic.payload)
    y.float().square().sum().backward()
    backward = sent()
    for axis, size in mesh.shape.items():
        if size > 1:
            assert traffic[axis] == forward[axis]
            assert mesh.traffic.payload[axis] == mesh.traffic.activations[axis] == forward[axis] + backward[axis]
    return mesh.coords, forward, backward


@given(cases())
def test_payload_is_what_leaves_a_rank(case):
    exchange, mesh, counts, slots, dtype = case
    order = torch.arange(len(counts)).view(*mesh.values())
    order = order.permute([[*mesh].index(axis) for axis in exchange.axes]).flatten()
    table = torch.tensor(counts)[order]
    bound = exchange.bound(mesh, max(map(sum, counts)), table.shape[1], WIDTH, dtype, slots=slots)
    for coords, forward, backward in sl.simulate(sent_by, exchange, counts, slots, dtype, mesh=mesh):
        payload = exchange.payload(mesh, coords, table, WIDTH, dtype, slots=slots)
        for axis, size in mesh.items():
            if size == 1:
                assert payload.forward[axis] == 0
                continue
            assert forward[axis] == payload.forward[axis]
            assert backward[axis] == payload.backward[axis]
            if slots is None:
                assert payload.there[axis] <= bound.there[axis] and payload.back[axis] <= bound.back[axis]
                assert payload.sizes == bound.sizes


def test_payload_on_real_processes(pool):
    exchange, counts = TwoHops("n", "l", codec="int8"), [[1, 0, 5, 2], [0, 0, 0, 9], [3, 3, 0, 0], [0] * 4]
    mesh = {"n": 2, "l": 2}
    for coords, forward, backward in pool.run(sent_by, exchange, counts, None, torch.float32, mesh=mesh):
        payload = exchange.payload(mesh, coords, torch.tensor(counts), WIDTH, torch.float32)
        assert (forward, backward) == (payload.forward, payload.backward)


@pytest.mark.parametrize(("exchange", "mesh"), MESHES)
def test_the_bound_is_reached(exchange, mesh):
    """On the way there where a rank's rows, or its node's, are all for others; back where an expert has all rows."""
    ranks, rows = torch.Size(mesh.values()).numel(), 5
    names = list(mesh)
    most = {"there": dict.fromkeys(names, 0), "back": dict.fromkeys(names, 0)}
    for expert in range(ranks):
        counts = torch.zeros(ranks, ranks, dtype=torch.int64)
        counts[:, expert] = rows
        for rank in range(ranks):
            coords = dict(zip(names, [int(i) for i in torch.unravel_index(torch.tensor(rank), tuple(mesh.values()))]))
            payload = exchange.payload(mesh, coords, counts, 1, torch.float32)
            for way, table in most.items():
                for axis in names:
                    table[axis] = max(table[axis], getattr(payload, way)[axis])
    bound = exchange.bound(mesh, rows, ranks, 1, torch.float32)
    assert (most["there"], most["back"]) == (bound.there, bound.back)


def test_two_hops_send_fewer_messages_and_as_many_bytes_between_nodes():
    counts = torch.randint(0, 9, (6, 12), generator=torch.Generator().manual_seed(0))
    for node in range(3):
        for local in range(2):
            two = TwoHops("n", "l").payload({"n": 3, "l": 2}, {"n": node, "l": local}, counts, 1, torch.uint8)
            own = counts[2 * node + local].view(3, 4).sum(1)
            assert two.there["n"] == own.sum() - own[node]  # exactly its own rows for other nodes


def encoded(x, packing):
    out = torch.empty_like(x)
    for row, into in zip(x, out, strict=True):  # each row by itself
        packing.unpack(packing.pack(row), into)
    return out


def coded(mesh, exchange, counts, slots, dtype):
    x = rows_of(mesh.rank, counts[mesh.rank], dtype).requires_grad_()
    weight = torch.linspace(-2, 2, WIDTH).to(dtype)
    coming, way = exchange.send(mesh, x, torch.tensor(counts[mesh.rank]), slots=slots)
    here = coming.wait()
    y = exchange.back(mesh, here * weight, way).wait()
    seed = rows_of(90 + mesh.rank, counts[mesh.rank], dtype)
    y.backward(seed)
    return x.detach(), weight, y.detach(), seed, x.grad


@given(cases())
def test_a_row_is_encoded_once_and_by_itself(case):
    """So a rank that computes alone, on rows that it has encoded and decoded, has the same bits."""
    exchange, mesh, counts, slots, dtype = case
    codecs = exchange.codec, exchange.back_codec
    packings = [PACKINGS[codec] if isinstance(codec, str) else codec for codec in codecs]
    there, back = (lambda x, p=p: x if p is None else encoded(x, p) for p in packings)
    for x, weight, y, seed, grad in sl.simulate(coded, exchange, counts, slots, dtype, mesh=mesh):
        assert torch.equal(y, back(there(x) * weight))
        assert torch.equal(grad, back(there(seed) * weight))


def test_encoded_rows_on_real_processes(pool):
    exchange, counts = Direct("e", codec="int8", back_codec="fp8"), [[1, 0, 5, 2], [0, 0, 0, 9], [3, 3, 0, 0], [0] * 4]
    for x, weight, y, seed, grad in pool.run(coded, exchange, counts, None, torch.float32, mesh={"e": 4}):
        assert torch.equal(y, encoded(encoded(x, PACKINGS["int8"]) * weight, PACKINGS["fp8"]))
        assert torch.equal(grad, encoded(encoded(seed, PACKINGS["int8"]) * weight, PACKINGS["fp8"]))


def test_codecs_say_their_names_and_are_refused_by_them():
    assert str(TwoHops("n", "l", codec="int8")) == "two hops over axis 'n' and axis 'l', to experts in int8"
    assert str(Direct("e", back_codec=PACKINGS["int4"])).startswith("direct over axis 'e', back in 4 bits")
    with pytest.raises(SpecError, match=r"direct\(codec='int7'\): use a packing, or 'int8', 'int4', 'fp8'"):
        Direct("e", codec="int7")

    def run(mesh):
        Direct("e", back_codec="fp8").send(mesh, torch.ones(2, 1, dtype=torch.float64), torch.tensor([1, 1]))

    with pytest.raises(SpecError, match=r"rows are float64, and fp8, .* holds fp32 at most; cast them"):
        sl.simulate(run, mesh={"e": 2})


ROWS, EXPERTS = 10, 4


@pytest.mark.parametrize("slots", [None, 6])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_plan_knows_the_payload_before_any_rank_runs(slots, codec):
    """Exactly where sizes are known, else of routing that spreads rows evenly."""
    exchange = TwoHops("n", "l", codec=codec)

    def loss_fn(params, batch):
        mesh, rows = environment().mesh, batch @ params["w"]
        counts = (rows[0, :EXPERTS] > 0).long()
        coming, way = exchange.send(mesh, rows, counts, slots=slots)
        return exchange.back(mesh, coming.wait() * 2, way).wait().mean()

    params = {"w": torch.empty(3, WIDTH, device="meta")}
    parallel = sl.chain(sl.zero(0, axis="n"), sl.zero(0, axis="l"))
    meshes = {"n": 2, "l": 2}
    plan = sl.make_plan(params, sl.abstract_mesh(**meshes), parallel, loss_fn=loss_fn, batch=torch.empty(ROWS, 3))
    even = -(-ROWS // EXPERTS) if slots is None else slots
    table = torch.full((EXPERTS, EXPERTS), even)
    payload = exchange.payload(meshes, {"n": 0, "l": 0}, table, WIDTH, torch.float32, slots=slots)
    sums = 2 * 4 * 3 * WIDTH // 2  # of the gradient of w
    assert plan.payload() == {axis: payload.forward[axis] + payload.backward[axis] + sums for axis in meshes}
