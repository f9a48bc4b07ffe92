"""Runs of torch's own operations as code of its compiler, inductor (`make_train_step(..., compile="inductor")`).

The library's kernels, exchanges, draws and writes stay calls, and so do views that others read; what stands between two of
them within one block is a run. Blocks that are alike are compiled once, and inductor keeps its code on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shardlib.common._compat import compiled_by_inductor, has_unknown_sizes, is_operator
from shardlib.execute.graph.nodes import (
    BLOCK,
    DEVICE,
    PHASE,
    changes,
    copied,
    draws,
    given,
    is_view,
    roots_of,
    value_of,
    writes_of,
)
from shardlib.execute.recompute import DOTS

Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # empties the list that it is given
LEAST = 2  # operations of a run that compute, products apart: there is nothing to fuse in fewer
_log = logging.getLogger("shardlib.execute")


class Inductor:
    """Fuses graphs; runs that are alike share their code.

    Args:
        device: on which graphs compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, Compiled | None] = {}  # None for what inductor cannot compile
        self._runs = self._operations = 0  # compiled so far

    def __str__(self) -> str:
        codes = sum(code is not None for code in self._known.values())
        return f"inductor: {codes} pieces of code for {self._runs} runs of {self._operations} operations together"

    def fused(self, graph: Graph) -> Graph:
        """The graph with compiled runs."""
        made, known = Graph(), dict[Node, Node]()
        runs = {run[-1]: run for run in self._found(graph)}
        waiting = {node for run in runs.values() for node in run}
        for node in graph.nodes:
            if node in runs:
                left = self._called(runs[node], made, known)
            else:
                left = [] if node in waiting else [node]
            for each in left:
                copied(each, known, made)
        return made

    def _called(self, run: list[Node], made: Graph, known: dict[Node, Node]) -> list[Node]:
        """Call a run's code in the graph that is made; returns the nodes that are no results of it, and that others read."""
        members = set(run)
        inputs = list(dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in members))
        needed = {node for node in run if any(user not in members for user in node.users)}
        for node in reversed(run):
            if node in needed and is_view(node):
                needed |= members & {*node.all_input_nodes}
        results = [node for node in run if node in needed and not is_view(node)]
        code = self._compiled(run, inputs, results) if results else None
        if code is None:
            return run
        self._runs, self._operations = self._runs + 1, self._operations + len(run)
        taken = made.call_function(_listed, tuple(known[each] for each in inputs))
        called = made.call_function(code, (taken,))
        for number, node in enumerate(results):
            known[node] = made.call_function(getitem, (called, number))
            known[node].meta = dict(node.meta)
        return [node for node in run if node in needed and is_view(node)]

    def _found(self, graph: Graph) -> Iterator[list[Node]]:
        """Runs of operations that are worth compiling."""
        roots = roots_of(graph)
        writes = writes_of(roots)
        written = {node for node, root in roots.items() if root in writes}  # equal values may get one memory
        run: list[Node] = []
        block: Any = None

        def ended() -> Iterator[list[Node]]:
            while run and is_view(run[-1]):
                run.pop()
            if sum(_computes(node) and node.target not in DOTS for node in run) >= LEAST:
                yield list(run)
            run.clear()

        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            source = given(node) if _follows(node) else node
            now = source.meta.get(PHASE), source.meta.get(BLOCK)
            fits = self._fits(node, written) and (source is node or source in run)
            if run and (not fits or now != block):
                yield from ended()
            if fits and (run or not (is_view(node) or _follows(node))):
                run.append(node)
                block = now
        yield from ended()

    def _fits(self, node: Node, written: set[Node]) -> bool:
        """Whether a node may be in a run."""
        if node.op != "call_function" or node in written or any(each in written for each in node.all_input_nodes):
            return False
        if _follows(node):
            return self._fits(given(node), written)
        if not is_operator(node.target) or node.target.namespace not in ("aten", "prims"):  # type: ignore[union-attr]
            return False
        if changes(node) or draws(node) or not all(map(self._is_plain, (node, *node.all_input_nodes))):
            return False
        return isinstance(value_of(node), torch.Tensor) or _taken_at_once(node)

    def _is_plain(self, node: Node) -> bool:
        """Whether what a node makes is one or several tensors of known sizes on the device."""
        value = value_of(node)
        values = value if isinstance(value, tuple | list) else [value]
        plain = all(isinstance(each, torch.Tensor) and not has_unknown_sizes(each) for each in values)
        return plain and node.meta.get(DEVICE, self._device) == self._device

    def _compiled(self, run: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> Compiled | None:
        """The code of a run, which gives ``results``."""
        number = {node: place for place, node in enumerate((*inputs, *run))}
        forms = [(tuple(value.shape), value.stride(), value.dtype) for value in map(value_of, inputs)]

        def named(argument: Any) -> Any:
            if isinstance(argument, Node):
                return "node", number[argument]
            if isinstance(argument, tuple | list):
                return tuple(map(named, argument))
            return type(argument), str(argument)

        calls = [
            (node.target, named(node.args), *((name, named(each)) for name, each in node.kwargs.items()))
            for node in run
        ]
        key = *forms, *calls, *(number[node] for node in results)
        if key not in self._known:
            graph, known = Graph(), dict[Node, Node]()
            for place, node in enumerate(inputs):
                known[node] = graph.placeholder(f"input_{place}")
            for node in run:
                copied(node, known, graph)
            graph.output([known[node] for node in results])
            self._known[key] = self._code(graph, *(list(map(value_of, nodes)) for nodes in (inputs, results)))
        return self._known[key]

    def _code(self, graph: Graph, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Compiled | None:
        try:
            return compiled_by_inductor(graph, inputs, results, self._device)
        except Exception as error:
            line = str(error).strip().partition("\n")[0]
            _log.warning(
                'compile="inductor": operations are not compiled and run one by one (%s: %s). Install a compiler for C++, on '
                "a GPU also Triton, or use compile=True",
                type(error).__name__,
                line,
            )
            return None


def module_of(constants: Mapping[str, torch.Tensor], graph: Graph, inductor: Inductor | None) -> GraphModule:
    """A graph as code, with compiled runs if ``inductor`` makes them."""
    return GraphModule(dict(constants), graph if inductor is None else inductor.fused(graph))


def _listed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """A list that compiled code empties: what the graph itself passes would be alive until the code returns."""
    return list(tensors)


def _follows(node: Node) -> bool:
    """Whether a node takes one of an operator's results."""
    return node.target is getitem


def _computes(node: Node) -> bool:
    return not is_view(node) and not _follows(node)


def _taken_at_once(node: Node) -> bool:
    """Whether the results of an operator with several are all taken right behind it."""
    behind, users = node.next, set(node.users)
    while behind in users:
        users.remove(behind)
        behind = behind.next
    return not users
