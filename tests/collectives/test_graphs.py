"""Exchanges in graphs: operators that start and wait, meshes by number, and torch.compile."""

import gc
import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl
from shardlib import collectives
from shardlib.errors import LossError, MeshError

N = 2
X = torch.arange(8.0, dtype=torch.float64).view(2, 4).sin()


def all_pairs(x, mesh=None):
    """A loss that goes through every pair."""
    how = {"axis": "data", "mesh": mesh}
    x = collectives.all_reduce(x.sin(), dst="varying", **how) * x
    x = collectives.reduce_scatter(collectives.all_gather(x.sin(), dim=1, **how), dim=1, **how)
    x = collectives.copy(collectives.all_reduce(x.sin(), dst="invariant", **how), **how)
    x = collectives.split(collectives.all_gather(x.sin(), dst="invariant", **how), **how)
    x = collectives.all_to_all(x.sin(), split_dim=-1, concat_dim=0, **how)
    x = collectives.permute(x.sin(), pairs=[(0, 1)], **how) + x
    return collectives.broadcast(x.sin(), source=1, **how).sum()


def started(graph, name):
    return [node for node in graph.graph.nodes if name in str(node.target)]


def test_work_moves_between_start_and_wait():
    def run(mesh):
        fn = lambda x: collectives.all_gather(x, "data") * x.sin().sum()  # noqa: E731
        graph = make_fx(fn, tracing_mode="fake")(torch.zeros_like(X))
        (start,), (wait,), (sine,) = (
            started(graph, name) for name in ("all_gather_start", "shardlib.wait", "aten.sin")
        )
        nodes = list(graph.graph.nodes)
        assert nodes.index(start) + 1 == nodes.index(wait) < nodes.index(sine)
        start.append(sine)
        graph.recompile()
        x = X + mesh.rank
        return torch.equal(graph(x), fn(x))

    assert sl.simulate(run, mesh={"data": N}) == [True] * N


def test_a_second_wait_is_refused():
    def run(mesh):
        graph = make_fx(lambda x: collectives.all_gather(x, "data"), tracing_mode="fake")(X)
        (wait,) = started(graph, "shardlib.wait")
        with graph.graph.inserting_after(wait):
            again = graph.graph.node_copy(wait)
        with graph.graph.inserting_after(again):
            total = graph.graph.call_function(operator.add, (wait, again))
        graph.graph.output_node().args = (total,)
        graph.recompile()
        with pytest.raises(LossError, match="was waited for before: copy its start and wait together"):
            graph(X)
        return True

    assert sl.simulate(run, mesh={"data": N}) == [True] * N


def test_what_nobody_uses_is_dropped():
    def run(mesh):
        graph = make_fx(lambda x: (collectives.all_gather(x, "data"), x)[1], tracing_mode="fake")(X)
        graph.graph.eliminate_dead_code()
        return len(started(graph, "shardlib"))

    assert sl.simulate(run, mesh={"data": N}) == [0] * N


def test_a_graph_does_not_keep_its_mesh():
    graph = make_fx(lambda x: collectives.all_gather(x, "data", mesh=sl.make_mesh()), tracing_mode="fake")(X)
    gc.collect()
    with pytest.raises(MeshError, match="the mesh of a traced function is gone"):
        graph(X)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    """One graph, in forward and backward, and with torch.func inside; each rank's mesh by its own number."""

    def run(mesh):
        x = X + mesh.rank
        loss = lambda x: all_pairs(x, mesh)  # noqa: E731
        gradient = torch.func.grad(loss)
        samples = torch.stack([x, x.cos()])
        wanted = gradient(x), torch.vmap(gradient)(samples)
        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        leaf = x.clone().requires_grad_()
        compiled(leaf).backward()
        found = leaf.grad, torch.compile(torch.vmap(gradient), fullgraph=True, backend=backend)(samples)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        return float(compiled(x) - loss(x))

    assert sl.simulate(run, mesh={"data": N}) == [0.0] * N


def test_a_surrounding_mesh_is_not_mixed_up():
    """torch.compile has no guard for it, so that another rank's compiled function would send on this one's behalf."""
    compiled, meshes = torch.compile(lambda x: collectives.all_gather(x, "data"), fullgraph=True, backend="eager"), []

    def run(mesh):
        meshes.append(mesh)
        return compiled(X)

    assert torch.equal(sl.simulate(run, mesh={"data": 1})[0], X)
    with pytest.raises(MeshError, match=r"compiled on mesh\(data=1\) is called on mesh\(data=1\): pass mesh="):
        sl.simulate(run, mesh={"data": 1})
