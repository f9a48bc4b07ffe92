"""The passes over a step's graph, by name, in their order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardlib.collectives.buffers import AxisLink
from shardlib.execute.graph.accumulate import accumulate
from shardlib.execute.graph.clean import clean
from shardlib.execute.graph.fuse import Inductor, module_of
from shardlib.execute.graph.hoist import hoist
from shardlib.execute.graph.land import land
from shardlib.execute.graph.merge import merge
from shardlib.execute.graph.overlap import overlap
from shardlib.execute.graph.recompute import recompute
from shardlib.execute.graph.regather import regather
from shardlib.execute.graph.store import store
from shardlib.execute.graph.trace import Traced
from shardlib.execute.values.keeping import Between

PASSES = ("clean", "hoist", "merge", "recompute", "store", "regather", "overlap")


def require_known(names: Collection[str]) -> None:
    """Refuse names of passes that there are not. Raises `ValueError`."""
    if unknown := sorted(set(names) - set(PASSES)):
        raise ValueError(f"passes {unknown}: there are {', '.join(PASSES)}")


def optimise(
    traced: Traced,
    between: Between,
    lands: Sequence[str | None] = (),
    without: Collection[str] = (),
    summed: int = 0,
    apart: bool = False,
    inductor: Inductor | None = None,
) -> None:
    """Run the passes, but for those named in ``without``, which are for tests and measurements, and make the graph code.

    Args:
        between: how what forward leaves for backward is kept.
        lands: for each gradient that the graph returns the name that `land` calls it by; None if it stays.
        summed: the number of gradients that are added to sums in place of being returned.
        apart: whether backward does not follow on forward, so that what runs at one time is yet to be cut out and overlapped.
        inductor: compiles runs of operations; None where each is a call.
    """
    graph = traced.graph
    links: list[AxisLink] = []
    if "clean" not in without:
        clean(graph)
    if "hoist" not in without:
        hoist(graph)
    if "merge" not in without:
        links = merge(graph)
    if between.how is not None and "recompute" not in without:
        recompute(graph, between.how)
    if "store" not in without:
        links += store(graph, between)
    if "regather" not in without:
        regather(graph, apart)
    if "clean" not in without:
        clean(graph)
    if "overlap" not in without and not apart:
        overlap(graph)
    traced.links += links
    if apart:
        return
    land(graph, traced.gradients, lands)
    if summed:
        accumulate(graph, traced.gradients, summed)
    traced.module = module_of(traced.constants, graph, inductor)
