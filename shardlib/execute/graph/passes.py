"""The passes over a step's graph, by name, in their order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardlib.execute.graph.clean import clean
from shardlib.execute.graph.fuse import Inductor, module_of
from shardlib.execute.graph.hoist import hoist
from shardlib.execute.graph.merge import merge
from shardlib.execute.graph.overlap import overlap
from shardlib.execute.graph.recompute import recompute
from shardlib.execute.graph.regather import regather
from shardlib.execute.graph.store import store
from shardlib.execute.graph.sums import accumulate, land
from shardlib.execute.graph.trace import Traced
from shardlib.execute.values.keeping import Between

PASSES = ("clean", "hoist", "merge", "recompute", "store", "regather", "overlap")


def require_known(names: Collection[str]) -> None:
    """Refuse names of passes that there are not. Raises `ValueError`."""
    if unknown := sorted(set(names) - set(PASSES)):
        raise ValueError(f"passes {unknown}: there are {', '.join(PASSES)}")


@dataclass(frozen=True)
class GraphOptions:
    """How graphs are optimised.

    Attributes:
        without: the names of passes that are left out, for tests and measurements.
        inductor: compiles runs of operations; None where each is a call.
    """

    without: Collection[str] = ()
    inductor: Inductor | None = None

    def has(self, name: str) -> bool:
        """Whether a pass works."""
        return name not in self.without


def optimise(
    traced: Traced,
    between: Between,
    options: GraphOptions,
    lands: Sequence[str | None] = (),
    summed: int = 0,
    apart: bool = False,
) -> None:
    """Run the passes, and make the graph code.

    Args:
        between: how what forward leaves for backward is kept.
        lands: for each gradient that the graph returns the name that `land` calls it by; None if it stays.
        summed: the number of gradients that are added to sums in place of being returned.
        apart: whether backward does not follow on forward, so that what runs at one time is yet to be cut out and overlapped.
    """
    graph = traced.graph
    if options.has("clean"):
        clean(graph)
    if options.has("hoist"):
        hoist(graph)
    if options.has("merge"):
        traced.links += merge(graph)
    if between.how is not None and options.has("recompute"):
        recompute(graph, between.how)
    if options.has("store"):
        traced.links += store(graph, between)
    if options.has("regather"):
        regather(graph, apart)
    if options.has("clean"):
        clean(graph)
    if apart:
        return
    if options.has("overlap"):
        overlap(graph)
    land(graph, traced.gradients, lands)
    if summed:
        accumulate(graph, traced.gradients, summed)
    traced.module = module_of(traced.constants, graph, options.inductor)
