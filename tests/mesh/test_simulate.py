"""Simulated ranks: deterministic, and whatever would hang is an error that names ranks and calls."""

import contextlib
import threading

import pytest
import torch

import shardlib as sl
from shardlib.common import thresholds
from shardlib.errors import MeshError, RankMismatch
from shardlib.mesh.transport import Splits


def test_values_come_in_rank_order_with_coordinates():
    got = sl.simulate(lambda mesh, x: (mesh.rank, mesh.coords, x), "shared", mesh={"a": 2, "b": 3})
    assert [rank for rank, _, _ in got] == list(range(6))
    assert got[4] == (4, {"a": 1, "b": 1}, "shared")


def test_one_rank_runs_at_a_time_and_turns_change_where_a_collective_waits():
    order = []

    def run(mesh):
        for round in range(2):
            order.append((round, mesh.rank))
            sl.collectives.all_gather(torch.ones(1), "data")

    sl.simulate(run, mesh={"data": 3})
    first = list(order)
    order.clear()
    sl.simulate(run, mesh={"data": 3})
    assert order == first
    assert sorted(order[:3]) == [(0, 0), (0, 1), (0, 2)]


def test_every_rank_draws_as_a_process_of_its_own():
    def run(mesh):
        drawn = [torch.rand(2)]
        if mesh.rank == 1:
            torch.rand(5)
        sl.collectives.all_gather(torch.ones(1), "data")
        return [*drawn, torch.rand(2)]

    torch.manual_seed(3)
    got = sl.simulate(run, mesh={"data": 3})
    after = torch.rand(2)
    torch.manual_seed(3)
    for alike in (*got[0], after):  # what follows goes on from rank 0
        assert torch.equal(torch.rand(2), alike)
    assert all(torch.equal(x, y) for x, y in zip(got[2], got[0]))
    assert torch.equal(got[1][0], got[0][0]) and not torch.equal(got[1][1], got[0][1])


def test_different_collectives_are_named():
    def run(mesh):
        sl.collectives.all_reduce(torch.ones(4), "data", dst="varying")
        if mesh.rank == 0:
            sl.collectives.all_gather(torch.ones(4), "data")
        else:
            sl.collectives.all_reduce(torch.ones(5), "data", dst="varying")

    with pytest.raises(RankMismatch, match=r"different collectives on axis 'data' \(call 2\)") as caught:
        sl.simulate(run, mesh={"data": 2})
    assert "rank 0 calls all_gather(4 × float32)" in str(caught.value)
    assert "rank 1 calls all_reduce(5 × float32)" in str(caught.value)


def test_different_dtypes_roots_and_pairs_are_named():
    for call in (
        lambda rank: sl.collectives.all_gather(torch.ones(4, dtype=(torch.float32, torch.float64)[rank]), "data"),
        lambda rank: sl.collectives.broadcast(torch.ones(4), "data", source=rank),
        lambda rank: sl.collectives.permute(torch.ones(4), "data", [(0, rank)]),
    ):
        with pytest.raises(RankMismatch, match=r"rank 0 calls .*; rank 1 calls .*Every rank along an axis"):
            sl.simulate(lambda mesh, call=call: call(mesh.rank), mesh={"data": 2})


@pytest.mark.parametrize(
    "call",
    [
        lambda group, held: group.send(held, 1 - group.rank, 0),
        lambda group, held: group.recv(held, 1 - group.rank, 0),
        lambda group, held: group.all_reduce(held),
        lambda group, held: group.all_gather(torch.empty(4), held),
        lambda group, held: group.all_to_all(torch.empty(2), held, Splits([1, 1], [1, 1])),
    ],
)
def test_buffers_that_processes_would_refuse_are_refused(call):
    column = torch.zeros(2, 3)[:, 0]
    with pytest.raises(ValueError, match=r"\(2,\) with strides \(3,\) is not contiguous.*tensor.contiguous\(\)"):
        sl.simulate(lambda mesh: call(mesh.group("data"), column).wait(), mesh={"data": 2})


def test_a_rank_that_makes_fewer_calls_is_named():
    def run(mesh):
        if mesh.rank != 1:
            sl.collectives.all_gather(torch.ones(2), "data")

    message = (
        r"wait for each other for ever: rank 0 waits in all_gather\(2 × float32\) on axis 'data' \(call 1, .*\); "
        r"rank 2 waits in .*; rank 1 has finished"
    )
    with pytest.raises(RankMismatch, match=message):
        sl.simulate(run, mesh={"data": 3})


def test_axes_in_different_order_are_a_deadlock():
    def run(mesh):
        for axis in ("a", "b") if mesh.rank in (0, 3) else ("b", "a"):
            sl.collectives.all_reduce(torch.ones(2), axis, dst="varying")

    with pytest.raises(RankMismatch, match=r"rank 0 waits in .* on axis 'a' .*; rank 1 waits in .* on axis 'b'"):
        sl.simulate(run, mesh={"a": 2, "b": 2})


