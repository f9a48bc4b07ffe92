"""A step as one graph: equal to the step without, with the exchanges and the memory that its passes promise."""

import pytest
from helpers.models import share, tiny_gpt, token_batches
from helpers.trees import relative_error

import shardlib as sl
from shardlib.execute.batches import batch_index
from shardlib.execute.graph.alive import kind_of
from shardlib.execute.graph.runner import GraphStage
from shardlib.execute.stages.runner import runner_of
from shardlib.execute.step import LossStep


def both(loss_fn, params, batches, transform, ranks=2, without=(), rng=None):
    """Losses, norms and gradients with and without a graph, and the graphs, of rank 0."""

    def run(mesh):
        sharded, found, graphs = sl.shard(params, mesh, transform), [], []
        plan = sharded.plan

        def graph_stage(*args, **kwargs):
            graphs.append(GraphStage(*args, **kwargs, without=without))
            return graphs[-1]

        for run_by in (runner_of, graph_stage):
            step = LossStep(loss_fn, plan, mesh, False, run_by=run_by)
            for number, batch in enumerate(batches):
                mine = share(batch, batch_index(plan, mesh), plan.batch_ranks)
                key = None if rng is None else rng.fold_in(number)
                got = step(sharded, mine, None, key, comm={}, equal={})
                found.append((got.loss, got.norm, dict(got.grads), got.aux))
        half = len(batches)
        return found[:half], found[half:], [traced.module.graph for traced in graphs[0].graphs], str(graphs[0])

    return sl.simulate(run, mesh={"data": ranks})


def check(results, tolerance=0.0):
    for eager, compiled, graphs, _ in results:
        assert graphs
        for one, other in zip(eager, compiled, strict=True):
            error, path = relative_error(other, one)
            assert error <= tolerance, f"{path}: {error}"
    return results[0][2][0]


def count(graph, kind):
    return sum(kind_of(node) == kind for node in graph.nodes)


CHAINS = {
    "0": sl.zero(0), "1": sl.zero(1), "2": sl.zero(2), "3": sl.zero(3),
    "3 in 2 micro-batches": sl.chain(sl.zero(3), sl.accumulate(2)),
    "2 in 2 micro-batches, together": sl.chain(sl.zero(2), sl.accumulate(2, sync="last")),
    "recomputed": sl.chain(sl.zero(3), sl.remat()),
    "dots kept": sl.chain(sl.zero(2), sl.remat("dots")),
    "bf16": sl.chain(sl.zero(3), sl.precision("bf16")),
    "autocast": sl.chain(sl.zero(3), sl.precision("bf16", autocast=True)),
    "frozen": sl.chain(sl.zero(3), sl.freeze("blocks/0/*")),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_gpt(name):
    """To the bit, with draws whose keys differ from step to step."""
    loss_fn, params = tiny_gpt(dropout=0.1)
    check(both(loss_fn, params, token_batches(3, 12), CHAINS[name], rng=sl.Key(3)))
