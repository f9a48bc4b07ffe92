"""Exchanges of tokens against a plain permutation of all ranks' rows: values, duals, gradients, and who waits for whom."""

from typing import NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.collectives.tokens import Direct, TwoHops
from shardlib.errors import LossError, RankMismatch, SpecError
from shardlib.mesh.transport import Splits, Work

WIDTH = 3


class Case(NamedTuple):
    exchange: object
    mesh: dict
    counts: list  # of each rank, of each expert
    left: list  # rows of each rank that stay
    slots: int | None

    def rows(self, rank, width=WIDTH):
        count = sum(self.counts[rank]) + self.left[rank]
        return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def weight(self, expert):
        return torch.randn(WIDTH, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + expert))


MESHES = [
    (Direct("e"), {"e": 1}),
    (Direct("e"), {"e": 2}),
    (Direct("e"), {"data": 2, "e": 2}),
    (Direct("e"), {"e": 3}),
    (TwoHops("n", "l"), {"n": 2, "l": 2}),
    (TwoHops("n", "l"), {"l": 3, "n": 2}),
    (TwoHops("n", "l"), {"n": 1, "l": 2}),
    (TwoHops("n", "l"), {"n": 3, "l": 1}),
]


@st.composite
def cases(draw):
    exchange, mesh = draw(st.sampled_from(MESHES))
    ranks, owners = 1, 1
    for axis, size in mesh.items():
        ranks, owners = ranks * size, owners * (size if axis in exchange.axes else 1)
    experts = owners * draw(st.integers(1, 3))
    few = st.lists(st.integers(0, 4), min_size=experts, max_size=experts)
    to_one = st.integers(0, experts - 1).map(lambda expert: [5 * (number == expert) for number in range(experts)])
    counts = draw(st.lists(st.one_of(few, to_one, st.just([0] * experts)), min_size=ranks, max_size=ranks))
    left = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    slots = draw(st.sampled_from([None, max(map(max, counts)), 6]))
    return Case(exchange, mesh, counts, left, slots)


def groups(case):
    """The groups of ranks that exchange with each other, each in the order of owners."""
    ranks = torch.arange(len(case.counts)).view(*case.mesh.values())
    axes = [*case.mesh]
    others = [axis for axis in axes if axis not in case.exchange.axes]
    order = [axes.index(axis) for axis in (*others, *case.exchange.axes)]
    owners = 1
    for axis in case.exchange.axes:
        owners *= case.mesh[axis]
    return ranks.permute(order).reshape(-1, owners).tolist()


def blocks(case, rank):
    """A rank's rows by expert, padded where the case has slots."""
    parts = case.rows(rank).split([*case.counts[rank], case.left[rank]])[:-1]
    if case.slots is None:
        return parts
    return [torch.cat([part, part.new_zeros(case.slots - len(part), WIDTH)]) for part in parts]


def arrived(case):
    """Rank -> the rows of each of its experts, by source rank."""
    found = {}
    for group in groups(case):
        experts = len(case.counts[0]) // len(group)
        for index, rank in enumerate(group):
            own = range(index * experts, (index + 1) * experts)
            found[rank] = [torch.cat([blocks(case, source)[expert] for source in group]) for expert in own]
    return found


def computed(rows, ends, first, case):
    """What the experts make of their rows; ``first`` is the first expert's number."""
    starts = [0, *ends.tolist()[:-1]]
    parts = [rows[a:b] @ case.weight(first + k) for k, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True))]
    return torch.cat(parts).sin()


