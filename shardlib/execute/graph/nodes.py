"""What passes ask of a graph's nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from shardlib.collectives.buffers import GATHER, SCATTER, SUM, AxisLink, link_of
from shardlib.common._compat import arguments_of, estimated, is_operator, to_copy, unsafe_view
from shardlib.common.writes import targets
from shardlib.execute.values.wholes import FETCH, REDUCE

FORWARD, BACKWARD, REDUCTION = "forward", "backward", "reduction"
# Keys of a node's meta: the part of the step it belongs to, the number of its block, whether it is part of a decision, and
# the device of what it makes.
PHASE, BLOCK, DECIDED, DEVICE = "phase", "block", "decided", "device"
# The names that blocks give to what a node makes; and, if that is an input of a block or of a checkpoint, the first one's
# number among all of these, and among blocks alone (None of a checkpoint).
NAMES, GIVEN = "names", "given"

GATHERS, REDUCTIONS = (GATHER, FETCH), (SCATTER, SUM, REDUCE)
EXCHANGES = (*GATHERS, *REDUCTIONS)
_aten = torch.ops.aten
# Operators whose results are views, copies or casts of what they are given: cheap, and with no other input.
RELAID: set[Callable[..., Any]] = {
    operator.getitem, _aten.view.default, _aten.split_with_sizes.default, _aten.split_with_sizes_copy.default,
    _aten.split.Tensor, _aten.slice.Tensor, _aten.select.int, _aten.t.default, _aten.transpose.int, _aten.permute.default,
    _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.clone.default, _aten.detach.default,
    _aten.alias.default, _aten.reshape.default, to_copy, unsafe_view,
}  # fmt: skip

COPIES = {_aten.split_with_sizes_copy.default, _aten.clone.default, to_copy}  # those that make memory, or lists of it


def fetched(graph: Graph) -> dict[Node, str]:
    """The nodes that hold gathered parameters, or what is a view, a copy or a cast of them: node -> the unit."""
    found: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        if node.target in GATHERS and all(each in found or from_shards(each) for each in inputs):
            found[node] = link_of(node.args[1]).label
        elif node.target in RELAID and inputs and inputs[0] in found and len(inputs) == 1:
            found[node] = found[inputs[0]]
    return found


def from_shards(node: Node) -> bool:
    """Whether a node is an input of the graph, or several of them in one message."""
    return node.op == "placeholder" or (
        bool(node.args) and all(one.op == "placeholder" for one in node.all_input_nodes)
    )


def staying(graph: Graph) -> set[Node]:
    """The nodes that hold gathered parameters which stay from forward to backward."""
    gathers = [node for node in of_kind(graph, GATHERS) if link_at(node).stays]
    return {node for gather in gathers for node in (gather, result_of(gather))}


def result_of(exchange: Node) -> Node:
    """The tensor that an exchange's operator returns, the first one in a list."""
    return next(item for item in exchange.users if item.args[1] == 0)


def link_at(exchange: Node) -> AxisLink:
    """What an exchange goes along."""
    return link_of(exchange.args[1])  # type: ignore[arg-type]


def given(node: Node) -> Any:
    """What a call is given first."""
    return node.args[0]


def sent(exchange: Node) -> list[Node]:
    """The buffers that an exchange is given."""
    buffers = given(exchange)
    return buffers if isinstance(buffers, list) else [buffers]


def value_of(node: Any) -> Any:
    """What a node makes, without values."""
    return node.meta.get("val")


def nbytes(node: Node) -> int:
    """Bytes of what a node makes, where they are known in a run alone the likely ones; 0 of what is no tensor."""
    value = value_of(node)
    return estimated(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def is_view(node: Node) -> bool:
    """Whether what a node makes lies in the memory of what it is given."""
    if node.target is operator.getitem:
        return is_view(given(node))
    if node.target in RELAID:
        return node.target not in COPIES
    return is_operator(node.target) and node.target.is_view  # type: ignore[union-attr]


def changes(node: Node) -> list[Node]:
    """What a node writes to."""
    if node.op != "call_function" or not is_operator(node.target):
        return []
    return list(targets(node.target, node.args, node.kwargs, Node))


def lies_in(node: Node) -> Node | None:
    """The node in whose memory a node's result lies; None if it makes memory of its own, or is an input."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = given(node)
        return source if source.target in EXCHANGES or is_view(source) else None
    written = changes(node)
    return given(node) if is_view(node) or (written and given(node) in written) else None


def roots_of(graph: Graph) -> dict[Node, Node]:
    """Node -> the node that made the memory in which its result lies."""
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        source = lies_in(node)
        roots[node] = roots.get(source, node) if isinstance(source, Node) else node
    return roots


def writes_of(roots: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """The nodes that write, in order, by the node that made the memory, as `roots_of` knows it."""
    found: dict[Node, list[Node]] = {}
    for node in roots:
        for each in changes(node):
            found.setdefault(roots[each], []).append(node)
    return found


def draws(node: Node) -> bool:
    """Whether a node draws from torch's own generators. Fused attention without dropout has the tag and draws nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [name for name, _ in arguments_of(node.target)]
    if "dropout_p" not in names:
        return True
    arguments: dict[str, Any] = dict(zip(names, node.args)) | node.kwargs
    return bool(arguments.get("dropout_p", 0.0))


def copied(node: Node, known: dict[Node, Node], graph: Graph) -> Node:
    """A copy of a node at the graph's place of insertion, with ``known`` in the place of its inputs."""
    made = graph.node_copy(node, lambda each: known.get(each, each))
    known[node] = made
    return made


def marks_of(node: Node) -> dict[str, Any]:
    """What is noted of a node, but for what it makes."""
    return {key: value for key, value in node.meta.items() if key != "val"}


def call_before(graph: Graph, at: Node, target: Callable[..., Any], args: tuple[Any, ...], like: Node) -> Node:
    """A call in front of a node, with the marks of another one."""
    with graph.inserting_before(at):
        made = graph.call_function(target, args)
    made.meta = marks_of(like)
    return made


def replace(graph: Graph, node: Node, other: Node) -> None:
    """Let a node take another one's place."""
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def added_input(graph: Graph, name: str) -> Node:
    """A further input at the graph's place of insertion, of a name that no node has: a sum is called ``sum_1`` too."""
    made = graph.placeholder(name)
    made.target = made.name
    return made


def positions(graph: Graph) -> dict[Node, int]:
    return {node: place for place, node in enumerate(graph.nodes)}


def of_kind(graph: Graph, targets: Iterable[Any]) -> Iterator[Node]:
    """The calls of some operators, in order."""
    wanted = tuple(targets)
    return (node for node in list(graph.nodes) if node.op == "call_function" and node.target in wanted)