def test_an_exception_on_one_rank_stops_all_and_names_it():
    stopped = []

    def run(mesh):
        try:
            if mesh.rank == 2:
                raise KeyError("mine")
            sl.collectives.all_gather(torch.ones(1), "data")
        finally:
            stopped.append(mesh.rank)

    before = threading.active_count()
    with pytest.raises(KeyError, match="mine") as caught:
        sl.simulate(run, mesh={"data": 4})
    assert caught.value.__notes__ == ["raised on simulated rank 2 of 4"]
    assert sorted(stopped) == [0, 1, 2, 3] or 3 not in stopped  # a rank that never started need not stop
    assert threading.active_count() == before


def test_a_simulation_inside_a_simulation():
    def run(mesh):
        inner = sl.simulate(
            lambda m: sl.collectives.all_reduce(torch.ones(1), "x", dst="varying").item(), mesh={"x": 3}
        )
        return sum(inner) + sl.collectives.all_reduce(torch.ones(1), "data", dst="varying").item()

    assert sl.simulate(run, mesh={"data": 2}) == [11.0, 11.0]


def test_backward_stays_on_its_rank():
    """A collective in backward blocks that rank alone, not a thread of autograd's that ranks share."""

    def run(mesh):
        x = torch.full((2,), float(mesh.rank), requires_grad=True)
        (sl.collectives.all_reduce(x, "data", dst="varying") * (mesh.rank + 1)).sum().backward()
        return x.grad.tolist()

    assert sl.simulate(run, mesh={"data": 3}) == [[6.0, 6.0]] * 3


def test_launch_runs_the_same_function_in_processes():
    def run(mesh, factor):
        y = sl.collectives.all_gather(torch.full((1,), factor * mesh.rank), "b")
        return sl.collectives.all_reduce(y, "a", dst="varying").tolist(), mesh.coords

    for how in (sl.simulate, lambda *args, mesh: sl.launch(*args, mesh=mesh, timeout=90)):
        assert how(run, 10.0, mesh={"a": 1, "b": 2}) == [
            ([0.0, 10.0], {"a": 0, "b": 0}),
            ([0.0, 10.0], {"a": 0, "b": 1}),
        ]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_whose_branches_use_other_parameters(stage, together):
    """After the first step a rank may leave a leaf, or a whole unit, unused: it then sends zeros in its turn."""
    generator = torch.Generator().manual_seed(0)
    names = ("a", "b", "c")
    start = {
        name: {"w": torch.randn(4, 4, generator=generator), "v": torch.randn(6, generator=generator)} for name in names
    }
    used = [[("a", "wv"), ("b", "wv"), ("c", "wv")], [("a", "w"), ("c", "v")]]  # in the first step, and later on rank 1

    def loss_fn(params, choice):
        return sum(params[name][leaf].square().sum() for name, leaves in used[int(choice)] for leaf in leaves)

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(start, mesh, stage=stage), sl.optim.sgd(0.1))
        for number in range(3):
            state, _ = step(state, torch.tensor([number > 0 and mesh.rank == 1]))
        return sl.unshard(state.params)

    with contextlib.nullcontext() if together else thresholds.small(1):
        finals = sl.simulate(run, mesh={"data": 2})
    for final in finals:
        for name in names:
            for leaf in "wv":
                # Each step multiplies a leaf by 1 - 0.2 × (the share of ranks that use it).
                share = 1.0 if any(name == n and leaf in leaves for n, leaves in used[1]) else 0.5
                torch.testing.assert_close(final[name][leaf], start[name][leaf] * 0.8 * (1 - 0.2 * share) ** 2)


@pytest.mark.parametrize("mesh", [sl.abstract_mesh(data=4, model=2), sl.make_mesh(data=1)], ids=repr)
def test_where_no_other_rank_exists_there_is_nothing_to_transport(mesh):
    asked = []
    other = mesh.with_transport(lambda axis, group: asked.append(axis))
    assert not asked and other.alone
    for what in ("shape", "coords", "device", "abstract"):
        assert getattr(other, what) == getattr(mesh, what)


def test_a_mesh_with_other_transports_leaves_the_first_as_it_was():
    def run(mesh):
        group, made = mesh.group("data"), []
        other = mesh.with_transport(lambda axis, group: made.append((axis, group)) or group)
        sl.collectives.all_reduce(torch.ones(4), "data", dst="invariant", mesh=other)
        assert made == [("data", group)] and mesh.group("data") is group
        return mesh.traffic.payload, other.traffic.payload

    assert sl.simulate(run, mesh={"data": 2, "model": 1}) == [({}, {"data": 16})] * 2


def test_what_needs_other_ranks_is_refused_once_they_have_ended():
    """States that a notebook's cell returned, and the next cell reads."""

    def run(mesh):
        params = sl.shard({"w": torch.ones(4, 4)}, mesh, stage=3)
        return sl.make_train_step(lambda p, x: (x @ p["w"]).sum(), params, sl.optim.sgd(0.1))

    (state, step), _ = sl.simulate(run, mesh={"data": 2})
    for use in (lambda: sl.unshard(state.params), lambda: step(state, torch.ones(2, 4))):
        with pytest.raises(MeshError, match=r"simulation of its ranks has ended.*return its result: sl\.unshard"):
            use()