def rank_loss(y, rank):
    return (y.exp() * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum() * (rank + 1)


def travel(mesh, case):
    """Rows as they arrive and come back, and results, first and second derivatives of a layer of experts."""
    rows, counts = case.rows(mesh.rank), torch.tensor(case.counts[mesh.rank])
    coming, way = case.exchange.send(mesh, rows, counts, slots=case.slots)
    here = coming.wait()
    again = case.exchange.back(mesh, here, way).wait()
    index = 0
    for axis in case.exchange.axes:
        index = index * mesh.shape[axis] + mesh.coords[axis]
    first = index * len(way.ends)
    x = rows.clone().requires_grad_()
    coming, way = case.exchange.send(mesh, x, counts, slots=case.slots)
    y = case.exchange.back(mesh, computed(coming.wait(), way.ends, first, case), way).wait()
    (grad,) = torch.autograd.grad(rank_loss(y, mesh.rank), x, create_graph=True)
    (second,) = torch.autograd.grad((grad.pow(3) * (1 + mesh.rank)).sum(), x)
    return here, way.ends, again, y.detach(), grad.detach(), second


def check(case, results):
    wanted = arrived(case)
    for rank, (here, ends, again, y, grad, second) in enumerate(results):
        assert torch.equal(here, torch.cat(wanted[rank]))
        assert ends.tolist() == torch.tensor([len(part) for part in wanted[rank]]).cumsum(0).tolist()
        sent = sum(case.counts[rank])
        x = case.rows(rank)
        assert torch.equal(again, torch.cat([x[:sent], torch.zeros_like(x[sent:])]))
        x.requires_grad_()
        parts = [part @ case.weight(e) for e, part in enumerate(x.split([*case.counts[rank], case.left[rank]])[:-1])]
        alone = torch.cat([torch.cat(parts).sin(), x.new_zeros(case.left[rank], 2)])
        (first,) = torch.autograd.grad(rank_loss(alone, rank), x, create_graph=True)
        (other,) = torch.autograd.grad((first.pow(3) * (1 + rank)).sum(), x, materialize_grads=True)
        for ours, theirs in ((y, alone), (grad, first), (second, other)):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@given(cases())
def test_rows_go_to_their_experts_and_back(case):
    check(case, sl.simulate(travel, case, mesh=case.mesh))


REAL = [
    Case(Direct("e"), {"e": 4}, [[3, 0, 1, 2], [0, 0, 0, 0], [0, 9, 0, 0], [1, 1, 1, 1]], [0, 2, 1, 0], None),
    Case(Direct("e"), {"e": 4}, [[0] * 8] * 4, [0] * 4, None),  # nobody has any
    Case(Direct("e"), {"data": 2, "e": 2}, [[0, 0, 0, 5]] * 4, [1, 0, 0, 0], None),
    Case(Direct("e"), {"e": 2}, [[2, 0], [0, 3]], [0, 1], 3),
    Case(TwoHops("n", "l"), {"n": 2, "l": 2}, [[0, 7, 0, 0], [0] * 4, [1, 2, 3, 4], [0, 0, 0, 1]], [0, 0, 3, 0], None),
    Case(TwoHops("n", "l"), {"n": 2, "l": 2}, [[0, 2, 1, 0, 0, 0, 1, 2]] * 4, [0, 1, 0, 1], 2),
]


def test_on_real_processes(pool):
    for case in REAL:
        check(case, pool.run(travel, case, mesh=case.mesh))


def inner_products(mesh, case):
    rows, counts = case.rows(mesh.rank), torch.tensor(case.counts[mesh.rank])
    coming, way = case.exchange.send(mesh, rows, counts, slots=case.slots)
    here = coming.wait()
    other = torch.randn(here.shape, dtype=here.dtype, generator=torch.Generator().manual_seed(50 + mesh.rank))
    return (here * other).sum(), (rows * case.exchange.back(mesh, other, way).wait()).sum()


@given(cases())
def test_one_is_the_transpose_of_the_other(case):
    there, back = zip(*sl.simulate(inner_products, case, mesh=case.mesh), strict=True)
    torch.testing.assert_close(sum(there), sum(back), rtol=1e-12, atol=1e-12)


def there_and_back(mesh, case, x):
    coming, way = case.exchange.send(mesh, x, torch.tensor(case.counts[mesh.rank]), slots=case.slots)
    here = coming.wait()
    return case.exchange.back(mesh, here.sin(), way).wait()


def by_func_grad(mesh, case):
    return torch.func.grad(lambda x: rank_loss(there_and_back(mesh, case, x), mesh.rank))(case.rows(mesh.rank))


def by_forward_mode(mesh, case):
    x = case.rows(mesh.rank)
    return forward_ad.unpack_dual(there_and_back(mesh, case, forward_ad.make_dual(x, x + 1))).tangent


def test_samples_travel_side_by_side():
    """A row is encoded by itself, be there other samples in its message or not."""

    def run(mesh):
        exchange, counts = Direct("e", codec="int8", back_codec="fp8"), torch.tensor([1, 2])
        xs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(mesh.rank))

        def there_and_back(x):
            coming, way = exchange.send(mesh, x, counts)
            return exchange.back(mesh, coming.wait().sin(), way).wait()

        gradient = torch.func.grad(lambda x: rank_loss(there_and_back(x), mesh.rank))
        return all(
            torch.equal(torch.vmap(fn)(xs), torch.stack([fn(x) for x in xs])) for fn in (there_and_back, gradient)
        )

    assert sl.simulate(run, mesh={"e": 2}) == [True, True]


def test_a_routing_of_each_sample_is_refused():
    def send(mesh, x):
        counts = torch.stack([(x > 0).sum(), (x <= 0).sum()])
        return Direct("data").send(mesh, x[:, None], counts)[0].wait().sin().sum()

    mesh, x = sl.make_mesh(), torch.tensor([1.0, -1.0, 2.0])
    assert torch.equal(torch.func.grad(lambda x: send(mesh, x))(x), x.cos())  # counts of the level that differentiates
    with pytest.raises(LossError, match=r"'data' inside of torch\.func\.vmap, where counts differ by sample"):
        torch.vmap(lambda x: send(mesh, x))(torch.stack([x, -x]))


@pytest.mark.parametrize("number", range(len(REAL)))
def test_torch_func(number):
    case = REAL[number]
    for rank, grad in enumerate(sl.simulate(by_func_grad, case, mesh=case.mesh)):
        x = case.rows(rank).requires_grad_()
        sent = sum(case.counts[rank])
        rank_loss(torch.cat([x[:sent].sin(), torch.zeros_like(x[sent:])]), rank).backward()
        torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12)
    with forward_ad.dual_level():  # of the process: simulated ranks share it
        tangents = sl.simulate(by_forward_mode, case, mesh=case.mesh)
    for rank, tangent in enumerate(tangents):
        x, sent = case.rows(rank), sum(case.counts[rank])
        wanted = torch.cat([x[:sent].cos() * (x[:sent] + 1), torch.zeros_like(x[sent:])])
        torch.testing.assert_close(tangent, wanted, rtol=1e-12, atol=1e-12)


def partly_needed(mesh, case, named):
    """A layer on a rank of which the rows need no gradient, though other ranks' do."""
    x = case.rows(mesh.rank).requires_grad_(mesh.rank != 1)
    leaf = case.weight(0).requires_grad_()
    anchor = leaf if named else None
    coming, way = case.exchange.send(mesh, x, torch.tensor(case.counts[mesh.rank]), anchor=anchor)
    loss = case.exchange.back(mesh, coming.wait() @ leaf, way).wait().square().sum()
    if named:
        wanted = [leaf, x] if x.requires_grad else [leaf]
        return torch.autograd.grad(loss, wanted)
    loss.backward()
    return leaf.grad, x.grad


def check_partly_needed(run, named):
    for case in REAL[0], REAL[4]:
        leaf_grads, total = [], torch.zeros(WIDTH, 2, dtype=torch.float64)
        for rank, grads in enumerate(run(partly_needed, case, named, mesh=case.mesh)):
            sent = case.rows(rank)[: sum(case.counts[rank])]
            leaf_grads.append(grads[0])
            total += 2 * sent.T @ sent @ case.weight(0)
            if rank != 1:
                mine = 2 * sent @ case.weight(0) @ case.weight(0).T
                torch.testing.assert_close(grads[1][: len(sent)], mine, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sum(leaf_grads), total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("named", [False, True])
def test_a_rank_whose_rows_need_no_gradient_takes_part_in_backward(named):
    check_partly_needed(sl.simulate, named)


def test_so_it_does_on_real_processes(pool):
    check_partly_needed(pool.run, True)


class Recording:
    """Stands before a group and notes when exchanges of rows start and end."""

    def __init__(self, axis, group, events):
        self._group, self.size, self.rank, self._axis, self._events = group, group.size, group.rank, axis, events

    def all_to_all(self, out, inp, splits=None):
        work = self._group.all_to_all(out, inp, splits)
        if inp.dtype is torch.int64:
            self._events.append(f"sizes {self._axis}")
            return work
        self._events.append(f"start {self._axis}")

        def wait():
            work.wait()
            self._events.append(f"end {self._axis}")

        return Work(wait)


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("shared")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("shared")
        return grad, None


def overlapped(mesh, case):
    events = []
    mesh = mesh.with_transport(lambda axis, group: Recording(axis, group, events))
    x = case.rows(mesh.rank).requires_grad_()
    coming, way = case.exchange.send(mesh, x, torch.tensor(case.counts[mesh.rank]), slots=case.slots)
    shared = _Noted.apply(x, events)
    y = case.exchange.back(mesh, coming.wait(), way).wait() + shared
    events.append("backward")
    y.sum().backward()
    return events


@pytest.mark.parametrize(("number", "axes"), [(0, "e"), (3, "e"), (4, "nl"), (5, "nl")])
def test_what_is_computed_before_the_wait_is_computed_while_rows_travel(number, axes):
    """In backward too. And what is called depends on no rank's routing."""
    slow, *rest = axes
    there = [
        f"start {slow}",
        "shared",
        f"end {slow}",
        *(f"{what} {axis}" for axis in rest for what in ("start", "end")),
    ]
    back = [*(f"{what} {axis}" for axis in rest for what in ("start", "end")), f"start {slow}", f"end {slow}"]
    away = [event for event in there if event != "shared"]
    home = [*back[:-1], "shared", back[-1]]
    sizes = [] if REAL[number].slots else [f"sizes {axis}" for axis in axes]
    for events in sl.simulate(overlapped, REAL[number], mesh=REAL[number].mesh):
        assert events == [*sizes, *there, *back, "backward", *away, *home]


def test_waiting_twice_gives_the_same_rows():
    def run(mesh):
        coming, _ = Direct("e").send(mesh, torch.ones(2, 1), torch.tensor([1, 1]))
        return coming.wait() is coming.wait()

    assert sl.simulate(run, mesh={"e": 2}) == [True, True]


def test_bf16_rows_travel_as_they_are(pool):
    def run(mesh):
        rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(mesh.rank)).to(torch.bfloat16)
        coming, way = Direct("e").send(mesh, rows, torch.tensor([4 * mesh.rank, 1]))
        here = coming.wait()
        again = Direct("e").back(mesh, here, way).wait()
        sent = 4 * mesh.rank + 1
        return here.dtype, torch.equal(again[:sent], rows[:sent]) and not again[sent:].any()

    for runner in sl.simulate, pool.run:
        assert runner(run, mesh={"e": 2}) == [(torch.bfloat16, True)] * 2


@pytest.mark.parametrize(
    ("rows", "counts", "slots", "error", "message"),
    [
        ((3, 2), [1, 1, 1], None, SpecError, r"direct over axis 'e': 3 experts do not divide over 2 ranks"),
        ((3,), [1, 1], None, SpecError, r"rows are \(3,\) and counts \(2,\) of torch.int64; pass \[R, W\]"),
        ((3, 2), [2, 2], None, SpecError, r"4 rows are counted and 3 given"),
        ((3, 2), [2, 1], 1, RuntimeError, r"an expert keeps more rows than its 1 slots"),
    ],
)
def test_what_does_not_fit_is_refused(rows, counts, slots, error, message):
    def run(mesh):
        Direct("e").send(mesh, torch.ones(rows), torch.tensor(counts), slots=slots)

    with pytest.raises(error, match=message):
        sl.simulate(run, mesh={"e": 2})


def test_results_of_another_number_are_refused():
    def run(mesh):
        coming, way = Direct("e").send(mesh, torch.ones(2, 1), torch.tensor([1, 1]))
        Direct("e").back(mesh, coming.wait()[1:], way)

    with pytest.raises(SpecError, match=r"results are \(1, 1\) for 2 rows; pass one for each"):
        sl.simulate(run, mesh={"e": 2})


SENT = [[0, 2, 1], [0, 0, 0], [4, 0, 1]]


def all_to_all(mesh, received):
    sent = SENT[mesh.rank]
    inp = torch.arange(float(sum(sent))) + 10 * mesh.rank
    out = torch.full((sum(received[mesh.rank]),), -1.0)
    mesh.group("e").all_to_all(out, inp, Splits(sent, received[mesh.rank])).wait()
    return out.tolist()


def test_transports_exchange_chunks_of_any_size(pool):
    received = [list(column) for column in zip(*SENT, strict=True)]
    for run in sl.simulate, pool.run:
        assert run(all_to_all, received, mesh={"e": 3}) == [[20, 21, 22, 23], [0, 1], [2, 24]]


def test_a_simulation_names_the_chunks_that_do_not_fit():
    received = [[0, 0, 4], [1, 0, 0], [1, 0, 1]]
    with pytest.raises(
        RankMismatch, match=r"axis 'e' do not fit: .*rank 0 sends rank 1 2 elements, and rank 1 receives 1"
    ):
        sl.simulate(all_to_all, received, mesh={"e": 3})
